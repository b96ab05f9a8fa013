/* Operands whose scales reach beyond a strip of 32 rows.
 *
 * NVFP4 and FP8 take their factor from the amax of a whole view, CTA-local
 * NVFP4 from chunks of 128x128 folded over strips, a Hadamard transform needs
 * groups of 16 or 32 tokens: such operands are made from the whole result,
 * rounded to BF16, after the last strip of a producer is done (producer.c,
 * quantise.c keep it in `plain` or in scratch).
 *
 * All of them see an operand the same way, whichever view it is: as panels whose
 * rows are lanes, the transform already applied.
 */
#ifndef FP4D_KERNELS_CPU_WHOLE_H
#define FP4D_KERNELS_CPU_WHOLE_H

#include "kernels/cpu/cpu.h"

/* True where `o` (NULL: false) must be made from the whole result. */
bool whole_wanted(const struct operand *o);

/* Takes the wanted ones out of *out; true where there were some. */
bool whole_drop(struct emission *out);

/* How an operation with wanted operands emits. */
struct whole_emission {
  bool wanted;             /* out has some; else strips is *out */
  struct emission strips;  /* what strips write: out's rest, and the result in BF16 */
  struct operand kept;     /* as which they keep it, where out->plain is not that */
  struct matrix result;    /* the result: what whole_quantise takes */
};

/* The result stands in out->plain if that is BF16, else in scratch behind `used` bytes:
 * whole_scratch_bytes(rows, cols). The answer points into itself: use it where it is. */
void whole_begin(struct whole_emission *e, struct device *d, const struct emission *out, int64_t rows, int64_t cols,
                 int64_t used);
int64_t whole_scratch_bytes(int64_t rows, int64_t cols);

/* Makes the wanted ones of out->row and out->column from source (BF16, the
 * emission's whole result); adds to out->counts. */
void whole_quantise(struct device *d, const struct emission *out, const struct matrix *source);

/* ---- panels (kernels/cpu/panel.c, amax.c) ----------------------------------- */

enum {
  PANEL_ROWS = 32,
  PANEL_COLS = 128,
  PANEL_ELEMENTS = PANEL_ROWS * PANEL_COLS,
  PANELS_MOST = 4 /* loaded at once */
};

/* A panel's place in its view: cols <= PANEL_COLS and a multiple of 16 (of 32 for
 * SIGNED_32), and so is first_col. */
struct panel {
  int64_t first_row, rows, first_col, cols;
};

/* Rows are lanes: bits[c * PANEL_ROWS + r] = element (first_row + r, first_col + c)
 * of the view of source, after the transform along the contraction, as BF16; a
 * zero where the view has no such row.  p->rows <= PANELS_MOST * PANEL_ROWS: panels of
 * PANEL_ROWS follow each other PANEL_ELEMENTS apart. */
void panels_load(uint16_t *bits, const struct matrix *source, enum view view, enum hadamard h, const struct panel *p);

/* Rows of the source that will be read next, to be asked for a few cache lines at a time between
 * other work: lines that are asked for at once, more than the processor keeps open, are
 * waited for. */
struct ahead {
  const uint16_t *row; /* what is asked for next begins here */
  int64_t stride, rows, cols;
  int64_t col;   /* of this row, asked for already */
  int64_t share; /* lines at a time */
};

/* [rows][cols] from z, in about `times` askings; rows = 0: nothing. */
struct ahead ahead_of(const uint16_t *z, int64_t stride, int64_t rows, int64_t cols, int64_t times);
void ahead_ask(struct ahead *a); /* NULL: nothing */

/* The other way round, for codes: row r of the panel gets words w = 0..n-1 from
 * word[w * PANEL_ROWS + r], at codes + r * row_bytes; n is a multiple of 4.
 * stream: past the caches, where it can be (panel_streams: an operand too large for them);
 * then panel_finish makes other threads see all that this one stored. */
void panel_store(uint8_t *codes, int64_t row_bytes, int64_t rows, const uint16_t *word, int64_t n, bool stream);
bool panel_streams(const struct operand *o);
void panel_finish(void);

/* A panel in `from` with rows and columns of each of its 16x16 tiles exchanged. */
void panel_turn_tiles(uint16_t *to, const uint16_t *from, int64_t cols);

/* How a view is made panel by panel.  visit is called with every panel (of bits, what
 * lies beyond the panel's cols is anything); what it adds to its counts comes to
 * *counts (NULL: nowhere).  It asks for what is ahead about AHEAD_PANEL times. */
enum { AHEAD_PANEL = PANEL_COLS / 16 };
struct panel_rule;
typedef void panel_visit(const struct panel_rule *rule, const uint16_t *bits, const struct panel *p,
                         struct quantise_counts *counts, struct ahead *ahead);

struct nvfp4_factor {
  float encode, decode; /* S and D */
  float outer;          /* A */
};

struct panel_rule {
  const struct operand *o, *done; /* done: the other view of the same 2D tiles, where its tiles are made first */
  const struct draw *draw;        /* NULL unless o rounds stochastically */
  struct quantise_counts *counts;
  uint16_t amax; /* the whole view's, where the scale is of a tensor */
  panel_visit *visit;
  bool in_order; /* one task visits all panels of 128x128 elements, the first rows first */
  void (*finish)(const struct panel_rule *rule); /* NULL, or called when all panels are made */
  struct nvfp4_factor factor; /* of what one factor a view makes */
  void *context;
};

/* One walk over the source for n = 1 or 2 views of it: those of 128x128 elements are
 * visited one after the other, tasks spread over the threads. */
void panels_visit(struct cpu_device *d, const struct panel_rule *rules, int n, const struct matrix *source);

/* Largest magnitudes, as BF16 bits without sign, compared as integers: a NaN
 * counts above infinity.  Of a panel; of each 16 elements along its rows, at
 * amax[place * PANEL_ROWS + row]; of each PANEL_COLS columns of elements [rows][cols] `stride`
 * apart, amax[] being raised to it; of all such elements, for a column view after its
 * transform (rows are a multiple of its width); of each row of views, in one walk, to the bits
 * of its outer factor; of whole views after their transforms, in one walk (NULL: neither
 * looked at nor set). */
uint16_t panel_amax(const uint16_t *bits, const struct panel *p);
void panel_amax_of_16(uint16_t *amax, const uint16_t *bits, int64_t places);
void amax_of_tiles(uint16_t *amax, const uint16_t *z, int64_t stride, int64_t rows, int64_t cols);
uint16_t amax_of_source(const uint16_t *z, int64_t stride, int64_t rows, int64_t cols, enum hadamard columns);
void row_amaxes(struct cpu_device *d, const struct operand *row, const struct operand *column,
                const struct matrix *source);
void view_amaxes(struct cpu_device *d, const struct operand *row, const struct operand *column,
                 const struct matrix *source, uint16_t amax[2]);

/* Raises counts->amax to the panel's largest finite magnitude; amax: its largest. */
void panel_count_amax(struct quantise_counts *counts, uint32_t amax, const uint16_t *bits, const struct panel *p);

/* ---- the rules: one file each ---------------------------------------------- */

/* Makes rule->o at once, or sets rule->visit and what that needs, by which all its
 * panels are then made (rule->finish does what is left).  A view with `done` gets the same codes and scales, transposed.
 * Each gives every byte of codes, scales and outer factors (the scales' padding is
 * zero already). Work is spread over the device's threads.  Scratch is not theirs: the
 * source may stand in it. */
typedef void whole_rule(struct cpu_device *d, struct panel_rule *rule, const struct matrix *source);

whole_rule nvfp4_quantise; /* nvfp4.c: SCALE_TENSOR, SCALE_TENSOR_4OVER6; 1x16 and 2D16 */
/* CTA-local operands (NULL: none) need their chunks' amaxes first, both views' in one walk. */
void nvfp4_local_amaxes(struct cpu_device *d, const struct operand *row, const struct operand *column,
                        const struct matrix *source);
whole_rule nvfp4_local_quantise; /* nvfp4_local.c: LC-F, LC-P2; 1x16 and 2D16 with common outers */
whole_rule fp8_quantise; /* fp8.c: E4M3, E5M2; SCALE_TENSOR, SCALE_ROW */
whole_rule mxfp4_whole_quantise; /* mxfp4_whole.c: MXFP4 with a transform, or by SCALE_MX_DECODE / _FLOOR */

#endif
