#include "trainer/evaluate.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/checked.h"
#include "trainer/record.h"

#define NORMAL_95 1.96

double nll_mean(const struct nll *n) { return n->targets > 0 ? n->sum / (double)n->targets : NAN; }

bool evaluate_has_samples(const struct run *run, int64_t wanted, struct error *e) {
  const int64_t have = data_order_epoch_samples(&run->validation_order);
  if (wanted <= have) return true;
  error_set(e, ERROR_DATA, "%s holds %" PRId64 " samples, %" PRId64 " are asked for", stream_path(run->validation), have, wanted);
  return error_hint(e, "0 takes all there are");
}

int64_t evaluate_samples(const struct run *run, int64_t wanted) {
  return wanted == 0 ? data_order_epoch_samples(&run->validation_order) : wanted;
}

/* ---- sums of each sample ------------------------------------------------------- */

/* A sample's row: sums of NLL, of all targets and by source, then the numbers of targets likewise. */
struct sums {
  double *row;     /* [samples][2][cols] */
  uint8_t *source; /* of a micro-batch's targets */
  int64_t samples, cols;
};

/* Samples [at, at + n) as a micro-batch, what is left of it filled with tokens that do not count. */
static bool load(struct run *run, const struct sums *sums, int64_t at, int64_t n, struct error *e) {
  const int64_t seq = run->config.train.seq_len;
  for (int64_t i = 0; i < n; i++) {
    const struct data_sample s = {run->host_inputs + i * seq, run->host_targets + i * seq,
                                  run->host_starts ? run->host_starts + i * seq : NULL, sums->source + i * seq};
    if (!data_sample(&run->validation_order, at + i, &s, e)) return false;
  }
  for (int64_t t = n * seq; t < run->tokens; t++) {
    run->host_inputs[t] = 0;
    run->host_targets[t] = -1;
    if (run->host_starts) run->host_starts[t] = 0;
  }
  return true;
}

static bool add_batch(struct run *run, struct sums *sums, int64_t at, int64_t n, struct error *e) {
  const struct kernels *k = run->device->k;
  const int64_t seq = run->config.train.seq_len;
  if (!load(run, sums, at, n, e)) return false;
  const struct micro_batch b = run_upload(run, run->host_inputs, run->host_targets, run->host_starts);
  model_forward(run->model, &b, run->nll);
  k->download(run->device, run->host_nll, run->nll, (size_t)run->tokens * sizeof *run->host_nll);
  if (!k->synchronize(run->device, e)) return false;
  for (int64_t t = 0; t < n * seq; t++) {
    if (run->host_targets[t] < 0) continue;
    double *row = sums->row + (at + t / seq) * 2 * sums->cols;
    const int64_t cols[] = {0, 1 + sums->source[t]};
    for (int i = 0; i < 2; i++) {
      row[cols[i]] += (double)run->host_nll[t];
      row[sums->cols + cols[i]] += 1;
    }
  }
  return true;
}

/* This rank's samples: whole micro-batches, so that a sample's neighbours do not depend on the number of ranks. */
static bool add_share(struct run *run, struct sums *sums, struct error *e) {
  const int64_t batch = run->local_batch, share = ceil_div(ceil_div(sums->samples, batch), run->world);
  for (int64_t number = share * run->rank; number < share * (run->rank + 1); number++) {
    const int64_t at = number * batch, left = sums->samples - at;
    if (left > 0 && !add_batch(run, sums, at, left < batch ? left : batch, e)) return false;
  }
  return true;
}

/* ---- what they say --------------------------------------------------------------- */

static void add(struct nll *to, double sum, double targets) {
  to->sum += sum;
  to->targets += (int64_t)targets;
}

static void summarise(const struct sums *sums, struct nll *sequence, struct evaluation *out) {
  double mean = 0, square = 0;
  int64_t n = 0; /* samples with a target */
  *out = (struct evaluation){.samples = sums->samples};
  for (int64_t i = 0; i < sums->samples; i++) {
    const double *row = sums->row + i * 2 * sums->cols, *targets = row + sums->cols;
    sequence[i] = (struct nll){row[0], (int64_t)targets[0]};
    add(&out->all, row[0], targets[0]);
    for (int64_t s = 1; s < sums->cols; s++) add(&out->source[s - 1], row[s], targets[s]);
    if (sequence[i].targets == 0) continue;
    mean += nll_mean(&sequence[i]);
    n++;
  }
  mean /= (double)n;
  for (int64_t i = 0; i < sums->samples; i++) {
    const double d = nll_mean(&sequence[i]) - mean;
    if (sequence[i].targets > 0) square += d * d;
  }
  out->standard_error = n > 1 ? sqrt(square / (double)(n - 1) / (double)n) : NAN;
  out->low = nll_mean(&out->all) - NORMAL_95 * out->standard_error;
  out->high = nll_mean(&out->all) + NORMAL_95 * out->standard_error;
}

bool evaluate_run(struct run *run, int64_t samples, struct nll *sequence, struct evaluation *out, struct error *e) {
  struct sums sums = {.samples = samples, .cols = 1 + stream_info(run->validation)->n_sources};
  sums.row = calloc((size_t)(samples * 2 * sums.cols), sizeof *sums.row);
  sums.source = malloc((size_t)run->tokens);
  struct nll *each = sequence ? sequence : malloc((size_t)samples * sizeof *each);
  bool good = (sums.row && sums.source && each) || error_set(e, ERROR_SYSTEM, "out of memory for %" PRId64 " sequences", samples);
  good = good && add_share(run, &sums, e);
  good = comm_agree(run->comm, good, e) && comm_sum_f64(run->comm, sums.row, samples * 2 * sums.cols, e);
  if (good) summarise(&sums, each, out);
  if (good && out->all.targets == 0)
    good = error_set(e, ERROR_DATA, "%s: %" PRId64 " samples have no target that counts", stream_path(run->validation), samples);
  if (each != sequence) free(each);
  free(sums.source);
  free(sums.row);
  return good;
}

void evaluate_text(const struct evaluation *v, int digits, char *text, int size) {
  if (isfinite(v->standard_error))
    snprintf(text, (size_t)size, "%.*f +- %.*f", digits, nll_mean(&v->all), digits, v->standard_error);
  else
    snprintf(text, (size_t)size, "%.*f", digits, nll_mean(&v->all));
}

void evaluate_sources_text(const struct run *run, const struct evaluation *v, int digits, char *text, int size) {
  const struct stream_info *info = stream_info(run->validation);
  text[0] = 0;
  for (int s = 0, used = 0; info->n_sources > 1 && s < info->n_sources && used < size; s++)
    used += snprintf(text + used, (size_t)(size - used), "%s%s %.*f", s ? ", " : "", info->source[s].name, digits, nll_mean(&v->source[s]));
}

void evaluate_record(const struct run *run, const struct evaluation *v, json_t *object) {
  const struct stream_info *info = stream_info(run->validation);
  json_t *interval = json_null(), *sources = json_object();
  if (isfinite(v->standard_error)) {
    interval = json_array();
    json_array_append_new(interval, record_number(v->low));
    json_array_append_new(interval, record_number(v->high));
  }
  record_real(object, "loss", nll_mean(&v->all));
  record_real(object, "standard_error", v->standard_error);
  json_object_set_new(object, "interval_95", interval);
  record_integer(object, "samples", v->samples);
  record_integer(object, "targets", v->all.targets);
  for (int s = 0; s < info->n_sources; s++) {
    json_t *one = json_object();
    record_real(one, "loss", nll_mean(&v->source[s]));
    record_integer(one, "targets", v->source[s].targets);
    json_object_set_new(sources, info->source[s].name, one);
  }
  json_object_set_new(object, "sources", sources);
}
