#include "trainer/divergence.h"

#include <math.h>
#include <stdio.h>

void detector_open(struct detector *d, int64_t window) {
  d->window = window < DETECTOR_WINDOW ? window : DETECTOR_WINDOW;
  d->count = 0;
}

double detector_score(const struct detector *d, double x) {
  if (!isfinite(x)) return INFINITY;
  if (d->window < 2 || d->count < d->window) return 0;
  double mean = 0, variance = 0;
  for (int64_t i = 0; i < d->window; i++) mean += d->value[i];
  mean /= (double)d->window;
  for (int64_t i = 0; i < d->window; i++) variance += (d->value[i] - mean) * (d->value[i] - mean);
  double spread = sqrt(variance / (double)d->window), floor = 1e-12 * fabs(mean) + 1e-300;
  return (x - mean) / (spread > floor ? spread : floor);
}

void detector_accept(struct detector *d, double x) {
  if (d->window > 0) d->value[d->count % d->window] = x;
  d->count++;
}

const char *attention_tensor_name(enum attention_tensor t) {
  static const char *const names[ATTENTION_TENSORS] = {
      [ATTENTION_Q] = "q", [ATTENTION_K] = "k", [ATTENTION_V] = "v", [ATTENTION_P] = "p", [ATTENTION_DO] = "do", [ATTENTION_DS] = "ds"};
  return names[t];
}

/* The graver of two verdicts wins. */
static void rule(struct judgement *j, enum divergence_policy policy, const char *reason) {
  enum verdict v = policy == DIVERGENCE_HALT   ? VERDICT_HALT
                   : policy == DIVERGENCE_SKIP ? VERDICT_SKIP
                                               : VERDICT_APPLY;
  if (j->reason[0] == 0 || v > j->verdict) snprintf(j->reason, sizeof j->reason, "%s", reason);
  if (v > j->verdict) j->verdict = v;
}

void divergence_judge(struct divergence *d, const struct config *c, const struct update_signals *s,
                      struct judgement *out) {
  char text[256];
  *out = (struct judgement){.verdict = VERDICT_APPLY};
  out->loss_z = detector_score(&d->loss, s->loss);
  out->grad_norm_z = detector_score(&d->grad_norm, s->grad_norm);

  if (s->nonfinite > 0 || !isfinite(s->loss) || !isfinite(s->grad_norm)) {
    if (s->nonfinite > 0)
      snprintf(text, sizeof text, "%lld non-finite gradient elements, first in %s", (long long)s->nonfinite,
               s->nonfinite_where);
    else
      snprintf(text, sizeof text, "loss %g, gradient norm %g are not finite", s->loss, s->grad_norm);
    rule(out, c->divergence.nonfinite == DIVERGENCE_SKIP ? DIVERGENCE_SKIP : DIVERGENCE_HALT, text);
    return; /* z-scores of such an update say nothing more */
  }

  if (out->loss_z > c->divergence.loss_z) {
    snprintf(text, sizeof text, "loss %.4f stands %.1f standard deviations above its last %lld values", s->loss,
             out->loss_z, (long long)d->loss.window);
    rule(out, c->divergence.loss, text);
  }
  if (out->grad_norm_z > c->divergence.grad_norm_z) {
    snprintf(text, sizeof text, "gradient norm %.4g stands %.1f standard deviations above its last %lld values",
             s->grad_norm, out->grad_norm_z, (long long)d->grad_norm.window);
    rule(out, c->divergence.grad_norm, text);
  }
  static const enum attention_tensor gradients[] = {ATTENTION_DO, ATTENTION_DS};
  for (int i = 0; i < 2; i++) {
    const struct quantise_counts *n = &s->attention[gradients[i]];
    const double zeros = n->elements > 0 ? (double)n->underflowed / (double)n->elements : 0;
    if (!(zeros > c->divergence.attention_zero_fraction)) continue;
    snprintf(text, sizeof text, "%.1f %% of attention's %s became zero by rounding", 100 * zeros, attention_tensor_name(gradients[i]));
    rule(out, c->divergence.attention_zeros, text);
  }
  if (out->verdict == VERDICT_APPLY) { /* what trains is the new normal */
    detector_accept(&d->loss, s->loss);
    detector_accept(&d->grad_norm, s->grad_norm);
  }
}
