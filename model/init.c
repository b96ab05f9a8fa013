/* Initial values: a function of (seed, parameter, element), the same on every
 * machine, world size and backend.
 *
 * A normal deviate cut at 3 standard deviations is the quantile of a uniform
 * one between the two tails, so nothing is drawn twice: element i takes word
 * i % 4 of the parameter's i / 4-th Philox block. */
#include <stdlib.h>

#include "base/checked.h"
#include "base/clones.h"
#include "base/philox.h"
#include "base/threads.h"
#include "kernels/elementary.h"
#include "kernels/formats.h"
#include "model/parts.h"

/* P(normal <= -3) */
#define TAIL 0x1.61de1f985b5dcp-10

/* Elements of a task (a multiple of 4), and of what is uploaded at once. */
enum { PIECE = 1 << 12, ROUND = PIECE << 8 };

static inline double truncated_normal(uint32_t word) {
  double uniform = ((double)word + 0.5) * 0x1p-32;
  return normal_quantile(TAIL + (1 - 2 * TAIL) * uniform);
}

/* values[n] from element `first` (a multiple of 4) of parameter `number`.  `flatten`:
 * all that it calls is compiled for its instruction set, so that an fma is one. */
CLONES __attribute__((flatten)) static void initial_values(float *values, const struct param *p, int number, uint64_t seed, int64_t first,
                                  int64_t n) {
  for (int64_t i = 0; i < n; i++) values[i] = 1;
  if (!(p->init_std > 0)) return;
  for (int64_t i = 0; i < n; i += 4) {
    uint64_t group = (uint64_t)(first + i) / 4;
    struct philox_block random = philox4x32_10(
        seed, philox_counter(0, group >> 32, (uint32_t)number, DRAW_INITIAL, (uint32_t)group));
    for (int64_t j = 0; j < 4 && i + j < n; j++)
      values[i + j] = (float)((double)p->init_std * truncated_normal(random.word[j]));
  }
}

/* One parameter's elements [first, first + n), made in host memory. */
struct round {
  const struct param *param;
  int number;
  uint64_t seed;
  int64_t first, n;
  float *values;   /* [ROUND] */
  uint16_t *codes; /* [ROUND], the same in BF16; NULL where the parameters are FP32 */
};

static void make_piece(void *context, int64_t index, int worker) {
  const struct round *r = context;
  (void)worker;
  int64_t at = index * PIECE, n = r->n - at < PIECE ? r->n - at : PIECE;
  initial_values(r->values + at, r->param, r->number, r->seed, r->first + at, n);
  for (int64_t i = at; r->codes && i < at + n; i++) r->codes[i] = bf16_encode(r->values[i]);
}

/* Those of the round's values whose master this rank holds. */
static void upload_master(struct model *m, const struct round *r) {
  const struct param_share *s = &m->share[r->number];
  const int64_t begin = s->first_row * r->param->cols, end = begin + s->rows * r->param->cols;
  const int64_t from = r->first > begin ? r->first : begin, to = r->first + r->n < end ? r->first + r->n : end;
  if (from < to)
    m->d->k->upload(m->d, m->master + s->offset + (from - begin), r->values + (from - r->first), (size_t)(to - from) * sizeof *r->values);
}

static bool initialise(struct model *m, struct round *r, struct threads *t, struct error *e) {
  const struct kernels *k = m->d->k;
  size_t bytes = dtype_bytes(m->shape.param_dtype);
  for (r->number = 0; r->number < m->n_params; r->number++) {
    const struct param *p = r->param = &m->param[r->number];
    int64_t elements = p->rows * p->cols;
    for (r->first = 0; r->first < elements; r->first += ROUND) {
      r->n = elements - r->first < ROUND ? elements - r->first : ROUND;
      threads_run(t, ceil_div(r->n, PIECE), make_piece, r);
      const void *own = r->codes ? (const void *)r->codes : r->values;
      k->upload(m->d, (char *)m->params + (size_t)(p->offset + r->first) * bytes, own, (size_t)r->n * bytes);
      if (m->master) upload_master(m, r);
      if (!k->synchronize(m->d, e)) return false; /* the host memory is written again */
    }
  }
  if (m->adam_m) k->clear(m->d, m->adam_m, (size_t)m->share_elements * sizeof(float));
  if (m->adam_v) k->clear(m->d, m->adam_v, (size_t)m->share_elements * sizeof(float));
  return k->synchronize(m->d, e);
}

bool model_initialise(struct model *m, uint64_t seed, int threads, struct error *e) {
  bool coded = m->shape.param_dtype == DTYPE_BF16;
  struct round r = {.seed = seed, .values = malloc(ROUND * sizeof *r.values)};
  if (coded) r.codes = malloc(ROUND * sizeof *r.codes);
  bool good = (r.values && (r.codes || !coded)) || error_set(e, ERROR_SYSTEM, "no memory for making initial values");
  struct threads *t = good ? threads_create(threads, e) : NULL;
  good = t && initialise(m, &r, t, e);
  threads_destroy(t);
  free(r.values);
  free(r.codes);
  return good;
}
