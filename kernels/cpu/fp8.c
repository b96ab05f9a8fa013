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
#include <string.h>

#include "base/checked.h"
#include "kernels/cpu/whole.h"
#include "kernels/formats.h"

#define INLINE static inline __attribute__((always_inline))

#define LARGEST_E4M3 448.0f
#define LARGEST_E5M2 57344.0f

enum { BITS_INFINITE = 0x7F80, LANES = 64 };

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
  uint16_t amax[LANES]; /* of the finite elements */
};

INLINE void encode_lanes(uint8_t *restrict codes, const uint16_t *restrict z, int n, float scale, bool e4m3,
                         struct lanes *restrict lanes) {
  const float largest = e4m3 ? LARGEST_E4M3 : LARGEST_E5M2;
  for (int i = 0; i < n; i++) {
    const float x = bf16_decode(z[i]) * scale;
    const uint32_t code = e4m3 ? e4m3_encode(x) : e5m2_encode(x);
    codes[i] = (uint8_t)code;
    const uint16_t a = z[i] & 0x7FFF, finite = a < BITS_INFINITE ? a : 0;
    lanes->amax[i] = finite > lanes->amax[i] ? finite : lanes->amax[i];
    lanes->saturated[i] += (f32_bits(x) & 0x7FFFFFFFu) > f32_bits(largest);
    lanes->underflowed[i] += (a != 0) & ((code & 0x7F) == 0);
  }
}

INLINE void encode_rows(uint8_t *codes, int64_t row_bytes, const struct panel *p, const uint16_t *bits,
                        const float *scale, bool e4m3, struct lanes *lanes) {
  for (int64_t r = 0; r < p->rows; r++) __builtin_prefetch(codes + r * row_bytes, 1); /* lines far apart */
  for (int64_t r = 0; r < p->rows; r++, codes += row_bytes, bits += PANEL_COLS) {
    int64_t c = 0;
    for (; c + LANES <= p->cols; c += LANES) encode_lanes(codes + c, bits + c, LANES, scale[r], e4m3, lanes);
    for (; c < p->cols; c += 16) encode_lanes(codes + c, bits + c, 16, scale[r], e4m3, lanes);
  }
}

CPU_CLONES static void encode_e4m3(uint8_t *codes, int64_t row_bytes, const struct panel *p, const uint16_t *bits,
                                   const float *scale, struct lanes *lanes) {
  encode_rows(codes, row_bytes, p, bits, scale, true, lanes);
}

CPU_CLONES static void encode_e5m2(uint8_t *codes, int64_t row_bytes, const struct panel *p, const uint16_t *bits,
                                   const float *scale, struct lanes *lanes) {
  encode_rows(codes, row_bytes, p, bits, scale, false, lanes);
}

/* scale: of each row */
static void encode_panel(const struct operand *o, const uint16_t *bits, const struct panel *p, const float *scale,
                         struct quantise_counts *counts) {
  struct lanes lanes = {{0}, {0}, {0}};
  uint8_t *codes = o->codes + p->first_row * o->cols + p->first_col;
  if (o->encoding.format == FORMAT_E4M3)
    encode_e4m3(codes, o->cols, p, bits, scale, &lanes);
  else
    encode_e5m2(codes, o->cols, p, bits, scale, &lanes);
  for (int i = 0; i < LANES; i++) {
    counts->saturated += lanes.saturated[i];
    counts->underflowed += lanes.underflowed[i];
    const float amax = bf16_decode(lanes.amax[i]);
    if (amax > counts->amax) counts->amax = amax;
  }
  counts->elements += p->rows * p->cols;
}

struct job {
  const struct operand *o;
  const struct matrix *source;
  float scale[PANEL_ROWS]; /* of the whole view */
  struct quantise_counts *counts;
};

static void visit(void *rule, const uint16_t *bits, const struct panel *p, struct quantise_counts *counts) {
  const struct job *job = rule;
  encode_panel(job->o, bits, p, job->scale, counts);
}

static void count_factor(struct quantise_counts *counts, uint16_t amax) {
  counts->blocks++;
  counts->zero_blocks += amax == 0;
}

/* Whole rows of the view: their factors, then their codes. */
static void row_task(void *context, int64_t index, int worker) {
  (void)worker;
  const struct job *job = context;
  const struct operand *o = job->o;
  uint16_t bits[PANEL_ROWS * PANEL_COLS], amax[PANEL_ROWS] = {0};
  float scale[PANEL_ROWS];
  struct quantise_counts counts = {0};
  struct panel p = {.first_row = index * PANEL_ROWS};
  p.rows = o->rows - p.first_row < PANEL_ROWS ? o->rows - p.first_row : PANEL_ROWS;
  for (int pass = 0; pass < 2; pass++) {
    for (p.first_col = 0; p.first_col < o->cols; p.first_col += PANEL_COLS) {
      p.cols = o->cols - p.first_col < PANEL_COLS ? o->cols - p.first_col : PANEL_COLS;
      panel_load(bits, job->source, o, p.first_row, p.rows, p.first_col, p.cols);
      if (pass == 0)
        for (int64_t r = 0; r < p.rows; r++) {
          const uint16_t a = panel_amax(bits + r * PANEL_COLS, &(struct panel){.rows = 1, .cols = p.cols});
          amax[r] = a > amax[r] ? a : amax[r];
        }
      else
        encode_panel(o, bits, &p, scale, &counts);
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

void fp8_quantise(struct cpu_device *d, const struct operand *o, const struct operand *twin,
                  const struct matrix *source, const struct draw *draw, struct quantise_counts *counts,
                  struct quantise_counts *twin_counts) {
  (void)twin_counts;
  CPU_REQUIRE(!twin && !draw, "FP8 has no tiles and draws nothing");
  struct job job = {.o = o, .source = source, .counts = counts};
  if (o->encoding.scale == SCALE_ROW) {
    CPU_REQUIRE(o->strip == 1 && o->segment == 0, "a factor a row is a strip of 1");
    threads_run(d->threads, ceil_div(o->rows, PANEL_ROWS), row_task, &job);
    return;
  }
  CPU_REQUIRE(operand_outer_count(o) == 1, "one factor a view");
  const uint16_t amax = view_amax(d, o, source);
  const struct factor f = factor_of(amax, largest_code(o));
  o->outer[0] = f.outer;
  for (int r = 0; r < PANEL_ROWS; r++) job.scale[r] = f.scale;
  panels_visit(d, o, source, visit, &job, counts);
  cpu_counts_add(counts, &(struct quantise_counts){.blocks = 1, .zero_blocks = amax == 0});
}
