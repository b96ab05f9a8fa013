/* MXFP4 group quantisers, to nearest.
 *
 * The loops work on BF16 bits, in 16-bit lanes: let r = bits(|z|) - (b << 7), so r + bits(1) are the bits of |z| / s.  Code k begins where 6|z|/s
 * passes a midpoint of E2M1, that is where |z|/s passes 1/24, 1/8, 5/24, 7/24,
 * 5/12, 7/12, 5/6.  From the third on these lie at 7/6 and 5/3 of a power of
 * two, 22 and 86 units of BF16's 128 an octave: evenly spaced, so a shift
 * counts them.  Of all seven only 1/8 is itself a BF16 value: the one tie, and
 * it goes up to the even code 2.
 *
 * Groups with a byte outside LOW..HIGH, whose thresholds or coefficient would
 * leave the normal range or which may hold a NaN or clip for want of a larger
 * byte, are encoded element by element by kernels/formats.h.
 */
#include "kernels/cpu/mxfp4.h"

#include "kernels/cpu/codes.h"
#include "kernels/cpu/cpu.h"

#define INLINE static inline __attribute__((always_inline))

enum {
  GROUP = 32,
  CHUNK_GROUPS = MXFP4_CHUNK / GROUP,
  LOW = 20,
  HIGH = 253,
  BITS_ONE = 0x3F80,
  BITS_INFINITE = 0x7F80,
  REACH_1 = 0x3D2B - BITS_ONE, /* the first BF16 value above 1/24 */
  REACH_2 = 0x3E00 - BITS_ONE, /* 1/8 */
  OCTAVE = 128,
  REACH_7 = 86 - OCTAVE /* the first above 5/6; 7/12, 5/12, 7/24 are 64 further down each */
};

/* What was counted over a piece, per lane: at most 256 a lane and piece. */
struct lanes {
  uint16_t underflowed[GROUP];
};

INLINE uint16_t magnitude(uint16_t z) { return z & 0x7FFF; }

/* Whether the byte is for the loops. */
INLINE bool common(uint32_t byte) { return byte >= LOW && byte <= HIGH; }

/* The magnitude's code; scale_bits = b << 7. */
INLINE uint16_t code_magnitude(uint16_t a, uint16_t scale_bits) {
  int16_t r = (int16_t)(a - scale_bits);
  int16_t small = (int16_t)((r >= REACH_1) + (r >= REACH_2));
  int16_t large = (int16_t)((int16_t)(r - REACH_7 + 7 * OCTAVE / 2) >> 6);
  large = large > 7 ? 7 : large;
  return (uint16_t)(large > small ? large : small);
}

/* One that is not zero got code 0. */
INLINE uint16_t underflow(uint16_t a, uint16_t code) { return (uint16_t)((a != 0) & ((code & 7) == 0)); }

/* One group by the definition; returns how many underflowed. */
static __attribute__((noinline, cold)) int encode_plainly(uint16_t *code, const uint16_t *z, int64_t stride,
                                                          uint32_t byte) {
  float coefficient = mxfp4_coefficient(byte);
  int underflowed = 0;
  for (int i = 0; i < GROUP; i++) {
    uint16_t bits = z[i * stride];
    code[i] = (uint16_t)e2m1_encode(bf16_decode(bits) * coefficient);
    underflowed += magnitude(bits) != 0 && (code[i] & 7) == 0;
  }
  return underflowed;
}

/* Elements above their group's scale: they clip to the largest code. */
INLINE int64_t count_above(const uint16_t *z, uint32_t byte) {
  uint16_t n = 0, scale_bits = (uint16_t)(byte << 7);
  for (int i = 0; i < GROUP; i++) n = (uint16_t)(n + (magnitude(z[i]) > scale_bits));
  return n;
}

INLINE int64_t count_above_in_columns(const uint16_t *z, int64_t stride, const uint8_t byte[GROUP]) {
  uint16_t lane[GROUP] = {0};
  for (int i = 0; i < GROUP; i++, z += stride)
    for (int c = 0; c < GROUP; c++) lane[c] = (uint16_t)(lane[c] + (magnitude(z[c]) > (uint16_t)(byte[c] << 7)));
  int64_t n = 0;
  for (int c = 0; c < GROUP; c++) n += lane[c];
  return n;
}

/* The largest finite magnitude of a group that has others. */
static __attribute__((noinline, cold)) uint16_t finite_amax(const uint16_t *z, int64_t stride) {
  uint16_t amax = 0;
  for (int i = 0; i < GROUP; i++) {
    uint16_t a = magnitude(z[i * stride]);
    if (a < BITS_INFINITE && a > amax) amax = a;
  }
  return amax;
}

INLINE void count_amax(struct quantise_counts *counts, uint16_t amax) {
  float a = bf16_decode(amax);
  counts->amax = a > counts->amax ? a : counts->amax;
}

INLINE uint16_t amax_of_group(const uint16_t *z) {
  uint16_t amax = 0;
  for (int i = 0; i < GROUP; i++) {
    uint16_t a = magnitude(z[i]);
    amax = a > amax ? a : amax;
  }
  return amax;
}

INLINE void encode_group_nearest(uint16_t *restrict code, const uint16_t *restrict z, uint32_t byte,
                                 struct lanes *restrict lanes) {
  uint16_t scale_bits = (uint16_t)(byte << 7);
  for (int i = 0; i < GROUP; i++) {
    uint16_t a = magnitude(z[i]);
    uint16_t n = code_magnitude(a, scale_bits);
    code[i] = (uint16_t)(n | (z[i] >> 12 & 8));
    lanes->underflowed[i] = (uint16_t)(lanes->underflowed[i] + underflow(a, n));
  }
}

/* ---- rows -------------------------------------------------------------------- */

INLINE int64_t sum_lanes(const struct lanes *lanes) {
  int64_t n = 0;
  for (int i = 0; i < GROUP; i++) n += lanes->underflowed[i];
  return n;
}

/* Where the piece's codes of row r begin. */
INLINE uint8_t *row_codes(const struct operand *row, const struct mxfp4_piece *p, int64_t r) {
  return row->codes + r * (p->source_cols / 2) + p->first_col / 2;
}

INLINE void store_row_scales(const struct operand *row, const struct mxfp4_piece *p, int64_t r, const uint8_t *byte) {
  int64_t first = p->first_col / GROUP;
  uint8_t *scales = row->scales + operand_scale_offset(r, 0, p->source_cols / GROUP);
  for (int64_t g = 0; g < p->cols / GROUP; g++) scales[(first + g) / 4 * 512 + (first + g) % 4] = byte[g];
}

/* given: bytes of the piece's groups, or NULL: the encode rule. */
CPU_CLONES static void quantise_rows(const struct operand *row, const struct mxfp4_piece *p, const uint8_t *given,
                                     struct quantise_counts *counts) {
  struct lanes lanes = {{0}};
  uint16_t codes[MXFP4_CHUNK];
  uint8_t byte[CHUNK_GROUPS];
  uint16_t largest = 0;
  int64_t groups = p->cols / GROUP;
  for (int64_t i = 0; i < p->rows; i++) {
    const uint16_t *z = p->bits + i * p->stride;
    int64_t r = p->first_row + i;
    for (int64_t g = 0; g < groups; g++, z += GROUP) {
      uint16_t *code = codes + g * GROUP;
      uint16_t amax = amax_of_group(z);
      uint32_t b = given ? given[g] : mxfp4_scale_encode(amax);
      byte[g] = (uint8_t)b;
      if (common(b)) {
        encode_group_nearest(code, z, b, &lanes);
      } else if (b > 0) {
        counts->underflowed += encode_plainly(code, z, 1, b);
      } else {
        memset(code, 0, GROUP * sizeof *code);
        counts->zero_blocks++;
      }
      if (amax > b << 7) counts->saturated += count_above(z, b);
      if (amax >= BITS_INFINITE) amax = finite_amax(z, 1);
      largest = amax > largest ? amax : largest;
    }
    codes_pack(row_codes(row, p, r), codes, p->cols);
    store_row_scales(row, p, r, byte);
  }
  counts->underflowed += sum_lanes(&lanes);
  count_amax(counts, largest);
}

/* ---- columns ----------------------------------------------------------------- */

INLINE void amax_of_columns(uint16_t amax[GROUP], const uint16_t *z, int64_t stride) {
  uint16_t m[GROUP] = {0};
  for (int i = 0; i < GROUP; i++, z += stride)
    for (int c = 0; c < GROUP; c++) {
      uint16_t a = magnitude(z[c]);
      m[c] = a > m[c] ? a : m[c];
    }
  memcpy(amax, m, sizeof m);
}

INLINE uint16_t largest_of(const uint16_t amax[GROUP]) {
  uint16_t m = 0;
  for (int c = 0; c < GROUP; c++) m = amax[c] > m ? amax[c] : m;
  return m;
}

INLINE uint16_t column_code(uint16_t z, uint16_t scale_bits, uint16_t sign_mask) {
  return (uint16_t)(code_magnitude(magnitude(z), scale_bits) | (z >> 12 & sign_mask));
}

/* 32 columns of 32 rows, nearest, each with its own byte (0 or a common one); the 16 bytes of column c go to out + c * row_bytes. */
INLINE void encode_columns(uint8_t *out, int64_t row_bytes, const uint16_t *restrict z, int64_t stride,
                           const uint8_t byte[GROUP], struct lanes *restrict lanes) {
  uint16_t scale_bits[GROUP], sign_mask[GROUP];
  for (int c = 0; c < GROUP; c++) {
    scale_bits[c] = (uint16_t)(byte[c] ? byte[c] << 7 : BITS_ONE); /* a zero is far below either */
    sign_mask[c] = byte[c] ? 8 : 0;
  }
  uint16_t quad[8][GROUP]; /* [k][c]: codes of rows 4k..4k+3 of column c */
  for (int k = 0; k < 8; k++) {
    const uint16_t *z0 = z + 4 * k * stride, *z1 = z0 + stride, *z2 = z1 + stride, *z3 = z2 + stride;
    for (int c = 0; c < GROUP; c++) {
      uint16_t s = scale_bits[c], m = sign_mask[c];
      uint16_t q0 = column_code(z0[c], s, m), q1 = column_code(z1[c], s, m);
      uint16_t q2 = column_code(z2[c], s, m), q3 = column_code(z3[c], s, m);
      quad[k][c] = (uint16_t)(q0 | q1 << 4 | q2 << 8 | q3 << 12);
      lanes->underflowed[c] =
          (uint16_t)(lanes->underflowed[c] + underflow(magnitude(z0[c]), q0) + underflow(magnitude(z1[c]), q1) +
                     underflow(magnitude(z2[c]), q2) + underflow(magnitude(z3[c]), q3));
    }
  }
  uint16_t turned[GROUP][8];
  for (int c = 0; c < GROUP; c++)
    for (int k = 0; k < 8; k++) turned[c][k] = quad[k][c];
  for (int c = 0; c < GROUP; c++) memcpy(out + c * row_bytes, turned[c], sizeof turned[c]);
}

INLINE bool any_uncommon(const uint8_t byte[GROUP]) {
  int any = 0;
  for (int c = 0; c < GROUP; c++) any |= (byte[c] != 0) & !common(byte[c]);
  return any != 0;
}

/* The same by the definition. */
static __attribute__((noinline, cold)) int64_t encode_columns_plainly(uint8_t *out, int64_t row_bytes,
                                                                      const uint16_t *z, int64_t stride,
                                                                      const uint8_t byte[GROUP]) {
  int64_t underflowed = 0;
  for (int c = 0; c < GROUP; c++) {
    uint16_t codes[GROUP] = {0};
    if (byte[c] != 0) underflowed += encode_plainly(codes, z + c, stride, byte[c]);
    codes_pack(out + c * row_bytes, codes, GROUP);
  }
  return underflowed;
}

/* Codes and scales of 32 columns from column `col` of the piece on. */
INLINE uint8_t *column_codes(const struct operand *column, const struct mxfp4_piece *p, int64_t col) {
  return column->codes + (p->first_col + col) * (p->source_rows / 2) + p->first_row / 2;
}

INLINE void store_column_scales(const struct operand *column, const struct mxfp4_piece *p, int64_t col,
                                const uint8_t byte[GROUP]) {
  uint8_t *scales =
      column->scales + operand_scale_offset(p->first_col + col, p->first_row / GROUP, p->source_rows / GROUP);
  for (int c = 0; c < GROUP; c++) scales[c * 16] = byte[c];
}

CPU_CLONES static void quantise_columns(const struct operand *column, const struct mxfp4_piece *p,
                                        const uint8_t *given, struct quantise_counts *counts) {
  struct lanes lanes = {{0}};
  uint16_t largest = 0;
  for (int64_t col = 0; col < p->cols; col += GROUP) {
    const uint16_t *z = p->bits + col;
    uint8_t *out = column_codes(column, p, col);
    uint16_t amax[GROUP];
    uint8_t byte[GROUP];
    int above = 0, zero = 0;
    amax_of_columns(amax, z, p->stride);
    for (int c = 0; c < GROUP; c++) {
      uint32_t b = given ? given[col / GROUP] : mxfp4_scale_encode(amax[c]);
      byte[c] = (uint8_t)b;
      above |= amax[c] > b << 7;
      zero += b == 0;
    }
    if (any_uncommon(byte))
      counts->underflowed += encode_columns_plainly(out, p->source_rows / 2, z, p->stride, byte);
    else
      encode_columns(out, p->source_rows / 2, z, p->stride, byte, &lanes);
    if (above) counts->saturated += count_above_in_columns(z, p->stride, byte);
    counts->zero_blocks += zero;
    uint16_t most = largest_of(amax);
    if (most >= BITS_INFINITE) {
      for (int c = 0; c < GROUP; c++)
        if (amax[c] >= BITS_INFINITE) amax[c] = finite_amax(z + c, p->stride);
      most = largest_of(amax);
    }
    largest = most > largest ? most : largest;
    store_column_scales(column, p, col, byte);
  }
  counts->underflowed += sum_lanes(&lanes);
  count_amax(counts, largest);
}

/* ---- tiles ------------------------------------------------------------------- */

CPU_CLONES static void tile_bytes(uint8_t byte[CHUNK_GROUPS], const struct mxfp4_piece *p) {
  for (int64_t g = 0; g < p->cols / GROUP; g++) {
    uint16_t columns[GROUP];
    amax_of_columns(columns, p->bits + g * GROUP, p->stride);
    byte[g] = (uint8_t)mxfp4_scale_adaptive(largest_of(columns));
  }
}

/* ---- what emission calls ------------------------------------------------------- */

static void count_groups(struct quantise_counts *counts, const struct mxfp4_piece *p) {
  counts->elements += p->rows * p->cols;
  counts->blocks += p->rows * p->cols / GROUP;
}

void mxfp4_quantise_rows(const struct operand *row, const struct mxfp4_piece *p, struct quantise_counts *counts) {
  quantise_rows(row, p, NULL, counts);
  count_groups(counts, p);
}

void mxfp4_quantise_columns(const struct operand *column, const struct mxfp4_piece *p,
                            struct quantise_counts *counts) {
  quantise_columns(column, p, NULL, counts);
  count_groups(counts, p);
}

void mxfp4_quantise_tiles(const struct operand *row, const struct operand *column, const struct mxfp4_piece *p,
                          struct quantise_counts *row_counts, struct quantise_counts *column_counts) {
  uint8_t byte[CHUNK_GROUPS];
  tile_bytes(byte, p);
  if (row) {
    quantise_rows(row, p, byte, row_counts);
    count_groups(row_counts, p);
  }
  if (column) {
    quantise_columns(column, p, byte, column_counts);
    count_groups(column_counts, p);
  }
}
