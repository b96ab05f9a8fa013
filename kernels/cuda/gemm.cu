/* `contract` of plain operands by cuBLASLt.
 *
 * cuBLASLt's matrices are column-major, so what is row-major [r, c] here is
 * [c, r] there with c as its leading dimension, and out = A B^T is computed as
 * out^T = B A^T: its first operand is our b, its second our a.
 *
 *   operand      view     is stored as   column-major   read as
 *   b, first     row      [N, K]         K x N, ld K    transposed
 *                column   [K, N]         N x K, ld N    as it is
 *   a, second    row      [M, K]         K x M, ld K    as it is
 *                column   [K, M]         M x K, ld M    transposed     (some rows: M is a's, not theirs)
 *   out, add              [M, N]         N x M, ld N
 *
 * Sums are FP32 (no TF32 for FP32 operands).  The algorithm of a product depends on
 * its shape, views, types and pointers' alignment alone: of those that the library's
 * heuristic names for them and that do not reduce in place or in the output's type the
 * first, or of a large BF16 product the first with PREFERRED_TILE; so a run, and what
 * goes on with it, has the same bits on the same GPU model with the same library version:
 * nothing is timed.  It is chosen at the product's first use; cuda_contract_choices tells
 * what was, for the run's record.
 *
 * Types that the library does not write (a BF16 result of FP32 operands, an FP32
 * addend of a BF16 result) take a way by FP32 results in scratch, some rows at a time.
 */
#include <initializer_list>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/libraries.h"
#include "kernels/cuda/names.h"

extern "C" {
#include "base/log.h"
}

/* The workspace that NVIDIA recommends for Hopper, and as much for FP32 rows. */
enum { WORKSPACE = 32 << 20, ROWS = 32 << 20, PRODUCTS = 128, CANDIDATES = 8 };

/* Products whose sides all have so many elements keep an H200 at its power limit.  There this
 * tile is the fastest, or within 1 % of it, for every linear of Llama 8B in all three passes;
 * the heuristic's first choice, made for a cool GPU, is up to 7 % behind (docs/performance.md). */
enum { LARGE = 2048, PREFERRED_TILE = CUBLASLT_MATMUL_TILE_256x128 };

/* What an algorithm is chosen for. */
struct cuda_product_key {
  int64_t m, n, k, lead_a; /* elements from one stored row of a to the next */
  enum dtype operands, out;
  enum view view_a, view_b;
  int add; /* 0: none, 1: out itself, 2: another matrix */
  uint32_t align_a, align_b, align_add, align_out;
};

struct cuda_product {
  struct cuda_product_key key;
  cublasLtMatmulDesc_t operation;
  cublasLtMatrixLayout_t first, second, out;
  cublasLtMatmulAlgo_t algorithm;
  size_t workspace;
};

struct cuda_gemm {
  const struct cuda_cublaslt *lt;
  cublasLtHandle_t handle;
  struct cuda_product products[PRODUCTS];
  int count, next; /* the one that goes when there are PRODUCTS */
  char fault[256];
};

namespace {

cudaDataType type_of(enum dtype t) { return t == DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F; }

enum dtype dtype_of(const struct operand *o) { return o->encoding.format == FORMAT_BF16 ? DTYPE_BF16 : DTYPE_F32; }

__device__ float load(float x) { return x; }
__device__ float load(uint16_t x) { return bf16_decode(x); }

/* The largest power of two up to 256 that divides an address; a NULL one's is 256. */
uint32_t alignment(const void *p) {
  uint32_t a = 256;
  while (reinterpret_cast<uintptr_t>(p) % a) a /= 2;
  return a;
}

bool same_key(const struct cuda_product_key *a, const struct cuda_product_key *b) {
  return a->m == b->m && a->n == b->n && a->k == b->k && a->lead_a == b->lead_a && a->operands == b->operands && a->out == b->out && a->view_a == b->view_a &&
         a->view_b == b->view_b && a->add == b->add && a->align_a == b->align_a && a->align_b == b->align_b &&
         a->align_add == b->align_add && a->align_out == b->align_out;
}

/* Keeps a library's error for `synchronize`. */
bool check(struct cuda_device *d, cublasStatus_t status, const char *call, const struct cuda_product_key *k) {
  if (status == CUBLAS_STATUS_SUCCESS) return true;
  struct cuda_gemm *g = d->gemm;
  if (d->fault == cudaSuccess)
    snprintf(g->fault, sizeof g->fault, "contract of %s [%lld, %lld, %lld] to %s: %s gives %s", dtype_name(k->operands),
             static_cast<long long>(k->m), static_cast<long long>(k->n), static_cast<long long>(k->k), dtype_name(k->out), call,
             g->lt->GetStatusName(status));
  cuda_keep_fault(d, cudaErrorUnknown, g->fault);
  return false;
}

void destroy(const struct cuda_cublaslt *lt, struct cuda_product *p) {
  if (p->operation) lt->MatmulDescDestroy(p->operation);
  for (cublasLtMatrixLayout_t l : {p->first, p->second, p->out})
    if (l) lt->MatrixLayoutDestroy(l);
  memset(p, 0, sizeof *p);
}

bool describe_product(struct cuda_device *d, struct cuda_product *p) {
  const struct cuda_cublaslt *lt = d->gemm->lt;
  const struct cuda_product_key *k = &p->key;
  const bool row_a = k->view_a == VIEW_ROW, row_b = k->view_b == VIEW_ROW;
  const cublasOperation_t first = row_b ? CUBLAS_OP_T : CUBLAS_OP_N, second = row_a ? CUBLAS_OP_N : CUBLAS_OP_T;
  const uint64_t m = static_cast<uint64_t>(k->m), n = static_cast<uint64_t>(k->n), kk = static_cast<uint64_t>(k->k);
  return check(d, lt->MatmulDescCreate(&p->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate", k) &&
         check(d, lt->MatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first), "its TRANSA", k) &&
         check(d, lt->MatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second), "its TRANSB", k) &&
         check(d, lt->MatrixLayoutCreate(&p->first, type_of(k->operands), row_b ? kk : n, row_b ? n : kk, row_b ? k->k : k->n),
               "cublasLtMatrixLayoutCreate", k) &&
         check(d, lt->MatrixLayoutCreate(&p->second, type_of(k->operands), row_a ? kk : m, row_a ? m : kk, k->lead_a),
               "cublasLtMatrixLayoutCreate", k) &&
         check(d, lt->MatrixLayoutCreate(&p->out, type_of(k->out), n, m, k->n), "cublasLtMatrixLayoutCreate", k);
}

uint32_t tile_of(const struct cuda_cublaslt *lt, const cublasLtMatmulAlgo_t *algorithm) {
  uint32_t tile = CUBLASLT_MATMUL_TILE_UNDEFINED;
  size_t written;
  lt->MatmulAlgoConfigGetAttribute(algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile, sizeof tile, &written);
  return tile;
}

enum { TEXT = 512 };

/* A product in words, no two alike: what is usual is left out. */
void product_text(const struct cuda_product_key *k, char text[TEXT]) {
  static const char *const added[] = {"", ", added to it", ", added to another"};
  char lead[32] = "", aligned[64] = "";
  if (k->lead_a != (k->view_a == VIEW_ROW ? k->k : k->m)) snprintf(lead, sizeof lead, ", of %lld rows", static_cast<long long>(k->lead_a));
  if (k->align_a < 256 || k->align_b < 256 || k->align_add < 256 || k->align_out < 256)
    snprintf(aligned, sizeof aligned, ", aligned to %u, %u, %u, %u bytes", k->align_a, k->align_b, k->align_add, k->align_out);
  snprintf(text, TEXT, "%s [%lld, %lld, %lld] %s x %s%s to %s%s%s", dtype_name(k->operands), static_cast<long long>(k->m),
           static_cast<long long>(k->n), static_cast<long long>(k->k), k->view_a == VIEW_ROW ? "row" : "column",
           k->view_b == VIEW_ROW ? "row" : "column", lead, dtype_name(k->out), added[k->add], aligned);
}

/* All that makes an algorithm, and what it is one of: the library's version, the GPU. */
void choice_text(const struct cuda_device *d, const struct cuda_product *p, char text[TEXT]) {
  static const struct {
    cublasLtMatmulAlgoConfigAttributes_t attribute;
    const char *name;
    size_t bytes;
  } parts[] = {
      {CUBLASLT_ALGO_CONFIG_ID, "algorithm", 4},
      {CUBLASLT_ALGO_CONFIG_TILE_ID, "tile", 4},
      {CUBLASLT_ALGO_CONFIG_STAGES_ID, "stages", 4},
      {CUBLASLT_ALGO_CONFIG_SPLITK_NUM, "splits of K", 4},
      {CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, "scheme", 4},
      {CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, "swizzle", 4},
      {CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, "option", 4},
      {CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, "inner shape", 2},
      {CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, "cluster", 2},
  };
  cuda_contract_describe(d, text, TEXT);
  size_t n = strlen(text);
  n += static_cast<size_t>(snprintf(text + n, TEXT - n, " on %.96s:", d->name));
  for (const auto &part : parts) {
    uint32_t value = 0; /* little-endian: two bytes are its lower ones */
    size_t written;
    if (d->gemm->lt->MatmulAlgoConfigGetAttribute(&p->algorithm, part.attribute, &value, part.bytes, &written) == CUBLAS_STATUS_SUCCESS)
      n += static_cast<size_t>(snprintf(text + n, TEXT - n, " %s %u,", part.name, value));
  }
  snprintf(text + n, TEXT - n, " %zu bytes", p->workspace);
}

/* Of the heuristic's results the one that is taken; -1: none can be. */
int chosen(const struct cuda_cublaslt *lt, const struct cuda_product_key *k, const cublasLtMatmulHeuristicResult_t *found, int count) {
  const bool large = k->operands == DTYPE_BF16 && k->m >= LARGE && k->n >= LARGE && k->k >= LARGE;
  int first = -1;
  for (int i = 0; i < count; i++) {
    if (found[i].state != CUBLAS_STATUS_SUCCESS || found[i].workspaceSize > WORKSPACE) continue;
    if (!large || tile_of(lt, &found[i].algo) == PREFERRED_TILE) return i;
    if (first < 0) first = i;
  }
  return first;
}

bool choose_algorithm(struct cuda_device *d, struct cuda_product *p) {
  const struct cuda_cublaslt *lt = d->gemm->lt;
  const struct cuda_product_key *k = &p->key;
  cublasLtMatmulPreference_t preference = NULL;
  if (!check(d, lt->MatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate", k)) return false;
  const uint64_t workspace = WORKSPACE;
  const uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  const struct {
    cublasLtMatmulPreferenceAttributes_t attribute;
    const void *value;
    size_t bytes;
  } wishes[] = {
      {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace},
      {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &scheme, sizeof scheme},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &k->align_b, sizeof k->align_b}, /* the library's A is our b */
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &k->align_a, sizeof k->align_a},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &k->align_add, sizeof k->align_add},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &k->align_out, sizeof k->align_out},
  };
  bool good = true;
  for (const auto &w : wishes)
    good = good && check(d, lt->MatmulPreferenceSetAttribute(preference, w.attribute, w.value, w.bytes), "a preference", k);
  cublasLtMatmulHeuristicResult_t found[CANDIDATES];
  int count = 0;
  good = good && check(d,
                       lt->MatmulAlgoGetHeuristic(d->gemm->handle, p->operation, p->first, p->second, p->out, p->out, preference, CANDIDATES,
                                                  found, &count),
                       "cublasLtMatmulAlgoGetHeuristic", k);
  lt->MatmulPreferenceDestroy(preference);
  if (!good) return false;
  const int i = chosen(lt, k, found, count);
  if (i < 0) return check(d, CUBLAS_STATUS_NOT_SUPPORTED, "cublasLtMatmulAlgoGetHeuristic", k);
  p->algorithm = found[i].algo;
  p->workspace = found[i].workspaceSize;
  char product[TEXT], choice[TEXT];
  product_text(k, product);
  choice_text(d, p, choice);
  log_debug("contract %s: %s", product, choice);
  return true;
}

/* The product's descriptors and algorithm, made at its first use. */
const struct cuda_product *product_of(struct cuda_device *d, const struct cuda_product_key *key) {
  struct cuda_gemm *g = d->gemm;
  for (int i = 0; i < g->count; i++)
    if (same_key(&g->products[i].key, key)) return &g->products[i];
  struct cuda_product made = {};
  made.key = *key;
  if (!describe_product(d, &made) || !choose_algorithm(d, &made)) {
    destroy(g->lt, &made);
    return NULL;
  }
  struct cuda_product *place = &g->products[g->count < PRODUCTS ? g->count++ : g->next++ % PRODUCTS];
  destroy(g->lt, place);
  *place = made;
  return place;
}

/* out rows [first, first + rows) = those of a, times b^T (+ add), types that the library has.
 * `out` and `add` point at row `first`. */
void multiply(struct cuda_device *d, void *out, enum dtype type, const struct operand *a, int64_t first, int64_t rows,
              const struct operand *b, const void *add) {
  const enum dtype operands = dtype_of(a);
  const int64_t skip = (a->view == VIEW_ROW ? first * a->cols : first) * static_cast<int64_t>(dtype_bytes(operands));
  const void *from = a->codes + skip;
  const struct cuda_product_key key = {rows, b->rows, a->cols, a->view == VIEW_ROW ? a->cols : a->rows, operands, type, a->view, b->view,
                                  !add ? 0 : add == out ? 1 : 2,
                                  alignment(from), alignment(b->codes), alignment(add ? add : out), alignment(out)};
  const struct cuda_product *p = product_of(d, &key);
  if (!p) return;
  const float alpha = 1.0f, beta = add ? 1.0f : 0.0f;
  d->last_kernel = "contract (cuBLASLt)";
  check(d,
        d->gemm->lt->Matmul(d->gemm->handle, p->operation, &alpha, b->codes, p->first, from, p->second, &beta, add ? add : out, p->out, out,
                            p->out, &p->algorithm, d->scratch, WORKSPACE, d->stream),
        "cublasLtMatmul", &key);
}

enum { THREADS = 256 };

/* BF16 results of FP32 sums; add may be NULL. */
template <class Add>
__global__ void round_sums(uint16_t *out, const float *sums, const Add *add, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (i >= count) return;
  float v = sums[i];
  if (add) v = v + load(add[i]);
  out[i] = bf16_encode(v == v ? v : F32_NAN);
}

/* BF16 results by way of FP32 ones, as many rows at a time as lie in scratch. */
void multiply_by_rows(struct cuda_device *d, struct matrix *out, const struct operand *a, const struct operand *b, const struct matrix *add) {
  const int64_t cols = out->cols, most = ROWS / (cols * static_cast<int64_t>(sizeof(float)));
  CUDA_REQUIRE(most > 0, "a row of the result does not lie in scratch");
  float *sums = reinterpret_cast<float *>(d->scratch + WORKSPACE);
  for (int64_t first = 0; first < out->rows; first += most) {
    const int64_t rows = out->rows - first < most ? out->rows - first : most, count = rows * cols;
    const unsigned blocks = cuda_grid((count + THREADS - 1) / THREADS);
    uint16_t *to = static_cast<uint16_t *>(out->data) + first * cols;
    multiply(d, sums, DTYPE_F32, a, first, rows, b, NULL);
    if (add && add->dtype == DTYPE_BF16)
      CUDA_LAUNCH(d, (round_sums<uint16_t>), blocks, THREADS, 0, to, sums, static_cast<const uint16_t *>(add->data) + first * cols, count);
    else
      CUDA_LAUNCH(d, (round_sums<float>), blocks, THREADS, 0, to, sums, add ? static_cast<const float *>(add->data) + first * cols : NULL,
                  count);
  }
}

}  // namespace

extern "C" {

void cuda_contract(struct device *dd, struct matrix *out, const struct operand *a, const struct operand *b, const struct matrix *add) {
  struct cuda_device *d = cuda_of(dd);
  CUDA_REQUIRE(encoding_is_plain(&a->encoding) && a->encoding.format == b->encoding.format,
               "operands that are not both bf16 or both fp32");
  CUDA_REQUIRE(a->rows > 0 && b->rows > 0 && a->cols > 0, "empty operand");
  CUDA_REQUIRE(a->cols == b->cols, "operands differ in cols");
  CUDA_REQUIRE(out->rows == a->rows && out->cols == b->rows, "out is not [a.rows, b.rows]");
  CUDA_REQUIRE(!add || ((add->dtype == out->dtype || add->dtype == DTYPE_F32) && add->rows == out->rows && add->cols == out->cols),
               "add is not of out's shape, or neither of its type nor fp32");
  CUDA_REQUIRE(d->scratch_bytes >= WORKSPACE + ROWS, "scratch too small");
  const bool direct = (out->dtype == DTYPE_F32 || dtype_of(a) == DTYPE_BF16) && (!add || add->dtype == out->dtype);
  if (direct) multiply(d, out->data, out->dtype, a, 0, a->rows, b, add ? add->data : NULL);
  else multiply_by_rows(d, out, a, b, add);
}

int64_t cuda_contract_scratch_bytes(const struct cuda_device *, const struct extent *) { return WORKSPACE + ROWS; }

bool cuda_contract_open(struct cuda_device *d, struct error *e) {
  const struct cuda_cublaslt *lt = cuda_cublaslt_open(e);
  if (!lt) return error_context(e, "backend \"%s\"", d->device.k->backend);
  struct cuda_gemm *g = static_cast<struct cuda_gemm *>(calloc(1, sizeof *g));
  if (!g) return error_set(e, ERROR_SYSTEM, "no memory for the choices of contractions");
  g->lt = lt;
  d->gemm = g;
  const cublasStatus_t status = lt->Create(&g->handle);
  if (status == CUBLAS_STATUS_SUCCESS) return true;
  error_set(e, ERROR_DEVICE, "GPU %d: cublasLtCreate gives %s", d->ordinal, lt->GetStatusName(status));
  return error_hint(e, "the driver may be too old for this cuBLAS, or the GPU's memory full (nvidia-smi)");
}

void cuda_contract_close(struct cuda_device *d) {
  struct cuda_gemm *g = d->gemm;
  if (!g) return;
  for (int i = 0; i < g->count; i++) destroy(g->lt, &g->products[i]);
  if (g->handle) g->lt->Destroy(g->handle);
  free(g);
  d->gemm = NULL;
}

void cuda_contract_choices(const struct device *dd, void (*take)(void *context, const char *contraction, const char *choice), void *context) {
  const struct cuda_device *d = cuda_of(dd);
  for (int i = 0; i < d->gemm->count; i++) {
    char product[TEXT], choice[TEXT];
    product_text(&d->gemm->products[i].key, product);
    choice_text(d, &d->gemm->products[i], choice);
    take(context, product, choice);
  }
}

void cuda_contract_describe(const struct cuda_device *d, char *text, int size) {
  char version[64];
  cuda_version_text(d->gemm->lt->GetVersion(), version, sizeof version);
  snprintf(text, static_cast<size_t>(size), "cuBLASLt %s", version);
}
}
