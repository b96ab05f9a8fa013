/* MXFP4 group quantisers.
 *
 * The loops work on BF16 bits in 16-bit lanes: with r = bits(|z|) - (b << 7),
 * the code of 6 z / s is the number of thresholds m/6 (m = .25 .75 1.25 1.75
 * 2.5 3.5 5, the midpoints of E2M1) that |z| / s reaches, and on the BF16
 * lattice "reaches" is one integer comparison of r.  Of the seven only .75/6
 * = 1/8 lies on that lattice: the one tie, and it goes up to the even code 2.
 * Groups with b < PLAIN_BYTE, whose thresholds or coefficient would leave the
 * normal range, are encoded element by element by kernels/formats.h.
 */
#include "kernels/cpu/mxfp4.h"

#include "kernels/cpu/cpu.h"
#include "kernels/formats.h"

#define INLINE static inline __attribute__((always_inline))

enum {
  GROUP = 32,
  CHUNK_GROUPS = MXFP4_CHUNK / GROUP,
  PLAIN_BYTE = 20,
  /* the first BF16 value that counts, as bits, less the bits of 1 */
  REACH_1 = 0x3D2B - 0x3F80, /* above 1/24 */
  REACH_2 = 0x3E00 - 0x3F80, /* 1/8 */
  REACH_3 = 0x3E56 - 0x3F80, /* above 5/24 */
  REACH_4 = 0x3E96 - 0x3F80, /* above 7/24 */
  REACH_5 = 0x3ED6 - 0x3F80, /* above 5/12 */
  REACH_6 = 0x3F16 - 0x3F80, /* above 7/12 */
  REACH_7 = 0x3F56 - 0x3F80, /* above 5/6 */
  BITS_ONE = 0x3F80
};

/* What was counted over a piece, per lane: at most 256 a lane and piece. */
struct lanes {
  uint16_t underflowed[GROUP];
};

INLINE uint16_t magnitude(uint16_t z) { return z & 0x7FFF; }

/* Thresholds reached: the magnitude's code.  scale_bits = b << 7. */
INLINE uint16_t code_magnitude(uint16_t a, uint16_t scale_bits) {
  int16_t r = (int16_t)(a - scale_bits);
  int16_t n = 0;
  n = (int16_t)(n + (r >= REACH_1));
  n = (int16_t)(n + (r >= REACH_2));
  n = (int16_t)(n + (r >= REACH_3));
  n = (int16_t)(n + (r >= REACH_4));
  n = (int16_t)(n + (r >= REACH_5));
  n = (int16_t)(n + (r >= REACH_6));
  n = (int16_t)(n + (r >= REACH_7));
  return (uint16_t)n;
}

/* Bit 3 for negative values; a NaN counts as positive. */
INLINE uint16_t code_sign(uint16_t z) {
  uint16_t mask = (uint16_t)(magnitude(z) > 0x7F80 ? 0 : 8);
  return (uint16_t)((z >> 12) & mask);
}

/* Codes of a row's piece, one in 16 bits; as pairs they pack two a byte. */
union codes {
  uint16_t code[MXFP4_CHUNK];
  uint32_t pair[MXFP4_CHUNK / 2];
};

INLINE void pack_nibbles(uint8_t *restrict out, const union codes *restrict codes, int64_t n) {
  for (int64_t i = 0; i < n / 2; i++) out[i] = (uint8_t)(codes->pair[i] | codes->pair[i] >> 12);
}

/* One group by the definition; returns how many underflowed. */
static __attribute__((noinline, cold)) int encode_plainly(uint16_t *code, const uint16_t *z, int64_t stride,
                                                          uint32_t byte, const uint16_t *field) {
  float coefficient = mxfp4_coefficient(byte);
  int underflowed = 0;
  for (int i = 0; i < GROUP; i++) {
    uint16_t bits = z[i * stride];
    float t = bf16_decode(bits) * coefficient;
    code[i] = (uint16_t)(field ? e2m1_encode_stochastic(t, field[i]) : e2m1_encode(t));
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
    code[i] = (uint16_t)(n | code_sign(z[i]));
    lanes->underflowed[i] = (uint16_t)(lanes->underflowed[i] + ((a != 0) & ((int16_t)(a - scale_bits) < REACH_1)));
  }
}

/* With t = 6 |z| / s and x = floor(t 2^17): steps of 1/2 below 2, of 1 below
 * 4, of 2 above; the field is added at the top of what goes. */
INLINE void encode_group_stochastic(uint16_t *restrict code, const uint16_t *restrict z, uint32_t byte,
                                    const uint16_t *restrict field, struct lanes *restrict lanes) {
  const float coefficient = f32_from_bits((256u + 17u - byte) << 23 | 0x400000u);
  const float six = 6.0f * 131072.0f;
  for (int i = 0; i < GROUP; i++) {
    uint32_t a = magnitude(z[i]);
    float t = f32_from_bits(a << 16) * coefficient;
    int32_t x = (int32_t)(t < six ? t : six); /* a NaN gives six */
    int32_t shift = (x >= 1 << 18) + (x >= 1 << 19);
    int32_t n = (((x >> shift) + field[i]) >> 16) + (shift << 1);
    code[i] = (uint16_t)((uint16_t)n | code_sign(z[i]));
    lanes->underflowed[i] = (uint16_t)(lanes->underflowed[i] + ((a != 0) & (n == 0)));
  }
}

/* ---- random fields --------------------------------------------------------- */

/* Fields of `calls` Philox calls that follow `first`: philox4x32_10 written
 * out, so that many calls run side by side. */
INLINE void draw_fields(uint16_t *restrict field, int64_t calls, uint64_t key, const struct philox_block *first) {
  uint32_t word[MXFP4_CHUNK / 4];
  for (int64_t i = 0; i < calls; i++) {
    uint32_t c0 = first->word[0] + (uint32_t)i, c1 = first->word[1], c2 = first->word[2], c3 = first->word[3];
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
      uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
      c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
      c1 = (uint32_t)p1;
      c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
      c3 = (uint32_t)p0;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    word[4 * i] = c0;
    word[4 * i + 1] = c1;
    word[4 * i + 2] = c2;
    word[4 * i + 3] = c3;
  }
  for (int64_t i = 0; i < 4 * calls; i++) {
    uint32_t f[4];
    stochastic_fields(word[i], f);
    field[4 * i] = (uint16_t)f[0];
    field[4 * i + 1] = (uint16_t)f[1];
    field[4 * i + 2] = (uint16_t)f[2];
    field[4 * i + 3] = (uint16_t)f[3];
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
                                     const struct draw *draw, struct quantise_counts *counts) {
  struct lanes lanes = {{0}};
  union codes codes;
  uint16_t field[MXFP4_CHUNK];
  uint8_t byte[CHUNK_GROUPS];
  int64_t groups = p->cols / GROUP;
  for (int64_t i = 0; i < p->rows; i++) {
    const uint16_t *z = p->bits + i * p->stride;
    int64_t r = p->first_row + i;
    if (draw) {
      int64_t sample = r / draw->seq_len, position = r % draw->seq_len;
      struct philox_block first =
          philox_counter(draw->update, draw->first_sample + (uint64_t)sample, draw->layer, draw->operand,
                         (uint32_t)((position * p->source_cols + p->first_col) / 16));
      draw_fields(field, p->cols / 16, draw->seed, &first);
    }
    for (int64_t g = 0; g < groups; g++, z += GROUP) {
      uint16_t *code = codes.code + g * GROUP;
      uint16_t amax = amax_of_group(z);
      uint32_t b = given ? given[g] : mxfp4_scale_encode(amax);
      byte[g] = (uint8_t)b;
      if (b >= PLAIN_BYTE) {
        if (draw)
          encode_group_stochastic(code, z, b, field + g * GROUP, &lanes);
        else
          encode_group_nearest(code, z, b, &lanes);
        if (amax > b << 7) counts->saturated += count_above(z, b);
      } else if (b > 0) {
        counts->underflowed += encode_plainly(code, z, 1, b, draw ? field + g * GROUP : NULL);
      } else {
        memset(code, 0, GROUP * sizeof *code);
        counts->zero_blocks++;
      }
    }
    pack_nibbles(row_codes(row, p, r), &codes, p->cols);
    store_row_scales(row, p, r, byte);
  }
  counts->underflowed += sum_lanes(&lanes);
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

INLINE uint16_t column_code(uint16_t z, uint16_t scale_bits, uint16_t sign_mask) {
  return (uint16_t)(code_magnitude(magnitude(z), scale_bits) | (code_sign(z) & sign_mask));
}

INLINE uint16_t column_underflow(uint16_t z, uint16_t scale_bits) {
  return (uint16_t)((magnitude(z) != 0) & ((int16_t)(magnitude(z) - scale_bits) < REACH_1));
}

/* 32 columns of 32 rows, nearest, each with its own byte (0 or at least
 * PLAIN_BYTE); the 16 bytes of column c go to out + c * row_bytes. */
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
      quad[k][c] = (uint16_t)(column_code(z0[c], s, m) | column_code(z1[c], s, m) << 4 |
                              column_code(z2[c], s, m) << 8 | column_code(z3[c], s, m) << 12);
      lanes->underflowed[c] =
          (uint16_t)(lanes->underflowed[c] + column_underflow(z0[c], s) + column_underflow(z1[c], s) +
                     column_underflow(z2[c], s) + column_underflow(z3[c], s));
    }
  }
  uint16_t turned[GROUP][8];
  for (int c = 0; c < GROUP; c++)
    for (int k = 0; k < 8; k++) turned[c][k] = quad[k][c];
  for (int c = 0; c < GROUP; c++) memcpy(out + c * row_bytes, turned[c], sizeof turned[c]);
}

/* Some byte is in 1..PLAIN_BYTE-1. */
INLINE bool any_small(const uint8_t byte[GROUP]) {
  int small = 0;
  for (int c = 0; c < GROUP; c++) small |= (byte[c] != 0) & (byte[c] < PLAIN_BYTE);
  return small != 0;
}

/* The same by the definition. */
static __attribute__((noinline, cold)) int64_t encode_columns_plainly(uint8_t *out, int64_t row_bytes,
                                                                      const uint16_t *z, int64_t stride,
                                                                      const uint8_t byte[GROUP]) {
  int64_t underflowed = 0;
  for (int c = 0; c < GROUP; c++) {
    union codes codes = {{0}};
    if (byte[c] != 0) underflowed += encode_plainly(codes.code, z + c, stride, byte[c], NULL);
    pack_nibbles(out + c * row_bytes, &codes, GROUP);
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
    if (any_small(byte))
      counts->underflowed += encode_columns_plainly(out, p->source_rows / 2, z, p->stride, byte);
    else
      encode_columns(out, p->source_rows / 2, z, p->stride, byte, &lanes);
    if (above) counts->saturated += count_above_in_columns(z, p->stride, byte);
    counts->zero_blocks += zero;
    store_column_scales(column, p, col, byte);
  }
  counts->underflowed += sum_lanes(&lanes);
}

/* ---- tiles ------------------------------------------------------------------- */

CPU_CLONES static void tile_bytes(uint8_t byte[CHUNK_GROUPS], const struct mxfp4_piece *p) {
  for (int64_t g = 0; g < p->cols / GROUP; g++) {
    uint16_t columns[GROUP], amax = 0;
    amax_of_columns(columns, p->bits + g * GROUP, p->stride);
    for (int c = 0; c < GROUP; c++) amax = columns[c] > amax ? columns[c] : amax;
    byte[g] = (uint8_t)mxfp4_scale_adaptive(amax);
  }
}

/* ---- what emission calls ------------------------------------------------------- */

static void count_groups(struct quantise_counts *counts, const struct mxfp4_piece *p) {
  counts->elements += p->rows * p->cols;
  counts->blocks += p->rows * p->cols / GROUP;
}

void mxfp4_quantise_rows(const struct operand *row, const struct mxfp4_piece *p, const struct draw *draw,
                         struct quantise_counts *counts) {
  quantise_rows(row, p, NULL, draw, counts);
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
    quantise_rows(row, p, byte, NULL, row_counts);
    count_groups(row_counts, p);
  }
  if (column) {
    quantise_columns(column, p, byte, column_counts);
    count_groups(column_counts, p);
  }
}
