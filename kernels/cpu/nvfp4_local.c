/* CTA-local NVFP4 (kernels/nvfp4_local.h has the arithmetic).
 *
 * Chunks of 128x128 of the operand's own view are laid from the corner of each
 * (strip, segment): none crosses to another outer factor, and an arm is
 * quantised as it would be alone; at far edges they are partial.  Three passes:
 * the amax of every chunk; the outer factors; the codes, where each block's
 * scale is folded as soon as its codes are chosen.  From the first pass to the
 * third a chunk's amax stands in its own first two bytes of codes.
 *
 * A chunk whose amax is not finite or below 2^-100 is encoded element by
 * element with the header's functions, all others in loops that compute the
 * same in lanes.
 */
#include "kernels/nvfp4_local.h"

#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "kernels/cpu/whole.h"

#define INLINE static inline __attribute__((always_inline))

enum {
  CHUNK = NVFP4_LOCAL_CHUNK,
  BLOCK = 16,
  PANEL_BLOCKS = PANEL_COLS / BLOCK, /* a row's */
  BLOCKS = PANEL_ROWS * PANEL_BLOCKS,
  ELEMENTS = PANEL_ROWS * PANEL_COLS,
  LEAST_COMMON = 0x0D80 /* 2^-100 */
};

struct job {
  const struct operand *o, *twin;
  const struct matrix *source;
  const struct draw *draw;
  int64_t strip, segment; /* o's; all rows, all columns where it says 0 */
  int64_t segments, strip_chunks, segment_chunks, chunks_across;
  struct quantise_counts counts;
};

/* A panel on its way: rows <= PANEL_ROWS of one chunk. */
struct work {
  uint16_t bits[ELEMENTS];
  union {
    uint16_t code[ELEMENTS];
    uint32_t pair[ELEMENTS / 2];
  };
  uint16_t field[ELEMENTS];
  uint16_t amax[BLOCKS]; /* of each block, or of its tile */
  float coefficient[BLOCKS];
  uint32_t scale[BLOCKS]; /* folded */
};

static int64_t smallest(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- chunks -------------------------------------------------------------------- */

/* Chunk `index`, *outer being the number of its factor; false: nothing is there
 * (the last strip or segment may have fewer chunks). */
static bool chunk_at(const struct job *j, int64_t index, struct panel *chunk, int64_t *outer) {
  const int64_t down = index / j->chunks_across, across = index % j->chunks_across;
  const int64_t strip = down / j->strip_chunks, segment = across / j->segment_chunks;
  const int64_t row = strip * j->strip + down % j->strip_chunks * CHUNK;
  const int64_t col = segment * j->segment + across % j->segment_chunks * CHUNK;
  *outer = strip * j->segments + segment;
  *chunk = (struct panel){row, smallest(smallest(CHUNK, (strip + 1) * j->strip - row), j->o->rows - row), col,
                              smallest(smallest(CHUNK, (segment + 1) * j->segment - col), j->o->cols - col)};
  return chunk->rows > 0 && chunk->cols > 0;
}

static uint8_t *codes_at(const struct operand *o, int64_t row, int64_t col) {
  return o->codes + row * (o->cols / 2) + col / 2;
}

static uint16_t kept_amax(const struct operand *o, const struct panel *chunk) {
  uint16_t amax;
  memcpy(&amax, codes_at(o, chunk->first_row, chunk->first_col), sizeof amax);
  return amax;
}

/* ---- first pass: amaxes ---------------------------------------------------------- */

CPU_CLONES static uint16_t largest_magnitude(const uint16_t *bits, int64_t stride, int64_t rows, int64_t cols) {
  uint16_t lane[CHUNK] = {0}, amax = 0;
  for (int64_t r = 0; r < rows; r++, bits += stride)
    for (int64_t c = 0; c < cols; c++) {
      uint16_t a = bits[c] & 0x7FFF;
      lane[c] = a > lane[c] ? a : lane[c];
    }
  for (int c = 0; c < CHUNK; c++) amax = lane[c] > amax ? lane[c] : amax;
  return amax;
}

static void find_amax(void *context, int64_t index, int worker) {
  (void)worker;
  const struct job *j = context;
  const struct operand *o = j->o;
  struct panel chunk;
  int64_t outer;
  if (!chunk_at(j, index, &chunk, &outer)) return;
  uint16_t amax = 0;
  if (o->encoding.hadamard == HADAMARD_NONE) {
    const bool row = o->view == VIEW_ROW;
    const uint16_t *bits = (const uint16_t *)j->source->data + (row ? chunk.first_row : chunk.first_col) * j->source->cols +
                           (row ? chunk.first_col : chunk.first_row);
    amax = largest_magnitude(bits, j->source->cols, row ? chunk.rows : chunk.cols, row ? chunk.cols : chunk.rows);
  } else {
    for (int64_t r = 0; r < chunk.rows; r += PANEL_ROWS) {
      uint16_t bits[ELEMENTS];
      const int64_t rows = smallest(PANEL_ROWS, chunk.rows - r);
      panel_load(bits, j->source, o, chunk.first_row + r, rows, chunk.first_col, chunk.cols);
      const uint16_t a = largest_magnitude(bits, PANEL_COLS, rows, chunk.cols);
      amax = a > amax ? a : amax;
    }
  }
  memcpy(codes_at(o, chunk.first_row, chunk.first_col), &amax, sizeof amax);
}

/* ---- second pass: outer factors --------------------------------------------------- */

static void find_outer(void *context, int64_t index, int worker) {
  (void)worker;
  const struct job *j = context;
  const int64_t strip = index / j->segments, segment = index % j->segments;
  uint16_t amax = 0;
  for (int64_t down = 0; down < j->strip_chunks; down++)
    for (int64_t across = 0; across < j->segment_chunks; across++) {
      struct panel chunk;
      int64_t outer;
      if (!chunk_at(j, (strip * j->strip_chunks + down) * j->chunks_across + segment * j->segment_chunks + across,
                    &chunk, &outer))
        continue;
      const uint16_t a = kept_amax(j->o, &chunk);
      amax = a > amax ? a : amax;
    }
  const float factor = nvfp4_local_outer(j->o->encoding.scale, amax);
  j->o->outer[index] = factor;
  if (j->twin) j->twin->outer[segment * (operand_outer_count(j->o) / j->segments) + strip] = factor;
}

/* ---- third pass: scales ------------------------------------------------------------- */

INLINE float decode_scale(uint32_t byte) {
  const float subnormal = (float)(int32_t)byte * 0x1p-9f;
  return byte < 8u ? subnormal : f32_from_bits((byte << 20) + (120u << 23));
}

/* e4m3_encode of 0 <= x < 464. */
INLINE uint32_t encode_scale(float x) {
  const uint32_t u = f32_bits(x);
  const uint32_t normal = ((u + 0x7FFFFu + (u >> 20 & 1u)) >> 20) - (120u << 3);
  const uint32_t subnormal = f32_bits(x + 16384.0f) - 0x46800000u;
  return x < 0x1p-6f ? subnormal : normal;
}

/* Coefficients and folded scales of a common chunk's panel from its amaxes. */
CPU_CLONES static void make_scales(struct work *p, const struct nvfp4_local_chunk *chunk, float fold) {
  const float unit = chunk->unit[0], multiplier = chunk->multiplier, decode = chunk->decode;
  for (int i = 0; i < BLOCKS; i++) {
    const uint32_t byte = encode_scale(bf16_decode(p->amax[i]) * unit * multiplier);
    const float scale = decode_scale(byte);
    const float e = 1.0f / ((byte == 0u ? 1.0f : scale) * decode) * unit;
    p->coefficient[i] = byte == 0u ? 0.0f : e;
    p->scale[i] = encode_scale(scale * fold);
  }
}

CPU_CLONES static void block_amaxes(struct work *p) {
  for (int i = 0; i < BLOCKS; i++) {
    const uint16_t *z = p->bits + i * BLOCK;
    uint16_t amax = 0;
    for (int k = 0; k < BLOCK; k++) {
      const uint16_t a = z[k] & 0x7FFF;
      amax = a > amax ? a : amax;
    }
    p->amax[i] = amax;
  }
}

/* A panel of 16 rows is a row of tiles: every block gets its tile's amax. */
static void spread_tile_amaxes(struct work *p) {
  for (int b = 0; b < PANEL_BLOCKS; b++) {
    uint16_t amax = 0;
    for (int r = 0; r < PANEL_ROWS; r++) amax = p->amax[r * PANEL_BLOCKS + b] > amax ? p->amax[r * PANEL_BLOCKS + b] : amax;
    for (int r = 0; r < PANEL_ROWS; r++) p->amax[r * PANEL_BLOCKS + b] = amax;
  }
}

/* ---- third pass: codes ---------------------------------------------------------------- */

/* E2M1 of |t| (finite): below 2 in steps of 1/2, from 2 on with one fraction bit. */
INLINE uint32_t code_nearest(uint32_t t) {
  const int32_t fixed = (int32_t)(f32_bits(f32_from_bits(t) + 0x1p22f) - 0x4A800000u);
  int32_t floating = (int32_t)((t + 0x1FFFFFu + (t >> 22 & 1u)) >> 22) - 252;
  floating = floating < 4 ? 4 : floating > 7 ? 7 : floating;
  return (uint32_t)(fixed < floating ? fixed : floating);
}

INLINE uint32_t code_stochastic(uint32_t t, uint32_t field) {
  const int32_t fixed = ((int32_t)(f32_from_bits(t) * 0x1p17f) + (int32_t)field) >> 16;
  int32_t floating = (int32_t)((t + (field << 6)) >> 22) - 252;
  floating = floating < 4 ? 4 : floating > 7 ? 7 : floating;
  return (uint32_t)(fixed < floating ? fixed : floating);
}

INLINE void encode_panel(struct work *p, int64_t rows, bool stochastic, struct quantise_counts *counts) {
  uint16_t saturated[BLOCK] = {0}, underflowed[BLOCK] = {0};
  for (int64_t i = 0; i < rows * PANEL_BLOCKS; i++) {
    const uint16_t *restrict z = p->bits + i * BLOCK, *restrict field = p->field + i * BLOCK;
    uint16_t *restrict code = p->code + i * BLOCK;
    const float coefficient = p->coefficient[i];
    const uint16_t sign = coefficient == 0.0f ? 0 : 8, dead = p->scale[i] == 0u;
    for (int k = 0; k < BLOCK; k++) {
      const uint32_t a = z[k] & 0x7FFFu;
      const uint32_t t = f32_bits(f32_from_bits(a << 16) * coefficient);
      const uint32_t m = stochastic ? code_stochastic(t, field[k]) : code_nearest(t);
      code[k] = (uint16_t)(m | ((uint32_t)z[k] >> 12 & sign));
      saturated[k] = (uint16_t)(saturated[k] + (t > 0x40C00000u));
      underflowed[k] = (uint16_t)(underflowed[k] + ((a != 0u) & ((m == 0u) | dead)));
    }
  }
  for (int k = 0; k < BLOCK; k++) {
    counts->saturated += saturated[k];
    counts->underflowed += underflowed[k];
  }
}

CPU_CLONES static void encode_panel_nearest(struct work *p, int64_t rows, struct quantise_counts *counts) {
  encode_panel(p, rows, false, counts);
}
CPU_CLONES static void encode_panel_stochastic(struct work *p, int64_t rows, struct quantise_counts *counts) {
  encode_panel(p, rows, true, counts);
}

/* The same by the header, for chunks that are not common; also the finite amax. */
static __attribute__((cold, noinline)) void encode_plainly(struct work *p, int64_t rows, bool stochastic,
                                                           const struct nvfp4_local_chunk *chunk, float fold,
                                                           struct quantise_counts *counts) {
  for (int64_t i = 0; i < rows * PANEL_BLOCKS; i++) {
    const uint32_t scale = nvfp4_local_scale(chunk, p->amax[i]);
    const float coefficient = nvfp4_local_coefficient(chunk, scale);
    p->scale[i] = nvfp4_local_folded(scale, fold);
    for (int64_t k = i * BLOCK; k < (i + 1) * BLOCK; k++) {
      const float t = bf16_decode(p->bits[k]) * chunk->unit[0] * chunk->unit[1] * coefficient;
      const uint16_t a = p->bits[k] & 0x7FFF;
      const uint32_t code = scale == 0u   ? 0u
                            : stochastic ? e2m1_encode_stochastic(t, p->field[k])
                                         : e2m1_encode(t);
      p->code[k] = (uint16_t)code;
      counts->saturated += !(fabsf(t) <= 6.0f);
      counts->underflowed += a != 0 && ((code & 7u) == 0u || p->scale[i] == 0u);
      if (a < 0x7F80u && bf16_decode(a) > counts->amax) counts->amax = bf16_decode(a);
    }
  }
}

static void draw_fields(struct work *p, const struct job *j, int64_t first_row, int64_t rows, int64_t first_col,
                        int64_t cols) {
  const struct draw *d = j->draw;
  for (int64_t r = 0; r < rows; r++) {
    const int64_t row = first_row + r, position = row % d->seq_len;
    for (int64_t b = 0; b < cols / BLOCK; b++) {
      const struct philox_block words = philox4x32_10(
          d->seed, philox_counter(d->update, d->first_sample + (uint64_t)(row / d->seq_len), d->layer, d->operand,
                                  (uint32_t)((position * j->o->cols + first_col) / BLOCK + b)));
      for (int w = 0; w < 4; w++) {
        uint32_t field[4];
        stochastic_fields(words.word[w], field);
        for (int k = 0; k < 4; k++) p->field[r * PANEL_COLS + b * BLOCK + w * 4 + k] = (uint16_t)field[k];
      }
    }
  }
}

/* ---- third pass: what is written --------------------------------------------------------- */

CPU_CLONES static void store_codes(const struct operand *o, const struct work *p, int64_t first_row, int64_t rows,
                                   int64_t first_col, int64_t cols) {
  for (int64_t r = 0; r < rows; r++) {
    uint8_t *restrict out = codes_at(o, first_row + r, first_col);
    const uint32_t *restrict pair = p->pair + r * (PANEL_COLS / 2);
    for (int64_t i = 0; i < cols / 2; i++) out[i] = (uint8_t)(pair[i] | pair[i] >> 12);
  }
}

static void store_scales(const struct operand *o, const struct work *p, int64_t first_row, int64_t rows,
                         int64_t first_col, int64_t cols) {
  const int64_t across = o->cols / BLOCK, first = first_col / BLOCK;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t b = 0; b < cols / BLOCK; b++)
      o->scales[operand_scale_offset(first_row + r, first + b, across)] = (uint8_t)p->scale[r * PANEL_BLOCKS + b];
}

/* The panel's tiles into the other view: 16 rows are one block of each of its columns. */
static void store_turned(const struct operand *twin, const struct work *p, int64_t first_row, int64_t first_col,
                         int64_t cols) {
  for (int64_t c = 0; c < cols; c++) {
    uint8_t *out = codes_at(twin, first_col + c, first_row);
    for (int r = 0; r < PANEL_ROWS; r += 2)
      out[r / 2] = (uint8_t)(p->code[r * PANEL_COLS + c] | p->code[(r + 1) * PANEL_COLS + c] << 4);
    twin->scales[operand_scale_offset(first_col + c, first_row / BLOCK, twin->cols / BLOCK)] =
        (uint8_t)p->scale[c / BLOCK];
  }
}

static void encode_chunk(void *context, int64_t index, int worker) {
  (void)worker;
  struct job *j = context;
  const struct operand *o = j->o;
  struct panel at;
  int64_t outer;
  if (!chunk_at(j, index, &at, &outer)) return;
  const uint16_t amax = kept_amax(o, &at);
  const bool common = amax >= LEAST_COMMON && amax < 0x7F80;
  const int64_t blocks = at.cols / BLOCK;
  struct quantise_counts counts = {.elements = at.rows * at.cols,
                                   .blocks = at.rows * blocks,
                                   .amax = amax < 0x7F80 ? bf16_decode(amax) : 0.0f};
  struct nvfp4_local_chunk chunk = {{0}, 0, 0};
  float fold = 0;
  struct work p;
  if (amax > 0) {
    memset(p.bits, 0, sizeof p.bits);
    chunk = nvfp4_local_chunk_of(o->encoding.scale, amax);
    fold = nvfp4_local_fold(o->encoding.scale, amax, o->outer[outer]);
  } else {
    memset(p.code, 0, sizeof p.code);
    memset(p.scale, 0, sizeof p.scale);
    counts.zero_blocks = at.rows * blocks;
  }
  for (int64_t r = 0; r < at.rows; r += PANEL_ROWS) {
    const int64_t row = at.first_row + r, rows = smallest(PANEL_ROWS, at.rows - r);
    if (amax > 0) {
      panel_load(p.bits, j->source, o, row, rows, at.first_col, at.cols);
      block_amaxes(&p);
      if (o->encoding.block == BLOCK_2D16) spread_tile_amaxes(&p);
      for (int64_t i = 0; i < rows; i++)
        for (int64_t b = 0; b < blocks; b++) counts.zero_blocks += p.amax[i * PANEL_BLOCKS + b] == 0;
      if (j->draw) draw_fields(&p, j, row, rows, at.first_col, at.cols);
      if (!common) {
        encode_plainly(&p, rows, j->draw != NULL, &chunk, fold, &counts);
      } else {
        make_scales(&p, &chunk, fold);
        if (j->draw)
          encode_panel_stochastic(&p, rows, &counts);
        else
          encode_panel_nearest(&p, rows, &counts);
      }
    }
    store_codes(o, &p, row, rows, at.first_col, at.cols);
    store_scales(o, &p, row, rows, at.first_col, at.cols);
    if (j->twin) store_turned(j->twin, &p, row, at.first_col, at.cols);
  }
  cpu_counts_add(&j->counts, &counts);
}

/* ---- the operation --------------------------------------------------------------------------- */

static int64_t or_all(int64_t part, int64_t all) { return part > 0 && part < all ? part : all; }

static void check(const struct job *j) {
  const struct operand *o = j->o, *twin = j->twin;
  const enum scale_rule rule = o->encoding.scale;
  const bool tiles = o->encoding.block == BLOCK_2D16;
  const int group = o->encoding.hadamard == HADAMARD_SIGNED_32 ? 32 : BLOCK;
  CPU_REQUIRE(rule == SCALE_LOCAL_FAITHFUL || rule == SCALE_LOCAL_POW2, "the scale rule is not CTA-local");
  CPU_REQUIRE(o->outer != NULL, "the operand has no memory for outer factors");
  CPU_REQUIRE(o->cols % group == 0 && j->segment % group == 0, "the contraction axis or a segment cuts a block");
  CPU_REQUIRE(!tiles || (o->rows % BLOCK == 0 && j->strip % BLOCK == 0), "the rows or a strip cut a tile");
  CPU_REQUIRE(!tiles || (o->encoding.hadamard == HADAMARD_NONE && !j->draw), "tiles are neither transformed nor drawn");
  CPU_REQUIRE(!j->draw || o->view == VIEW_ROW, "draws belong to rows");
  CPU_REQUIRE(!twin || (tiles && twin->outer && or_all(twin->strip, twin->rows) == j->segment &&
                        or_all(twin->segment, twin->cols) == j->strip),
              "the two views of the tiles have other strips and segments");
}

void nvfp4_local_quantise(struct cpu_device *d, const struct operand *o, const struct operand *twin,
                          const struct matrix *source, const struct draw *draw, struct quantise_counts *counts,
                          struct quantise_counts *twin_counts) {
  if (o->rows == 0 || o->cols == 0) return;
  struct job j = {.o = o, .twin = twin, .source = source, .draw = draw};
  j.strip = or_all(o->strip, o->rows);
  j.segment = or_all(o->segment, o->cols);
  j.segments = ceil_div(o->cols, j.segment);
  j.strip_chunks = ceil_div(j.strip, CHUNK);
  j.segment_chunks = ceil_div(j.segment, CHUNK);
  j.chunks_across = j.segments * j.segment_chunks;
  check(&j);
  const int64_t strips = ceil_div(o->rows, j.strip), chunks = strips * j.strip_chunks * j.chunks_across;
  threads_run(d->threads, chunks, find_amax, &j);
  threads_run(d->threads, strips * j.segments, find_outer, &j);
  threads_run(d->threads, chunks, encode_chunk, &j);
  if (counts) cpu_counts_add(counts, &j.counts);
  if (twin_counts) cpu_counts_add(twin_counts, &j.counts);
}
