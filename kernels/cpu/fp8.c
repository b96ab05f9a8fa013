/* E4M3 and E5M2 with one factor a view or one a row of it.
 *
 *   A = largest magnitude of the view, or of the row
 *   S = min(M / A, FLT_MAX),  1 where A = 0           M = 448, 57344
 *   code = x S to nearest, saturating;  outer = 1 / S
 *
 * Where A is infinite or NaN, S is 1 and outer is A (the NaN 7fc00000):
 * everything decodes to what is not finite.
 */
#include <float.h>

#include "base/checked.h"
#include "kernels/cpu/whole.h"
#include "kernels/formats.h"

#define INLINE static inline __attribute__((always_inline))

#define LARGEST_E4M3 448.0f
#define LARGEST_E5M2 57344.0f

enum { BITS_INFINITE = 0x7F80, LANES = PANEL_ROWS, GROUP = 2 /* panels */ };

struct factor {
  float scale, outer;
};

static float largest_code(const struct operand *o) { return o->encoding.format == FORMAT_E4M3 ? LARGEST_E4M3 : LARGEST_E5M2; }

static struct factor factor_of(uint16_t amax, float largest) {
  if (amax == 0) return (struct factor){1.0f, 1.0f};
  if (amax >= BITS_INFINITE) return (struct factor){1.0f, bf16_decode(amax > BITS_INFINITE ? 0x7FC0 : BITS_INFINITE)};
  const float s = largest / bf16_decode(amax), scale = s < FLT_MAX ? s : FLT_MAX;
  return (struct factor){scale, 1.0f / scale};
}

/* A panel's counts, at most 128 a lane. */
struct lanes {
  uint32_t saturated[LANES], underflowed[LANES];
};

/* Words of two codes; scale: of each row. */
INLINE void encode_pairs(uint16_t *restrict word, const uint16_t *restrict z, int64_t pairs, const float *restrict scale,
                         bool e4m3, struct lanes *restrict lanes) {
  const float largest = e4m3 ? LARGEST_E4M3 : LARGEST_E5M2;
  for (int64_t q = 0; q < pairs; q++, word += LANES, z += 2 * LANES)
    for (int r = 0; r < LANES; r++) {
      uint32_t codes = 0, saturated = 0, underflowed = 0;
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++) {
        const float x = bf16_decode(z[i * LANES + r]) * scale[r];
        const uint32_t code = e4m3 ? e4m3_encode(x) : e5m2_encode(x);
        saturated += (f32_bits(x) & 0x7FFFFFFFu) > f32_bits(largest);
        underflowed += ((z[i * LANES + r] & 0x7FFF) != 0) & ((code & 0x7F) == 0);
        codes |= code << 8 * i;
      }
      word[r] = (uint16_t)codes;
      lanes->saturated[r] += saturated;
      lanes->underflowed[r] += underflowed;
    }
}

CPU_CLONES static void encode_e4m3(uint16_t *word, const uint16_t *z, int64_t pairs, const float *scale,
                                   struct lanes *lanes) {
  encode_pairs(word, z, pairs, scale, true, lanes);
}

CPU_CLONES static void encode_e5m2(uint16_t *word, const uint16_t *z, int64_t pairs, const float *scale,
                                   struct lanes *lanes) {
  encode_pairs(word, z, pairs, scale, false, lanes);
}

static void encode_panel(const struct operand *o, const uint16_t *bits, const struct panel *p, const float *scale,
                         struct quantise_counts *counts) {
  struct lanes lanes = {{0}, {0}};
  uint16_t word[PANEL_ELEMENTS / 2];
  uint8_t *codes = o->codes + p->first_row * o->cols + p->first_col;
  for (int64_t r = 0; r < p->rows; r++) { /* lines far apart */
    __builtin_prefetch(codes + r * o->cols, 1);
    __builtin_prefetch(codes + r * o->cols + 64, 1);
  }
  if (o->encoding.format == FORMAT_E4M3)
    encode_e4m3(word, bits, p->cols / 2, scale, &lanes);
  else
    encode_e5m2(word, bits, p->cols / 2, scale, &lanes);
  panel_store(codes, o->cols, p->rows, word, p->cols / 2);
  for (int r = 0; r < LANES; r++) {
    counts->saturated += lanes.saturated[r];
    counts->underflowed += lanes.underflowed[r];
  }
  counts->elements += p->rows * p->cols;
  panel_count_amax(counts, panel_amax(bits, p), bits, p);
}

struct job {
  const struct operand *o;
  const struct matrix *source;
  struct quantise_counts *counts;
};

static void visit(const struct panel_rule *rule, const uint16_t *bits, const struct panel *p,
                  struct quantise_counts *counts) {
  float scale[PANEL_ROWS];
  for (int r = 0; r < PANEL_ROWS; r++) scale[r] = rule->factor.encode;
  encode_panel(rule->o, bits, p, scale, counts);
}

static void count_factor(struct quantise_counts *counts, uint16_t amax) {
  counts->blocks++;
  counts->zero_blocks += amax == 0;
}

static int64_t at_most(int64_t n, int64_t most) { return n < most ? n : most; }

static void raise_rows(uint16_t amax[PANEL_ROWS], const uint16_t *bits, int64_t cols) {
  uint16_t of_16[PANEL_ELEMENTS / 16];
  panel_amax_of_16(of_16, bits, cols / 16);
  for (int64_t i = 0; i < cols / 16 * PANEL_ROWS; i++) {
    uint16_t *a = &amax[i % PANEL_ROWS];
    *a = of_16[i] > *a ? of_16[i] : *a;
  }
}

/* Whole rows of the view: their factors, then their codes. */
static void row_task(void *context, int64_t index, int worker) {
  (void)worker;
  const struct job *job = context;
  const struct operand *o = job->o;
  uint16_t bits[GROUP * PANEL_ELEMENTS], amax[GROUP * PANEL_ROWS] = {0};
  float scale[GROUP * PANEL_ROWS] = {0};
  struct quantise_counts counts = {0};
  struct panel p = {.first_row = index * GROUP * PANEL_ROWS};
  p.rows = at_most(o->rows - p.first_row, GROUP * PANEL_ROWS);
  for (int pass = 0; pass < 2; pass++) {
    for (p.first_col = 0; p.first_col < o->cols; p.first_col += PANEL_COLS) {
      p.cols = at_most(o->cols - p.first_col, PANEL_COLS);
      panels_load(bits, job->source, o->view, o->encoding.hadamard, &p);
      for (int64_t r = 0; r < p.rows; r += PANEL_ROWS) {
        const struct panel part = {p.first_row + r, at_most(p.rows - r, PANEL_ROWS), p.first_col, p.cols};
        if (pass == 0)
          raise_rows(amax + r, bits + r * PANEL_COLS, p.cols);
        else
          encode_panel(o, bits + r * PANEL_COLS, &part, scale + r, &counts);
      }
    }
    for (int64_t r = 0; pass == 0 && r < p.rows; r++) {
      const struct factor f = factor_of(amax[r], largest_code(o));
      scale[r] = f.scale;
      o->outer[p.first_row + r] = f.outer;
      count_factor(&counts, amax[r]);
    }
  }
  if (job->counts) cpu_counts_add(job->counts, &counts);
}

void fp8_quantise(struct cpu_device *d, struct panel_rule *rule, const struct matrix *source) {
  const struct operand *o = rule->o;
  CPU_REQUIRE(!rule->done && !rule->draw, "FP8 has no tiles and draws nothing");
  if (o->encoding.scale == SCALE_ROW) {
    CPU_REQUIRE(o->strip == 1 && o->segment == 0, "a factor a row is a strip of 1");
    threads_run(d->threads, ceil_div(o->rows, GROUP * PANEL_ROWS), row_task,
                &(struct job){.o = o, .source = source, .counts = rule->counts});
    return;
  }
  CPU_REQUIRE(operand_outer_count(o) == 1, "one factor a view");
  const struct factor f = factor_of(rule->amax, largest_code(o));
  o->outer[0] = f.outer;
  rule->factor.encode = f.scale;
  rule->visit = visit;
  cpu_counts_add(rule->counts, &(struct quantise_counts){.blocks = 1, .zero_blocks = rule->amax == 0});
}
