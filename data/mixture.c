/* Order of documents: keys of content, and sources by token deficit. */
#include "data/mixture.h"

#include <inttypes.h>
#include <string.h>

#include "data/little_endian.h"

/* The first word as a fraction of 2^64, to 53 bits. */
bool mixture_held_out(struct hash content, double fraction) {
  unsigned char bytes[32] = "holdout";
  store_hash(bytes + 16, content);
  return (double)(hash_bytes(bytes, sizeof bytes).high >> 11) * 0x1p-53 < fraction;
}

struct hash mixture_key(uint64_t seed, uint64_t pass, struct hash content) {
  unsigned char bytes[40] = "order";
  store_u64(bytes + 8, seed);
  store_u64(bytes + 16, pass);
  store_hash(bytes + 24, content);
  return hash_bytes(bytes, sizeof bytes);
}

int mixture_compare(struct hash a, struct hash b) {
  if (a.high != b.high) return a.high < b.high ? -1 : 1;
  return (a.low > b.low) - (a.low < b.low);
}

bool mixture_is_pool(const struct data_source *sources, int n_sources, int n_stages) {
  for (int i = 0; i < n_sources; i++)
    if (sources[i].weight > 0) return false;
  return n_stages == 0;
}

static void start_pool(struct mixture *m, int n_sources, const int64_t *documents, const int64_t *tokens) {
  m->n = 1;
  m->stage[0].weight[0] = 1;
  m->max_repetition[0] = 1;
  for (int i = 0; i < n_sources; i++) {
    m->documents[0] += documents[i];
    m->tokens[0] += tokens[i];
  }
}

static void start_sources(struct mixture *m, const struct data_source *sources, int n_sources, const struct data_stage *stages,
                          int n_stages, const int64_t *documents, const int64_t *tokens, bool validation) {
  m->n = n_sources;
  for (int i = 0; i < n_sources; i++) {
    m->documents[i] = documents[i];
    m->tokens[i] = tokens[i];
    m->max_repetition[i] = validation ? 1 : sources[i].max_repetition;
    m->stage[0].weight[i] = sources[i].weight;
  }
  if (n_stages > 0) {
    m->n_stages = validation ? 1 : n_stages;
    memcpy(m->stage, stages, (size_t)m->n_stages * sizeof *stages);
  }
  for (int k = 0; k < m->n_stages; k++) {
    double sum = 0;
    for (int i = 0; i < n_sources; i++) sum += m->stage[k].weight[i];
    for (int i = 0; i < n_sources; i++) m->stage[k].weight[i] /= sum;
  }
}

void mixture_start(struct mixture *m, const struct data_source *sources, int n_sources, const struct data_stage *stages,
                   int n_stages, const int64_t *documents, const int64_t *tokens, int64_t target, bool validation) {
  *m = (struct mixture){.n_stages = 1, .target = validation ? 0 : target};
  if (mixture_is_pool(sources, n_sources, n_stages))
    start_pool(m, n_sources, documents, tokens);
  else
    start_sources(m, sources, n_sources, stages, n_stages, documents, tokens, validation);
}

bool mixture_check_sources(const struct mixture *m, const struct data_source *sources, bool validation, struct error *e) {
  for (int i = 0; sources && i < m->n; i++)
    for (int k = 0; k < m->n_stages; k++) {
      const double weight = m->stage[k].weight[i];
      if (m->documents[i] > 0 || !(weight > 0)) continue;
      error_set(e, ERROR_DATA, "source %s has no document %s, which is to have %.3g %% of it", sources[i].name,
                validation ? "held out for the validation stream" : "for the training stream", 100 * weight);
      return error_hint(e, validation ? "raise data.validation_fraction or give it more documents"
                                      : "its files are empty, or others have the same text; give it documents or leave it out");
    }
  return true;
}

static bool may_give(const struct mixture *m, int group) {
  return (double)m->taken[group] < m->max_repetition[group] * (double)m->tokens[group];
}

/* The group with the largest deficit; of equal ones the first. */
static int most_wanted(const struct mixture *m) {
  const double *weight = m->stage[m->at_stage].weight;
  int best = -1;
  double most = 0;
  for (int i = 0; i < m->n; i++) {
    if (!(weight[i] > 0)) continue;
    const double deficit = weight[i] * (double)(m->stage_written + 1) - (double)m->stage_taken[i];
    if (best >= 0 && deficit <= most) continue;
    best = i;
    most = deficit;
  }
  return best;
}

static bool target_reached(const struct mixture *m) { return m->target > 0 && m->written >= m->target; }

int mixture_choose(const struct mixture *m) {
  if (target_reached(m)) return -1;
  const int group = most_wanted(m);
  return group >= 0 && may_give(m, group) ? group : -1;
}

int64_t mixture_pass(const struct mixture *m, int group) { return m->taken_documents[group] / m->documents[group]; }
int64_t mixture_place(const struct mixture *m, int group) { return m->taken_documents[group] % m->documents[group]; }

void mixture_take(struct mixture *m, int group, int64_t tokens) {
  m->taken[group] += tokens;
  m->taken_documents[group]++;
  m->stage_taken[group] += tokens;
  m->stage_written += tokens;
  m->written += tokens;
  while (m->at_stage + 1 < m->n_stages && m->written >= m->stage[m->at_stage + 1].at) {
    m->at_stage++;
    m->stage_written = 0;
    memset(m->stage_taken, 0, sizeof m->stage_taken);
  }
}

int mixture_exhausted(const struct mixture *m) { return target_reached(m) ? -1 : most_wanted(m); }

int64_t mixture_unused(const struct mixture *m, int group) {
  return m->taken[group] < m->tokens[group] ? m->tokens[group] - m->taken[group] : 0;
}

bool mixture_check_end(const struct mixture *m, const struct data_source *sources, struct error *e) {
  if (m->target == 0 || target_reached(m)) return true;
  if (!sources) {
    error_set(e, ERROR_DATA, "data.tokens asks for %" PRId64 " tokens, the sources have %" PRId64 ", each document once", m->target, m->written);
    return error_hint(e, "lower data.tokens, give more data, or repeat it by a weight and max_repetition");
  }
  const int group = most_wanted(m);
  error_set(e, ERROR_DATA,
            "data.tokens asks for %" PRId64 " tokens, the sources give %" PRId64 ": %s has %" PRId64
            " and may be used %g times, %" PRId64 " were taken",
            m->target, m->written, sources[group].name, m->tokens[group], m->max_repetition[group], m->taken[group]);
  return error_hint(e, "lower data.tokens or the weight of %s, raise its max_repetition, or give it more data", sources[group].name);
}
