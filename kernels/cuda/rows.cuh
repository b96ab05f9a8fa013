/* Rows of matrices in a thread's registers, and where producers write theirs.
 *
 * A thread moves N consecutive elements at once, as they are in memory
 * (`packed`): 16 bytes an access, or 8.  WHOLE says that every such piece is
 * whole and aligned: the row's length is a multiple of N and every pointer one
 * of 16 bytes (cuda_whole).  Otherwise elements are moved one by one, and
 * those past the row's end read as zero and are not written.
 */
#ifndef FP4D_KERNELS_CUDA_ROWS_CUH
#define FP4D_KERNELS_CUDA_ROWS_CUH

#include <type_traits>

#include "kernels/cuda/cuda.h"
#include "kernels/elementary.h"
#include "kernels/formats.h"

#define CUDA_INLINE static __device__ __forceinline__

/* A BF16 element; FP32's is float. */
struct bf16 {
  uint16_t bits;
};

template <typename T> struct type_of;
template <> struct type_of<float> { static constexpr enum dtype dtype = DTYPE_F32; };
template <> struct type_of<bf16> { static constexpr enum dtype dtype = DTYPE_BF16; };

/* Both to nearest even, in one instruction where there is one; a NaN stays some NaN. */
CUDA_INLINE uint32_t bf16_encode_pair(float low, float high) {
#ifdef FP4D_CUDA_MODEL
  return (uint32_t)bf16_encode(high) << 16 | bf16_encode(low);
#else
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
#endif
}

CUDA_INLINE float element(float x) { return x; }
CUDA_INLINE float element(bf16 x) { return bf16_decode(x.bits); }
CUDA_INLINE void element_set(float *to, float x) { *to = x; }
CUDA_INLINE void element_set(bf16 *to, float x) { to->bits = (uint16_t)bf16_encode_pair(x, x); }

/* ---- N elements as they are in memory ------------------------------------ */
template <typename T, int N> struct packed {
  static constexpr int WORDS = N * (int)sizeof(T) / 4;
  uint32_t word[WORDS];
};

template <int N> CUDA_INLINE void unpack(float (&x)[N], const packed<float, N> &p) {
#pragma unroll
  for (int e = 0; e < N; e++) x[e] = f32_from_bits(p.word[e]);
}
template <int N> CUDA_INLINE void unpack(float (&x)[N], const packed<bf16, N> &p) {
#pragma unroll
  for (int e = 0; e < N; e += 2) {
    x[e] = f32_from_bits(p.word[e / 2] << 16);
    x[e + 1] = f32_from_bits(p.word[e / 2] & 0xFFFF0000u);
  }
}

/* Rounded to T. */
template <int N> CUDA_INLINE void pack(packed<float, N> &p, const float (&x)[N]) {
#pragma unroll
  for (int e = 0; e < N; e++) p.word[e] = f32_bits(x[e]);
}
template <int N> CUDA_INLINE void pack(packed<bf16, N> &p, const float (&x)[N]) {
#pragma unroll
  for (int e = 0; e < N; e += 2) p.word[e / 2] = bf16_encode_pair(x[e], x[e + 1]);
}

/* ONCE: of an array larger than the caches, which nobody reads again soon. */
template <bool ONCE, typename V> CUDA_INLINE V vector_load(const V *from) {
#ifndef FP4D_CUDA_MODEL
  if (ONCE) return __ldcs(from);
#endif
  return *from;
}
template <bool ONCE, typename V> CUDA_INLINE void vector_store(V *to, V v) {
#ifndef FP4D_CUDA_MODEL
  if (ONCE) {
    __stcs(to, v);
    return;
  }
#endif
  *to = v;
}

/* Words to or from 16-byte (else 8-byte) aligned memory. */
template <bool ONCE = false, int WORDS> CUDA_INLINE void words_load(uint32_t (&word)[WORDS], const void *from) {
  static_assert(WORDS == 2 || WORDS % 4 == 0, "a piece is 8 or a multiple of 16 bytes");
  if constexpr (WORDS == 2) {
    const uint2 v = vector_load<ONCE>((const uint2 *)from);
    word[0] = v.x, word[1] = v.y;
  } else {
#pragma unroll
    for (int w = 0; w < WORDS; w += 4) {
      const uint4 v = vector_load<ONCE>((const uint4 *)from + w / 4);
      word[w] = v.x, word[w + 1] = v.y, word[w + 2] = v.z, word[w + 3] = v.w;
    }
  }
}
template <bool ONCE = false, int WORDS> CUDA_INLINE void words_store(void *to, const uint32_t (&word)[WORDS]) {
  if constexpr (WORDS == 2) {
    vector_store<ONCE>((uint2 *)to, make_uint2(word[0], word[1]));
  } else {
#pragma unroll
    for (int w = 0; w < WORDS; w += 4) vector_store<ONCE>((uint4 *)to + w / 4, make_uint4(word[w], word[w + 1], word[w + 2], word[w + 3]));
  }
}

CUDA_INLINE void word_set(uint32_t *word, int e, float x) { word[e] = f32_bits(x); }
CUDA_INLINE void word_set(uint32_t *word, int e, bf16 x) { word[e / 2] |= (uint32_t)x.bits << (e % 2 * 16); }
CUDA_INLINE float word_get(const uint32_t *word, int e, float) { return f32_from_bits(word[e]); }
CUDA_INLINE bf16 word_get(const uint32_t *word, int e, bf16) { return bf16{(uint16_t)(word[e / 2] >> (e % 2 * 16))}; }

/* Elements i .. i + N - 1 of a row of n. */
template <bool WHOLE, typename T, int N> CUDA_INLINE void row_load(packed<T, N> &p, const T *row, int64_t i, int64_t n) {
  if (WHOLE && i < n) {
    words_load(p.word, row + i);
    return;
  }
#pragma unroll
  for (int w = 0; w < packed<T, N>::WORDS; w++) p.word[w] = 0;
  if constexpr (!WHOLE) {
#pragma unroll
    for (int e = 0; e < N; e++)
      if (i + e < n) word_set(p.word, e, row[i + e]);
  }
}
template <bool WHOLE, typename T, int N> CUDA_INLINE void row_store(T *row, int64_t i, int64_t n, const packed<T, N> &p) {
  if constexpr (WHOLE) {
    if (i < n) words_store(row + i, p.word);
  } else {
#pragma unroll
    for (int e = 0; e < N; e++)
      if (i + e < n) row[i + e] = word_get(p.word, e, T());
  }
}

/* The same of a row whose type is known when it runs: for what is small beside the rest. */
template <bool WHOLE, int N> CUDA_INLINE void row_load_any(float (&x)[N], const void *row, bool is_bf16, int64_t i, int64_t n) {
  if (is_bf16) {
    packed<bf16, N> p;
    row_load<WHOLE>(p, (const bf16 *)row, i, n);
    unpack(x, p);
  } else {
    packed<float, N> p;
    row_load<WHOLE>(p, (const float *)row, i, n);
    unpack(x, p);
  }
}

/* Elements i .. i + N - 1 of an array of n, passed once, that begins at a multiple of 16
 * bytes (ALIGNED) or of its elements: the last N alone may not be whole. */
template <bool ALIGNED, typename T, int N> CUDA_INLINE void flat_load(packed<T, N> &p, const T *x, int64_t i, int64_t n) {
  if (ALIGNED && i + N <= n) words_load<true>(p.word, x + i);
  else row_load<false>(p, x, i, n);
}
template <bool ALIGNED, typename T, int N> CUDA_INLINE void flat_store(T *x, int64_t i, int64_t n, const packed<T, N> &p) {
  if (ALIGNED && i + N <= n) words_store<true>(x + i, p.word);
  else row_store<false>(x, i, n, p);
}

/* Are all these (NULL allowed) multiples of 16 bytes, and rows of n multiples of N? */
template <typename... Pointers> static inline bool cuda_whole(int64_t n, int64_t vector, Pointers... pointers) {
  const uintptr_t all[] = {(uintptr_t)pointers...};
  uintptr_t bits = 0;
  for (uintptr_t p : all) bits |= p;
  return n % vector == 0 && bits % 16 == 0;
}

/* ---- where a producer's result goes --------------------------------------- */
/* The emission's plain matrix and plain operands: copies of the result, rounded to
 * the producer's type and from that to each one's own. */
struct targets {
  enum { MOST = 3 };
  void *at[MOST];
  bool is_bf16[MOST];
  int count;
};

/* Aborts where they do not have the result's shape; packed operands were refused at start-up. */
struct targets targets_of(const struct emission *out, enum dtype type, int64_t rows, int64_t cols);
static inline bool targets_whole(const struct targets *t) { return cuda_whole(0, 1, t->at[0], t->at[1], t->at[2]); }

/* Writes N elements at i of the row that begins at `first` of the whole. */
template <bool WHOLE, typename T, int N>
CUDA_INLINE void targets_store(const struct targets &t, int64_t first, int64_t i, int64_t n, const packed<T, N> &p) {
  if (t.count == 1 && t.is_bf16[0] == (sizeof(T) == 2)) { /* the usual, without a loop's addresses */
    row_store<WHOLE>((T *)t.at[0] + first, i, n, p);
    return;
  }
#pragma unroll 1
  for (int k = 0; k < t.count; k++) {
    if (t.is_bf16[k] == (sizeof(T) == 2)) {
      row_store<WHOLE>((T *)t.at[k] + first, i, n, p);
      continue;
    }
    float x[N];
    unpack(x, p);
    if (t.is_bf16[k]) {
      packed<bf16, N> q;
      pack(q, x);
      row_store<WHOLE>((bf16 *)t.at[k] + first, i, n, q);
    } else {
      packed<float, N> q;
      pack(q, x);
      row_store<WHOLE>((float *)t.at[k] + first, i, n, q);
    }
  }
}

/* ---- launches -------------------------------------------------------------- */
/* Blocks for so many tasks, or pieces of rows (so that no block divides), up to what a
 * grid holds; a kernel's blocks stride over the rest. */
static inline dim3 grid_of_tasks(int64_t tasks) { return dim3((unsigned)(tasks < 1 << 30 ? tasks : 1 << 30)); }
static inline dim3 grid_of_rows(int64_t pieces, int64_t rows) {
  return dim3(cuda_grid(pieces), (unsigned)(rows < 65535 ? rows : 65535));
}

/* Calls f with the element type as a value: [&](auto zero) { using T = decltype(zero); … }. */
template <typename F> static inline void with_type(enum dtype t, F f) {
  if (t == DTYPE_BF16) f(bf16());
  else f(float());
}
template <typename F> static inline void with_bool(bool b, F f) {
  if (b) f(std::integral_constant<bool, true>());
  else f(std::integral_constant<bool, false>());
}

#endif
