/* CTA-local NVFP4 (kernels/nvfp4_local.h has the arithmetic).
 *
 * Chunks of 128x128 of the operand's own view are laid from the corner of each
 * (strip, segment): none crosses to another outer factor, and an arm is
 * quantised as it would be alone; at far edges they are partial.  Three passes:
 * the amax of every chunk; the outer factors; the codes, where each block's
 * scale is folded as soon as its codes are chosen.  From the first pass to the
 * third a chunk's amax stands in two bytes of its own codes.
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

/* In its last row, which is written last. */
static uint8_t *kept_at(const struct operand *o, const struct panel *chunk) {
  return o->codes + (chunk->first_row + chunk->rows - 1) * (o->cols / 2) + chunk->first_col / 2;
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
    const float value = nvfp4_scale_of(bf16_decode(a) * unit * multiplier).value;
    const uint32_t folded = nvfp4_scale_of(value * fold).code;
    const float e = nvfp4_encode_factor(value, decode) * unit;
    scale[i] = (uint8_t)folded;
    encode[i] = f32_from_bits(f32_bits(e) & (0u - (folded != 0)));
  }
}

/* BF16 values times 2^LIFT, exactly. */
static void lift(uint16_t *to, const uint16_t *bits, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = bf16_encode(bf16_decode(bits[i]) * nvfp4_power(LIFT));
}

/* What a chunk's panels are encoded with. */
struct chunk {
  struct nvfp4_local_chunk factors;
  float fold;
  uint16_t amax;
  bool lifted;
};

static struct chunk chunk_of(enum scale_rule rule, uint16_t amax, float outer) {
  struct chunk c = {.amax = amax, .lifted = rule == SCALE_LOCAL_POW2 && amax > 0 && amax < BITS_SMALL};
  uint16_t own = amax;
  if (c.lifted) lift(&own, &own, 1);
  if (amax > 0) {
    c.factors = nvfp4_local_chunk_of(rule, own);
    c.fold = nvfp4_local_fold(rule, amax, outer);
  }
  return c;
}

static void encode_panel(const struct operand *o, const struct draw *draw, const struct chunk *c, const uint16_t *bits,
                         const struct panel *p, struct quantise_counts *counts, struct ahead *ahead) {
  struct panel_blocks b = {.amax = {0}};
  uint16_t field[PANEL_ELEMENTS], lifted[PANEL_ELEMENTS];
  struct quantise_counts own = {0};
  if (c->lifted) {
    lift(lifted, bits, p->cols * PANEL_ROWS);
    bits = lifted;
  }
  blocks_amax(b.amax, bits, p, BLOCK, o->encoding.block == BLOCK_2D16);
  make_scales(b.scale, b.encode, b.amax, &c->factors, c->fold);
  if (draw) blocks_draw(field, o, p, draw);
  blocks_write(o, p, bits, BLOCK, &b, draw ? field : NULL, c->lifted ? &own : counts, ahead);
  if (!c->lifted) return;
  own.amax = bf16_decode(c->amax);
  cpu_counts_add(counts, &own);
}

static void encode_chunk(void *context, int64_t index, int worker) {
  (void)worker;
  const struct job *j = context;
  struct panel at;
  index = in_order(j, index);
  if (!chunk_at(j, index, &at)) return;
  const struct chunk c = chunk_of(j->o->encoding.scale, kept_amax(j->o, &at), j->o->outer[index / j->chunks]);
  struct quantise_counts counts = {0};
  uint16_t bits[CHUNK * CHUNK];
  load_chunk(bits, j, &at);
  for (int64_t r = 0; r < at.rows; r += PANEL_ROWS) {
    const struct panel p = {at.first_row + r, smallest(PANEL_ROWS, at.rows - r), at.first_col, at.cols};
    encode_panel(j->o, j->draw, &c, bits + r * PANEL_COLS, &p, &counts, NULL);
  }
  if (j->counts) cpu_counts_add(j->counts, &counts);
  panel_finish();
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

static struct job job_of(const struct operand *o, const struct matrix *source) {
  struct job j = {.o = o, .source = source};
  j.strip = or_all(o->strip, o->rows);
  j.segment = or_all(o->segment, o->cols);
  j.segments = ceil_div(o->cols, j.segment);
  j.chunks_across = ceil_div(j.segment, CHUNK);
  j.chunks = ceil_div(j.strip, CHUNK) * j.chunks_across;
  j.outers = ceil_div(o->rows, j.strip) * j.segments;
  return j;
}

/* ---- by tiles of the source ----------------------------------------------------------------- */

/* Where strips and segments are of whole chunks, chunks are the tiles in which the source is
 * walked over, for both views at once. */
static bool by_tiles(const struct operand *o) {
  return (o->strip % CHUNK == 0 || o->strip >= o->rows) && (o->segment % CHUNK == 0 || o->segment >= o->cols);
}

static struct panel chunk_around(const struct operand *o, int64_t row, int64_t col) {
  const int64_t first_row = row / CHUNK * CHUNK, first_col = col / CHUNK * CHUNK;
  return (struct panel){first_row, smallest(CHUNK, o->rows - first_row), first_col, smallest(CHUNK, o->cols - first_col)};
}

static void visit(const struct panel_rule *rule, const uint16_t *bits, const struct panel *p,
                  struct quantise_counts *counts, struct ahead *ahead) {
  const struct operand *o = rule->o;
  const struct panel at = chunk_around(o, p->first_row, p->first_col);
  const int64_t strip = or_all(o->strip, o->rows), segment = or_all(o->segment, o->cols);
  const int64_t outer = p->first_row / strip * ceil_div(o->cols, segment) + p->first_col / segment;
  const struct chunk c = chunk_of(o->encoding.scale, kept_amax(o, &at), o->outer[outer]);
  encode_panel(o, rule->draw, &c, bits, p, counts, ahead);
}

struct bands {
  const struct operand *o[2]; /* or NULL */
  const struct matrix *source;
};

enum { TILES = 8 };

/* The amaxes of one view's chunks in [CHUNK rows][TILES chunks] of the source. */
static void keep_amaxes(const struct operand *o, const uint16_t *amax, const struct panel *s) {
  for (int64_t c = 0; c < s->cols; c += CHUNK) {
    const bool by_rows = o->view == VIEW_ROW;
    const struct panel at = chunk_around(o, by_rows ? s->first_row : s->first_col + c, by_rows ? s->first_col + c : s->first_row);
    memcpy(kept_at(o, &at), &amax[c / CHUNK], sizeof *amax);
  }
}

/* Strips of rows are read as they lie in memory, then again from the cache. */
static void band_task(void *context, int64_t index, int worker) {
  (void)worker;
  const struct bands *b = context;
  const int64_t stride = b->source->cols, across = ceil_div(stride, TILES * CHUNK);
  const int64_t first_row = index / across * CHUNK, first_col = index % across * TILES * CHUNK;
  const struct panel s = {first_row, smallest(CHUNK, b->source->rows - first_row), first_col, smallest(TILES * CHUNK, stride - first_col)};
  const uint16_t *z = (const uint16_t *)b->source->data + first_row * stride + first_col;
  uint16_t plain[TILES] = {0}, turned[TILES] = {0};
  const enum hadamard h = b->o[VIEW_COLUMN] ? b->o[VIEW_COLUMN]->encoding.hadamard : HADAMARD_NONE;
  for (int64_t r = 0; r < s.rows; r += PANEL_ROWS, z += PANEL_ROWS * stride) {
    const int64_t rows = smallest(PANEL_ROWS, s.rows - r);
    amax_of_tiles(plain, z, stride, rows, s.cols);
    for (int64_t c = 0; h != HADAMARD_NONE && c < s.cols; c += CHUNK) {
      const uint16_t a = amax_of_source(z + c, stride, rows, smallest(CHUNK, s.cols - c), h);
      turned[c / CHUNK] = a > turned[c / CHUNK] ? a : turned[c / CHUNK];
    }
  }
  if (b->o[VIEW_ROW]) keep_amaxes(b->o[VIEW_ROW], plain, &s);
  if (b->o[VIEW_COLUMN]) keep_amaxes(b->o[VIEW_COLUMN], h == HADAMARD_NONE ? plain : turned, &s);
}

void nvfp4_local_amaxes(struct cpu_device *d, const struct operand *row, const struct operand *column,
                        const struct matrix *source) {
  struct bands b = {.source = source};
  for (int v = 0; v < 2; v++) {
    const struct operand *o = v == VIEW_ROW ? row : column;
    if (!o || !by_tiles(o)) continue;
    struct job j = job_of(o, source);
    if (v == VIEW_ROW && o->encoding.hadamard != HADAMARD_NONE) /* its transform needs panels */
      threads_run(d->threads, j.outers * j.chunks, find_amax, &j);
    else
      b.o[v] = o;
  }
  if (b.o[VIEW_ROW] || b.o[VIEW_COLUMN])
    threads_run(d->threads, ceil_div(source->rows, CHUNK) * ceil_div(source->cols, TILES * CHUNK), band_task, &b);
}

/* Tiles, chunks and strips of both views are the same elements, so their numbers are. */
void nvfp4_local_quantise(struct cpu_device *d, struct panel_rule *rule, const struct matrix *source) {
  const struct operand *o = rule->o, *done = rule->done;
  if (source->rows == 0 || source->cols == 0) return;
  CPU_REQUIRE(!done || (or_all(o->strip, o->rows) == or_all(done->segment, done->cols) &&
                        or_all(o->segment, o->cols) == or_all(done->strip, done->rows)),
              "the strips of one view of a weight are not the segments of the other");
  struct job j = job_of(o, source);
  j.draw = rule->draw;
  j.counts = rule->counts;
  check(&j);
  if (!by_tiles(o)) threads_run(d->threads, j.outers * j.chunks, find_amax, &j);
  threads_run(d->threads, j.outers, find_outer, &j);
  if (!by_tiles(o)) {
    threads_run(d->threads, j.outers * j.chunks, encode_chunk, &j);
    return;
  }
  rule->visit = visit;
  rule->in_order = true;
}
