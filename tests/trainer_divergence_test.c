/* Divergence detectors and policies. */
#include "trainer/divergence.h"

#include <math.h>

#include "tests/test.h"

static struct config base(void) {
  struct config c = {0};
  c.divergence.nonfinite = DIVERGENCE_HALT;
  c.divergence.loss = DIVERGENCE_RECORD;
  c.divergence.grad_norm = DIVERGENCE_RECORD;
  c.divergence.loss_z = 6;
  c.divergence.grad_norm_z = 6;
  c.divergence.window = 32;
  c.divergence.attention_zero_fraction = 0.5;
  return c;
}

static void open_both(struct divergence *d, const struct config *c) {
  detector_open(&d->loss, c->divergence.window);
  detector_open(&d->grad_norm, c->divergence.window);
}

static struct update_signals ordinary(int i) {
  return (struct update_signals){.loss = 2 + 0.01 * (i % 7), .grad_norm = 1 + 0.02 * (i % 5)};
}

static struct judgement judge(struct divergence *d, const struct config *c, struct update_signals s) {
  struct judgement j;
  divergence_judge(d, c, &s, &j);
  return j;
}

TEST(score_is_the_z_score) {
  struct detector d;
  detector_open(&d, 4);
  for (int i = 0; i < 4; i++) {
    CHECK(detector_score(&d, 100) == 0); /* the window is not full yet */
    detector_accept(&d, (double)(i % 2));
  }
  CHECK_CLOSE(detector_score(&d, 2.5), 4.0, 1e-12); /* mean 0.5, deviation 0.5 */
  CHECK(detector_score(&d, NAN) == INFINITY);
}

TEST(one_nan_is_skipped_once_and_forgotten) {
  struct config c = base();
  struct divergence d;
  c.divergence.nonfinite = DIVERGENCE_SKIP;
  open_both(&d, &c);
  for (int i = 0; i < 40; i++) CHECK(judge(&d, &c, ordinary(i)).verdict == VERDICT_APPLY);
  struct update_signals bad = ordinary(0);
  bad.loss = NAN;
  CHECK(judge(&d, &c, bad).verdict == VERDICT_SKIP);
  bad = ordinary(0);
  bad.nonfinite = 3;
  snprintf(bad.nonfinite_where, sizeof bad.nonfinite_where, "layers.1.attention.wq.weight");
  struct judgement j = judge(&d, &c, bad);
  CHECK(j.verdict == VERDICT_SKIP);
  CHECK(strstr(j.reason, "layers.1.attention.wq.weight") != NULL);
  for (int i = 0; i < 200; i++) {
    j = judge(&d, &c, ordinary(i));
    CHECK(j.verdict == VERDICT_APPLY);
    CHECK(isfinite(j.loss_z) && isfinite(j.grad_norm_z));
  }
}

TEST(nonfinite_is_never_applied) {
  struct config c = base();
  struct divergence d;
  open_both(&d, &c);
  const enum divergence_policy policies[] = {DIVERGENCE_RECORD, DIVERGENCE_HALT, DIVERGENCE_SKIP};
  const double values[] = {NAN, INFINITY, -INFINITY};
  for (int p = 0; p < 3; p++)
    for (int v = 0; v < 3; v++) {
      c.divergence.nonfinite = policies[p];
      struct update_signals s = ordinary(0);
      s.grad_norm = values[v];
      CHECK(judge(&d, &c, s).verdict != VERDICT_APPLY);
      s = ordinary(0);
      s.loss = values[v];
      CHECK(judge(&d, &c, s).verdict != VERDICT_APPLY);
    }
}

TEST(spikes_follow_their_policy) {
  const enum divergence_policy policies[] = {DIVERGENCE_RECORD, DIVERGENCE_HALT, DIVERGENCE_SKIP};
  const enum verdict verdicts[] = {VERDICT_APPLY, VERDICT_HALT, VERDICT_SKIP};
  for (int p = 0; p < 3; p++) {
    struct config c = base();
    struct divergence d;
    open_both(&d, &c);
    for (int i = 0; i < 40; i++) judge(&d, &c, ordinary(i));
    c.divergence.grad_norm = policies[p];
    struct update_signals s = ordinary(0);
    s.grad_norm = 50;
    struct judgement j = judge(&d, &c, s);
    CHECK(j.verdict == verdicts[p]);
    CHECK(j.reason[0] != 0 && j.grad_norm_z > 6);
    CHECK(judge(&d, &c, ordinary(1)).verdict == VERDICT_APPLY);
  }
}

TEST(a_skipped_spike_does_not_enter_the_window) {
  struct config c = base();
  struct divergence d;
  c.divergence.loss = DIVERGENCE_SKIP;
  open_both(&d, &c);
  for (int i = 0; i < 40; i++) judge(&d, &c, ordinary(i));
  struct update_signals s = ordinary(0);
  s.loss = 9;
  double first = judge(&d, &c, s).loss_z;
  CHECK(judge(&d, &c, s).loss_z == first);
}

TEST(zeros_of_attentions_gradients) {
  const enum divergence_policy policies[] = {DIVERGENCE_RECORD, DIVERGENCE_HALT, DIVERGENCE_SKIP};
  const enum verdict verdicts[] = {VERDICT_APPLY, VERDICT_HALT, VERDICT_SKIP};
  for (int p = 0; p < 3; p++)
    for (int t = 0; t < ATTENTION_TENSORS; t++) {
      struct config c = base();
      struct divergence d;
      open_both(&d, &c);
      c.divergence.attention_zeros = policies[p];
      struct update_signals s = ordinary(0);
      s.attention[t] = (struct quantise_counts){.elements = 1000, .underflowed = 500};
      CHECK(judge(&d, &c, s).reason[0] == 0); /* not above */
      s.attention[t].underflowed = 501;
      struct judgement j = judge(&d, &c, s);
      const bool gradient = t == ATTENTION_DO || t == ATTENTION_DS;
      CHECK(j.verdict == (gradient ? verdicts[p] : VERDICT_APPLY));
      CHECK(gradient == (j.reason[0] != 0));
      if (gradient) CHECK(strstr(j.reason, t == ATTENTION_DO ? "50.1 % of attention's do became zero" : "50.1 % of attention's ds became zero"));
      CHECK_EQ_I64(d.loss.count, verdicts[p] == VERDICT_APPLY || !gradient ? 2 : 1); /* what is not applied is no norm */
      c.divergence.attention_zero_fraction = 1;
      s.attention[t].underflowed = 1000;
      CHECK(judge(&d, &c, s).reason[0] == 0);
    }
}

int main(void) {
  RUN(score_is_the_z_score);
  RUN(one_nan_is_skipped_once_and_forgotten);
  RUN(nonfinite_is_never_applied);
  RUN(spikes_follow_their_policy);
  RUN(zeros_of_attentions_gradients);
  RUN(a_skipped_spike_does_not_enter_the_window);
  return test_report();
}
