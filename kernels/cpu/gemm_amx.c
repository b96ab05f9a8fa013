/* The contraction of BF16 pairs on Intel AMX.
 *
 * TDPBF16PS multiplies two tiles of 16 x 16 BF16 pairs: into each FP32 sum
 * goes a chain of fused multiply-adds over the even elements of 32, one over
 * the odd ones, their sum last: a group of kernels/cpu/gemm.h.  It rounds to
 * nearest even, but takes subnormal inputs as zero and writes zero for
 * subnormal results.  So panels carry the smallest exponent field e of their
 * nonzero elements.  An element is a whole multiple of 2^(e - 134), a product
 * one of 2^(e_a + e_b - 268), and so is every chain and sum, before and after
 * it is rounded: none is subnormal when that is at least 2^-126.
 *
 * Operands in every format but FP32 are exact in BF16: E4M3 and E5M2, E2M1 times
 * an E4M3 scale (six significant bits at most), and MXFP4, its overflow to
 * infinity included (formats.h).
 */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/gemm.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/checked.h"
#include "kernels/formats.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,amx-tile,amx-bf16")))

enum {
  HALF_GROUP = CONTRACT_GROUP / 2, /* columns between changes of an NVFP4 scale */
  SIDE = 16,                       /* a tile: 16 rows of 16 words, a word a pair of BF16 */
  TILE_BYTES = SIDE * SIDE * 4,
  PANEL = 2 * SIDE,                /* rows of a panel; in a group, two tiles one after the other */
  GROUP_BYTES = 2 * TILE_BYTES
};

static bool exact(int first_exponent, int second_exponent) {
  return first_exponent > 0 && second_exponent > 0 && first_exponent + second_exponent >= 268 - 126;
}

/* Elements as BF16: by scale byte (E8M0, E4M3) and E2M1 code, and by byte without sign. */
static uint16_t code_table[2][256][16], byte_table[2][128];

static void fill_tables(void) {
  for (uint32_t byte = 0; byte < 256; byte++)
    for (uint32_t code = 0; code < 16; code++) {
      code_table[0][byte][code] = (uint16_t)(f32_bits(mxfp4_decode(code, byte)) >> 16);
      code_table[1][byte][code] = (uint16_t)(f32_bits(e2m1_decode(code) * e4m3_decode(byte)) >> 16);
    }
  for (uint32_t byte = 0; byte < 128; byte++) {
    byte_table[0][byte] = (uint16_t)(f32_bits(e4m3_decode(byte)) >> 16);
    byte_table[1][byte] = (uint16_t)(f32_bits(e5m2_decode(byte)) >> 16);
  }
}

static bool usable(void) {
  if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("amx-tile") || !__builtin_cpu_supports("amx-bf16"))
    return false;
  /* Linux grants a process the tile registers on demand (ARCH_REQ_XCOMP_PERM, component 18). */
  if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) return false;
  fill_tables();
  return true;
}

/* ---- packing ---------------------------------------------------------------
 * The first operand's tile has a row of it in each row, the second's a pair of
 * columns: one is the other transposed, as words. */

TARGET static inline void transpose(__m512i t[SIDE]) {
  __m512i u[SIDE];
  for (int i = 0; i < SIDE; i += 2) {
    u[i] = _mm512_unpacklo_epi32(t[i], t[i + 1]);
    u[i + 1] = _mm512_unpackhi_epi32(t[i], t[i + 1]);
  }
  for (int i = 0; i < SIDE; i += 4) {
    t[i] = _mm512_unpacklo_epi64(u[i], u[i + 2]);
    t[i + 1] = _mm512_unpackhi_epi64(u[i], u[i + 2]);
    t[i + 2] = _mm512_unpacklo_epi64(u[i + 1], u[i + 3]);
    t[i + 3] = _mm512_unpackhi_epi64(u[i + 1], u[i + 3]);
  }
  for (int i = 0; i < SIDE; i += 8)
    for (int j = 0; j < 4; j++) {
      u[i + j] = _mm512_shuffle_i32x4(t[i + j], t[i + j + 4], 0x88);
      u[i + j + 4] = _mm512_shuffle_i32x4(t[i + j], t[i + j + 4], 0xdd);
    }
  for (int j = 0; j < 8; j++) {
    t[j] = _mm512_shuffle_i32x4(u[j], u[j + 8], 0x88);
    t[j + 8] = _mm512_shuffle_i32x4(u[j], u[j + 8], 0xdd);
  }
}

static inline uint32_t low_bits(int64_t n) { return n >= 32 ? 0xffffffffu : (1u << n) - 1u; }

/* E2M1 codes of columns [k, k + n), k and n multiples of 16: two scales a row, equal where MXFP4's blocks lie so. */
TARGET static inline void load_codes(__m512i *t, const struct operand *o, int64_t row, int64_t rows, int64_t k,
                                     int64_t n) {
  bool mx = o->encoding.format == FORMAT_MXFP4;
  uint16_t (*const table)[16] = code_table[mx ? 0 : 1];
  int64_t block = mx ? CONTRACT_GROUP : HALF_GROUP, scale_cols = o->cols / block;
  const uint8_t *codes = o->codes + row * (o->cols / 2) + k / 2;
  /* `row` is a multiple of 16: in the scales' layout its tile's rows are 16 bytes apart. */
  const uint8_t *first = o->scales + operand_scale_offset(row, k / block, scale_cols), *second = first;
  if (n > HALF_GROUP) second = o->scales + operand_scale_offset(row, (k + HALF_GROUP) / block, scale_cols);
  const __m512i low_nibbles = _mm512_set1_epi32(0x000f000f);
  const __m512i half = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
  __mmask16 bytes = (__mmask16)low_bits(n / 2);
  __mmask32 mask = low_bits(n);
  for (int64_t r = 0; r < rows; r++) {
    __m256i low = _mm256_loadu_si256((const void *)table[first[r * 16]]);
    __m256i high = _mm256_loadu_si256((const void *)table[second[r * 16]]);
    __m512i pairs = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(bytes, codes + r * (o->cols / 2)));
    pairs = _mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 12));
    __m512i indices = _mm512_or_si512(_mm512_and_si512(pairs, low_nibbles), half);
    t[r] = _mm512_maskz_permutexvar_epi16(mask, indices, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
  }
}

/* E4M3 or E5M2. */
TARGET static inline void load_bytes(__m512i *t, const struct operand *o, int64_t row, int64_t rows, int64_t k,
                                     int64_t n) {
  const uint16_t *table = byte_table[o->encoding.format == FORMAT_E4M3 ? 0 : 1];
  const __m512i t0 = _mm512_loadu_si512(table), t1 = _mm512_loadu_si512(table + 32);
  const __m512i t2 = _mm512_loadu_si512(table + 64), t3 = _mm512_loadu_si512(table + 96);
  const uint8_t *codes = o->codes + row * o->cols + k;
  __mmask32 mask = low_bits(n);
  for (int64_t r = 0; r < rows; r++) {
    __m512i x = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, codes + r * o->cols));
    __mmask32 upper = _mm512_test_epi16_mask(x, _mm512_set1_epi16(0x40));
    __m512i magnitude = _mm512_mask_blend_epi16(upper, _mm512_permutex2var_epi16(t0, x, t1), _mm512_permutex2var_epi16(t2, x, t3));
    t[r] = _mm512_or_si512(magnitude, _mm512_slli_epi16(_mm512_and_si512(x, _mm512_set1_epi16(0x80)), 8));
  }
}

/* Columns [k, k + n), n <= 32, of rows [row, row + rows): a row of the operand in each row. */
TARGET static inline void load_rows(__m512i t[SIDE], const struct operand *o, int64_t row, int64_t rows, int64_t k,
                                    int64_t n) {
  int64_t whole = rows < SIDE ? rows : SIDE;
  for (int64_t r = whole; r < SIDE; r++) t[r] = _mm512_setzero_si512();
  switch (o->encoding.format) {
    case FORMAT_MXFP4:
    case FORMAT_NVFP4:
    case FORMAT_NVFP4_LOCAL: load_codes(t, o, row, whole, k, n); break;
    case FORMAT_E4M3:
    case FORMAT_E5M2: load_bytes(t, o, row, whole, k, n); break;
    case FORMAT_F32: /* not here */
    case FORMAT_BF16: {
      const uint8_t *from = o->codes + 2 * (row * o->cols + k);
      __mmask32 mask = low_bits(n);
      for (int64_t r = 0; r < whole; r++) t[r] = _mm512_maskz_loadu_epi16(mask, from + r * 2 * o->cols);
    }
  }
}

/* The same of an operand stored transposed: a pair of its columns in each row. */
TARGET static inline void load_pairs(__m512i t[SIDE], const struct operand *o, int64_t row, int64_t rows, int64_t k,
                                     int64_t n) {
  __mmask16 mask = (__mmask16)low_bits(rows < SIDE ? rows : SIDE);
  for (int64_t pair = 0; pair < SIDE; pair++) {
    __mmask16 even = 2 * pair < n ? mask : 0, odd = 2 * pair + 1 < n ? mask : 0;
    const uint8_t *from = o->codes + 2 * ((k + 2 * pair) * o->rows + row);
    __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(even, from));
    __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(odd, from + 2 * o->rows));
    t[pair] = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
  }
}

/* One tile, whose rows begin at `row`.  Returns the lesser, lane by lane, of `least` and its elements
 * without sign, less one (so that zero is the largest). */
TARGET static inline __m512i pack_tile(char *to, const struct operand *o, int64_t row, int64_t rows, int64_t k,
                                       int64_t n, bool transposed, bool second, __m512i least) {
  __m512i t[SIDE];
  if (rows <= 0)
    for (int i = 0; i < SIDE; i++) t[i] = _mm512_setzero_si512();
  else if (transposed)
    load_pairs(t, o, row, rows, k, n);
  else
    load_rows(t, o, row, rows, k, n);
  if (transposed != second) transpose(t);
  for (int i = 0; i < SIDE; i++) {
    least = _mm512_min_epu16(least, _mm512_sub_epi16(_mm512_slli_epi16(t[i], 1), _mm512_set1_epi16(1)));
    _mm512_store_si512(to + i * (TILE_BYTES / SIDE), t[i]);
  }
  return least;
}

/* Goes along the rows in memory: an operand's, or its columns where it is stored transposed. */
TARGET static inline int pack(char *panels, const struct operand *o, int64_t row, int64_t rows, int64_t k,
                              int64_t cols, bool second) {
  bool transposed = o->encoding.format == FORMAT_BF16 && o->view == VIEW_COLUMN;
  int64_t groups = ceil_div(cols, CONTRACT_GROUP), count = ceil_div(rows, PANEL);
  __m512i least = _mm512_set1_epi16(-1);
  for (int64_t i = 0; i < (transposed ? groups : count); i++)
    for (int64_t j = 0; j < (transposed ? count : groups); j++) {
      int64_t group = transposed ? i : j, panel = transposed ? j : i;
      int64_t done = group * CONTRACT_GROUP, n = cols - done < CONTRACT_GROUP ? cols - done : CONTRACT_GROUP;
      char *to = panels + (panel * groups + group) * GROUP_BYTES;
      for (int64_t r = panel * PANEL; r < (panel + 1) * PANEL; r += SIDE, to += TILE_BYTES)
        least = pack_tile(to, o, row + r, rows - r, k + done, n, transposed, second, least);
    }
  uint16_t all[32];
  _mm512_storeu_si512(all, least);
  int smallest = 255;
  for (int i = 0; i < 32; i++) {
    int field = (all[i] + 1) >> 8;
    if (field < smallest) smallest = field;
  }
  return smallest;
}

TARGET static int pack_first(void *panels, const struct operand *o, int64_t row, int64_t rows, int64_t k,
                             int64_t cols) {
  return pack(panels, o, row, rows, k, cols, false);
}

TARGET static int pack_second(void *panels, const struct operand *o, int64_t row, int64_t rows, int64_t k,
                              int64_t cols) {
  return pack(panels, o, row, rows, k, cols, true);
}

static uint32_t packed_word(const char *packed, int64_t panel_groups, int64_t group, int64_t row, int64_t i, int64_t j) {
  uint32_t word;
  int64_t tile = (row / PANEL * panel_groups + group) * GROUP_BYTES + row % PANEL / SIDE * TILE_BYTES;
  memcpy(&word, packed + tile + (i * SIDE + j) * 4, sizeof word);
  return word;
}

static void unpack(float *panels, int width, const char *packed, int64_t rows, int64_t panel_groups, int64_t group,
                   int64_t groups, bool second) {
  int64_t whole = round_up(rows, width);
  for (int64_t r = 0; r < whole; r++)
    for (int64_t pair = 0; pair < groups * SIDE; pair++) {
      int64_t i = r % SIDE, j = pair % SIDE;
      uint32_t word = 0;
      if (r < rows) word = packed_word(packed, panel_groups, group + pair / SIDE, r, second ? j : i, second ? i : j);
      float *to = panels + r / width * width * groups * CONTRACT_GROUP + 2 * pair * width + r % width;
      to[0] = f32_from_bits(word << 16);
      to[width] = f32_from_bits(word & 0xffff0000u);
    }
}

static void unpack_first(float *panels, int width, const void *packed, int64_t rows, int64_t panel_groups,
                         int64_t group, int64_t groups) {
  unpack(panels, width, packed, rows, panel_groups, group, groups, false);
}

static void unpack_second(float *panels, int width, const void *packed, int64_t rows, int64_t panel_groups,
                          int64_t group, int64_t groups) {
  unpack(panels, width, packed, rows, panel_groups, group, groups, true);
}

/* ---- multiplication --------------------------------------------------------- */

/* Palette 1: eight tiles of 16 rows of 64 bytes. */
static const struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} configuration = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

TARGET static void begin(void) { _tile_loadconfig(&configuration); }
TARGET static void end(void) { _tile_release(); }

TARGET static void run(float *acc, const void *first, const void *second, int64_t groups) {
  const char *a = first, *b = second;
  const int64_t stride = GEMM_TILE_COLS * sizeof(float);
  float *below = acc + SIDE * GEMM_TILE_COLS;
  __asm__ volatile("" ::: "memory"); /* the intrinsics do not say what they read */
  _tile_loadd(0, acc, stride);
  _tile_loadd(1, acc + SIDE, stride);
  _tile_loadd(2, below, stride);
  _tile_loadd(3, below + SIDE, stride);
  for (int64_t g = 0; g < groups; g++) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_loadd(7, b + TILE_BYTES, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, a + TILE_BYTES, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    a += GROUP_BYTES;
    b += GROUP_BYTES;
  }
  _tile_stored(0, acc, stride);
  _tile_stored(1, acc + SIDE, stride);
  _tile_stored(2, below, stride);
  _tile_stored(3, below + SIDE, stride);
}

static const struct gemm_kernel kernel = {
    .name = "amx-bf16", .mr = PANEL, .nr = PANEL, .chunk = 8, .element_bytes = 2, .usable = usable,
    .pack_first = pack_first, .pack_second = pack_second, .begin = begin, .end = end, .run = run,
    .exact = exact, .unpack_first = unpack_first, .unpack_second = unpack_second};

const struct gemm_kernel *gemm_amx_kernel(void) { return &kernel; }

#else

const struct gemm_kernel *gemm_amx_kernel(void) { return NULL; }

#endif
