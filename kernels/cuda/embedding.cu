/* The embedding table: rows by token id. */
#include "kernels/cuda/cuda.h"

namespace {

/* Bytes that a thread moves at once, and that a thread has in flight. */
enum { THREADS = 256, VECTORS = 4 };

/* A block a row: `vectors` pieces of T. */
template <class T>
__global__ void gather_rows(T *x, const T *table, const int32_t *tokens, int64_t vectors, int64_t vocab_size) {
  const int64_t row = blockIdx.x;
  const int32_t id = tokens[row];
  CUDA_DEVICE_REQUIRE(id >= 0 && id < vocab_size, "token id outside the vocabulary");
  const T *from = table + id * vectors;
  T *to = x + row * vectors;
  for (int64_t first = threadIdx.x; first < vectors; first += VECTORS * THREADS) {
    T held[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
      if (first + i * THREADS < vectors) held[i] = from[first + i * THREADS];
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
      if (first + i * THREADS < vectors) to[first + i * THREADS] = held[i];
  }
}

/* Only bytes move where the types are equal. */
template <class T>
void gather(struct cuda_device *d, struct matrix *x, const struct matrix *table, const int32_t *tokens, int64_t row_bytes) {
  CUDA_LAUNCH(d, (gather_rows<T>), cuda_grid(x->rows), THREADS, 0, static_cast<T *>(x->data), static_cast<const T *>(table->data), tokens,
              row_bytes / static_cast<int64_t>(sizeof(T)), table->rows);
}

struct load_f32 {
  static __device__ float load(const void *p, int64_t i) { return static_cast<const float *>(p)[i]; }
};
struct load_bf16 {
  static __device__ float load(const void *p, int64_t i) { return bf16_decode(static_cast<const uint16_t *>(p)[i]); }
};
__device__ void store(float *p, float v) { *p = v; }
__device__ void store(uint16_t *p, float v) { *p = bf16_encode(v); }

template <class To, class From>
__global__ void convert_rows(To *x, const void *table, const int32_t *tokens, int64_t cols, int64_t vocab_size) {
  const int64_t row = blockIdx.x;
  const int32_t id = tokens[row];
  CUDA_DEVICE_REQUIRE(id >= 0 && id < vocab_size, "token id outside the vocabulary");
  for (int64_t c = threadIdx.x; c < cols; c += THREADS) store(x + row * cols + c, From::load(table, id * cols + c));
}

}  // namespace

extern "C" void cuda_embedding_forward(struct device *dd, struct matrix *x, const struct matrix *table, const int32_t *tokens) {
  struct cuda_device *d = cuda_of(dd);
  CUDA_REQUIRE(x->cols == table->cols, "x and table differ in width");
  if (x->dtype == table->dtype) {
    const int64_t row_bytes = x->cols * static_cast<int64_t>(dtype_bytes(x->dtype));
    const uintptr_t all = reinterpret_cast<uintptr_t>(x->data) | reinterpret_cast<uintptr_t>(table->data) | static_cast<uintptr_t>(row_bytes);
    if (all % 16 == 0) gather<uint4>(d, x, table, tokens, row_bytes);
    else gather<uint16_t>(d, x, table, tokens, row_bytes);
  } else if (x->dtype == DTYPE_BF16) {
    CUDA_LAUNCH(d, (convert_rows<uint16_t, load_f32>), cuda_grid(x->rows), THREADS, 0, static_cast<uint16_t *>(x->data), table->data, tokens,
                x->cols, table->rows);
  } else {
    CUDA_LAUNCH(d, (convert_rows<float, load_bf16>), cuda_grid(x->rows), THREADS, 0, static_cast<float *>(x->data), table->data, tokens,
                x->cols, table->rows);
  }
}
