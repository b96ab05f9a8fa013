/* Copies of a matrix, each in its own type, and the shapes that producers write.
 *
 * Packed encodings are refused at start-up: what quantise has to write here is
 * plain.  Where the types are equal the bits are copied, a NaN's too.
 * Moves: the source once, each result once.
 */
#include "kernels/cuda/rows.cuh"

namespace {

static bool is_plain(const struct operand *o) { return encoding_is_plain(&o->encoding); }

static void add_target(struct targets *t, void *at, bool is_bf16) {
  for (int k = 0; k < t->count; k++)
    if (t->at[k] == at) return; /* an operand that is the plain matrix itself */
  t->at[t->count] = at;
  t->is_bf16[t->count++] = is_bf16;
}

static struct targets collect(const struct emission *out, int64_t rows, int64_t cols) {
  struct targets t = {};
  if (out->plain) {
    CUDA_REQUIRE(out->plain->rows == rows && out->plain->cols == cols, "the plain matrix does not have the result's shape");
    add_target(&t, out->plain->data, out->plain->dtype == DTYPE_BF16);
  }
  const struct operand *view[2] = {out->row, out->column};
  for (int v = 0; v < 2; v++) {
    const struct operand *o = view[v];
    if (!o) continue;
    CUDA_REQUIRE(is_plain(o), "the operand's encoding is not executable");
    CUDA_REQUIRE(o->view == (v == 0 ? VIEW_ROW : VIEW_COLUMN), "the operand's view is not the one it is emitted as");
    CUDA_REQUIRE(o->rows == (v == 0 ? rows : cols) && o->cols == (v == 0 ? cols : rows),
                 "the operand's shape is not the source's");
    CUDA_REQUIRE(o->codes != NULL, "the operand has no memory");
    add_target(&t, o->codes, o->encoding.format == FORMAT_BF16);
  }
  return t;
}

enum { THREADS = 256, VECTOR = 8, PIECE = THREADS * VECTOR };

/* n elements, whatever their rows: the last vector alone may not be whole. */
template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(THREADS) copy(const __grid_constant__ struct targets to, const T *source, int64_t n) {
  for (int64_t first = (int64_t)blockIdx.x * PIECE; first < n; first += (int64_t)gridDim.x * PIECE) {
    const int64_t i = first + (int64_t)threadIdx.x * VECTOR;
    packed<T, VECTOR> p;
    flat_load<ALIGNED>(p, source, i, n);
    if (ALIGNED && i + VECTOR <= n) targets_store<true>(to, 0, i, n, p);
    else targets_store<false>(to, 0, i, n, p);
  }
}

}  // namespace

struct targets targets_of(const struct emission *out, enum dtype type, int64_t rows, int64_t cols) {
  CUDA_REQUIRE(!out->plain || out->plain->dtype == type, "the emission's plain matrix is not of the result's type");
  return collect(out, rows, cols);
}

void cuda_quantise(struct device *device, const struct emission *out, const struct matrix *source) {
  struct cuda_device *d = cuda_of(device);
  const struct targets to = collect(out, source->rows, source->cols);
  const int64_t n = source->rows * source->cols;
  CUDA_REQUIRE(source->dtype != DTYPE_F32 || !out->plain || out->plain->dtype != DTYPE_BF16 ||
                   ((!out->row || out->row->encoding.format != FORMAT_F32) &&
                    (!out->column || out->column->encoding.format != FORMAT_F32)),
               "an FP32 operand beside a plain result rounded to BF16");
  if (n == 0 || to.count == 0) return;
  with_type(source->dtype, [&](auto zero) {
    using T = decltype(zero);
    with_bool(cuda_whole(0, 1, source->data) && targets_whole(&to), [&](auto aligned) {
      CUDA_LAUNCH(d, (copy<T, decltype(aligned)::value>), grid_of_tasks((n + PIECE - 1) / PIECE), THREADS, 0, to,
                  (const T *)source->data, n);
    });
  });
}
