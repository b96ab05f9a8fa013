/* Initial values: a function of (seed, parameter, element), the same on every
 * machine, world size and backend.
 *
 * A normal deviate cut at 3 standard deviations is the quantile of a uniform
 * one between the two tails, so nothing is drawn twice: element i takes word
 * i % 4 of the parameter's i / 4-th Philox block. */
#include "base/philox.h"
#include "kernels/elementary.h"
#include "kernels/formats.h"
#include "model/parts.h"

/* P(normal <= -3) */
#define TAIL 0x1.61de1f985b5dcp-10

static double truncated_normal(uint32_t word) {
  double uniform = ((double)word + 0.5) * 0x1p-32;
  return normal_quantile(TAIL + (1 - 2 * TAIL) * uniform);
}

/* values[n] from element `first` (a multiple of 4) of parameter `number`. */
static void initial_values(float *values, const struct param *p, int number, uint64_t seed, int64_t first, int64_t n) {
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

/* The parameter's own type, from values[n]; in place where it is FP32. */
static const void *rounded(enum dtype type, float *values, uint16_t *codes, int64_t n) {
  if (type == DTYPE_F32) return values;
  for (int64_t i = 0; i < n; i++) codes[i] = bf16_encode(values[i]);
  return codes;
}

bool model_initialise(struct model *m, uint64_t seed, struct error *e) {
  const struct kernels *k = m->d->k;
  enum dtype type = m->shape.param_dtype;
  enum { CHUNK = MODEL_STAGING / 2 };
  float *values = m->staging;
  uint16_t *codes = (uint16_t *)(void *)(m->staging + CHUNK);
  for (int number = 0; number < m->n_params; number++) {
    const struct param *p = &m->param[number];
    int64_t elements = p->rows * p->cols;
    for (int64_t first = 0; first < elements; first += CHUNK) {
      int64_t n = elements - first < CHUNK ? elements - first : CHUNK;
      initial_values(values, p, number, seed, first, n);
      const void *own = rounded(type, values, codes, n);
      k->upload(m->d, (char *)m->params + (size_t)(p->offset + first) * dtype_bytes(type), own,
                (size_t)n * dtype_bytes(type));
      if (m->master) k->upload(m->d, m->master + p->offset + first, values, (size_t)n * sizeof *values);
      if (!k->synchronize(m->d, e)) return false; /* the staging is written again */
    }
  }
  if (m->adam_m) k->clear(m->d, m->adam_m, (size_t)m->elements * sizeof(float));
  if (m->adam_v) k->clear(m->d, m->adam_v, (size_t)m->elements * sizeof(float));
  return k->synchronize(m->d, e);
}
