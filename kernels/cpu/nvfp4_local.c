/* CTA-local NVFP4 (kernels/nvfp4_local.h has the arithmetic).
 *
 * Chunks of 128x128 of the operand's own view are laid from the corner of each
 * (strip, segment): none crosses to another outer factor, and an arm is
 * quantised as it would be alone; at far edges they are partial.  Three passes:
 * the amax of every chunk; the outer factors; the codes, where each block's
 * scale is folded as soon as its codes are chosen.  From the first pass to the
 * third a chunk's amax stands in its own first two bytes of codes.
 *
 * Multiplying a chunk by a power of two changes nothing in LC-P2 but its
 * exponent.  So the smallest chunks, in which E2M1's factor would be no FP32, are
 * first multiplied by 2^64.
 */
#include "kernels/nvfp4_local.h"

#include <string.h>

#include "base/checked.h"
#include "kernels/cpu/blocks.h"
#include "kernels/cpu/nvfp4.h"
#include "kernels/cpu/whole.h"

enum {
  CHUNK = NVFP4_LOCAL_CHUNK,
  BLOCK = 16,
  BITS_INFINITE = 0x7F80,
  BITS_SMALL = 27 << 7, /* 2^-100 */
  LIFT = 64
};
_Static_assert((int)CHUNK == (int)PANEL_COLS && (int)CHUNK == (int)PANELS_MOST * PANEL_ROWS, "a chunk is loaded at once");

struct job {
  const struct operand *o;
  const struct matrix *source;
  const struct draw *draw;
  struct quantise_counts *counts;
  int64_t strip, segment; /* o's; all rows, all columns where it says 0 */
  int64_t segments, outers;
  int64_t chunks, chunks_across; /* of a (strip, segment); those at far edges may have nothing in them */
};

static int64_t smallest(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- chunks -------------------------------------------------------------------- */

/* The index-th chunk as the source lies: for a column view one of each outer factor, then
 * the next of each. */
static int64_t in_order(const struct job *j, int64_t index) {
  return j->o->view == VIEW_ROW ? index : index % j->outers * j->chunks + index / j->outers;
}

/* Chunk `index`, the chunks of one outer factor following each other; false: there is nothing. */
static bool chunk_at(const struct job *j, int64_t index, struct panel *chunk) {
  const int64_t outer = index / j->chunks, down = index % j->chunks / j->chunks_across, across = index % j->chunks_across;
  const int64_t strip = outer / j->segments, segment = outer % j->segments;
  const int64_t row = strip * j->strip + down * CHUNK, col = segment * j->segment + across * CHUNK;
  *chunk = (struct panel){row, smallest(smallest(CHUNK, (strip + 1) * j->strip - row), j->o->rows - row), col,
                          smallest(smallest(CHUNK, (segment + 1) * j->segment - col), j->o->cols - col)};
  return chunk->rows > 0 && chunk->cols > 0;
}

static uint8_t *kept_at(const struct operand *o, const struct panel *chunk) {
  return o->codes + chunk->first_row * (o->cols / 2) + chunk->first_col / 2;
}

static uint16_t kept_amax(const struct operand *o, const struct panel *chunk) {
  uint16_t amax;
  memcpy(&amax, kept_at(o, chunk), sizeof amax);
  return amax;
}

/* The chunk's piece of the source. */
static const uint16_t *piece_of(const struct job *j, const struct panel *chunk, int64_t *rows, int64_t *cols) {
  const bool by_rows = j->o->view == VIEW_ROW;
  *rows = by_rows ? chunk->rows : chunk->cols;
  *cols = by_rows ? chunk->cols : chunk->rows;
  return (const uint16_t *)j->source->data +
         (by_rows ? chunk->first_row * j->source->cols + chunk->first_col
                  : chunk->first_col * j->source->cols + chunk->first_row);
}

static void load_chunk(uint16_t bits[CHUNK * CHUNK], const struct job *j, const struct panel *chunk) {
  panels_load(bits, j->source, j->o->view, j->o->encoding.hadamard, chunk);
}

/* ---- first pass: amaxes ---------------------------------------------------------- */

static void find_amax(void *context, int64_t index, int worker) {
  (void)worker;
  const struct job *j = context;
  const enum hadamard h = j->o->encoding.hadamard;
  struct panel chunk;
  if (!chunk_at(j, in_order(j, index), &chunk)) return;
  uint16_t amax = 0;
  if (h == HADAMARD_NONE || j->o->view == VIEW_COLUMN) {
    int64_t rows, cols;
    const uint16_t *z = piece_of(j, &chunk, &rows, &cols);
    amax = amax_of_source(z, j->source->cols, rows, cols, h);
  } else {
    uint16_t bits[CHUNK * CHUNK];
    load_chunk(bits, j, &chunk);
    for (int64_t r = 0; r < chunk.rows; r += PANEL_ROWS) {
      const uint16_t a = panel_amax(bits + r * PANEL_COLS, &chunk);
      amax = a > amax ? a : amax;
    }
  }
  memcpy(kept_at(j->o, &chunk), &amax, sizeof amax);
}

/* ---- second pass: outer factors --------------------------------------------------- */

static void find_outer(void *context, int64_t index, int worker) {
  (void)worker;
  const struct job *j = context;
  uint16_t amax = 0;
  for (int64_t k = index * j->chunks; k < (index + 1) * j->chunks; k++) {
    struct panel chunk;
    if (!chunk_at(j, k, &chunk)) continue;
    const uint16_t a = kept_amax(j->o, &chunk);
    amax = a > amax ? a : amax;
  }
  j->o->outer[index] = nvfp4_local_outer(j->o->encoding.scale, amax);
}

/* ---- third pass: scales and codes ---------------------------------------------------- */

/* Folded scales, and the factors that codes are chosen with: 0 where the folded
 * scale is.  chunk.unit[1] is 1. */
CPU_CLONES static void make_scales(uint8_t *restrict scale, float *restrict encode, const uint16_t *restrict amax,
                                   const struct nvfp4_local_chunk *chunk, float fold) {
  const float unit = chunk->unit[0], multiplier = chunk->multiplier, decode = chunk->decode;
  for (int i = 0; i < PANEL_BLOCKS_MOST; i++) {
    const uint16_t a = amax[i] < BITS_INFINITE ? amax[i] : BITS_INFINITE - 1;
    const uint32_t code = nvfp4_scale_code(bf16_decode(a) * unit * multiplier);
    const uint32_t folded = nvfp4_scale_code(nvfp4_scale_value(code) * fold);
    const float e = nvfp4_encode_factor(code, decode) * unit;
    scale[i] = (uint8_t)folded;
    encode[i] = folded == 0 ? 0.0f : e;
  }
}

/* A BF16 value times 2^LIFT, exactly. */
static void lift(uint16_t *bits, int64_t n) {
  for (int64_t i = 0; i < n; i++) bits[i] = bf16_encode(bf16_decode(bits[i]) * nvfp4_power(LIFT));
}

static void encode_chunk(void *context, int64_t index, int worker) {
  (void)worker;
  const struct job *j = context;
  const struct operand *o = j->o;
  const enum scale_rule rule = o->encoding.scale;
  struct panel at;
  index = in_order(j, index);
  if (!chunk_at(j, index, &at)) return;
  const uint16_t amax = kept_amax(o, &at);
  const bool lifted = rule == SCALE_LOCAL_POW2 && amax > 0 && amax < BITS_SMALL;
  uint16_t chunk_amax = amax;
  if (lifted) lift(&chunk_amax, 1);
  struct nvfp4_local_chunk chunk = {{0}, 0, 0};
  float fold = 0;
  if (amax > 0) {
    chunk = nvfp4_local_chunk_of(rule, chunk_amax);
    fold = nvfp4_local_fold(rule, amax, o->outer[index / j->chunks]);
  }
  struct quantise_counts counts = {0};
  struct panel_blocks b = {.amax = {0}};
  uint16_t chunk_bits[CHUNK * CHUNK], field[PANEL_ELEMENTS];
  load_chunk(chunk_bits, j, &at);
  for (int64_t r = 0; r < at.rows; r += PANEL_ROWS) {
    const struct panel p = {at.first_row + r, smallest(PANEL_ROWS, at.rows - r), at.first_col, at.cols};
    uint16_t *bits = chunk_bits + r * PANEL_COLS;
    if (lifted) lift(bits, at.cols * PANEL_ROWS);
    blocks_amax(b.amax, bits, &p, BLOCK, o->encoding.block == BLOCK_2D16);
    make_scales(b.scale, b.encode, b.amax, &chunk, fold);
    if (j->draw) blocks_draw(field, o, &p, j->draw);
    blocks_write(o, &p, bits, BLOCK, &b, j->draw ? field : NULL, &counts);
  }
  if (lifted) counts.amax = bf16_decode(amax);
  if (j->counts) cpu_counts_add(j->counts, &counts);
}

/* All passes of one outer factor of a row view. */
static void quantise_strip(void *context, int64_t index, int worker) {
  const struct job *j = context;
  for (int64_t k = index * j->chunks; k < (index + 1) * j->chunks; k++) find_amax(context, k, worker);
  find_outer(context, index, worker);
  for (int64_t k = index * j->chunks; k < (index + 1) * j->chunks; k++) encode_chunk(context, k, worker);
}

/* ---- the operation --------------------------------------------------------------------------- */

static int64_t or_all(int64_t part, int64_t all) { return part > 0 && part < all ? part : all; }

static void check(const struct job *j) {
  const struct operand *o = j->o;
  const int64_t group = o->encoding.hadamard == HADAMARD_SIGNED_32 ? 32 : BLOCK;
  CPU_REQUIRE(o->cols % group == 0 && j->segment % group == 0, "the contraction axis or a segment cuts a block");
  CPU_REQUIRE(o->encoding.block != BLOCK_2D16 || (o->rows % BLOCK == 0 && j->strip % BLOCK == 0),
              "the rows or a strip cut a tile");
  CPU_REQUIRE(!j->draw || o->view == VIEW_ROW, "draws belong to rows");
}

/* Tiles, chunks and strips of both views are the same elements, so their numbers are. */
void nvfp4_local_quantise(struct cpu_device *d, struct panel_rule *rule, const struct matrix *source) {
  const struct operand *o = rule->o, *done = rule->done;
  if (source->rows == 0 || source->cols == 0) return;
  CPU_REQUIRE(!done || (or_all(o->strip, o->rows) == or_all(done->segment, done->cols) &&
                        or_all(o->segment, o->cols) == or_all(done->strip, done->rows)),
              "the strips of one view of a weight are not the segments of the other");
  struct job j = {.o = o, .source = source, .draw = rule->draw, .counts = rule->counts};
  j.strip = or_all(o->strip, o->rows);
  j.segment = or_all(o->segment, o->cols);
  j.segments = ceil_div(o->cols, j.segment);
  j.chunks_across = ceil_div(j.segment, CHUNK);
  j.chunks = ceil_div(j.strip, CHUNK) * j.chunks_across;
  check(&j);
  const int64_t outers = j.outers = ceil_div(o->rows, j.strip) * j.segments;
  if (o->view == VIEW_ROW && outers >= 4 * threads_count(d->threads)) { /* then a strip is read from memory once */
    threads_run(d->threads, outers, quantise_strip, &j);
    return;
  }
  threads_run(d->threads, outers * j.chunks, find_amax, &j);
  threads_run(d->threads, outers, find_outer, &j);
  threads_run(d->threads, outers * j.chunks, encode_chunk, &j);
}
