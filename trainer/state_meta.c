/* The counters, the divergence windows, the configuration and the digests of a
 * run, as a checkpoint's meta text, and back. */
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "trainer/constants.h"
#include "trainer/match.h"
#include "trainer/record.h"
#include "trainer/state_parts.h"
#include "trainer/version.h"


static json_t *detector_to_json(const struct detector *d) {
  json_t *object = json_object(), *values = json_array();
  record_integer(object, "window", d->window);
  record_integer(object, "count", d->count);
  for (int64_t i = 0; i < d->window && i < d->count; i++) json_array_append_new(values, json_real(d->value[i]));
  json_object_set_new(object, "values", values);
  return object;
}

/* -1, which no count is, where it is none. */
static int64_t count_of(const json_t *object, const char *key) {
  const json_t *value = json_object_get(object, key);
  return json_is_integer(value) ? json_integer_value(value) : -1;
}

/* False where the object is not one that detector_to_json makes. */
static bool detector_from_json(struct detector *d, const json_t *object) {
  const json_t *values = json_object_get(object, "values");
  const int64_t window = json_integer_value(json_object_get(object, "window"));
  const int64_t count = count_of(object, "count");
  if (window < 2 || window > DETECTOR_WINDOW || count < 0 || !json_is_array(values) ||
      (int64_t)json_array_size(values) != (count < window ? count : window))
    return false;
  for (size_t i = 0; i < json_array_size(values); i++)
    if (!json_is_number(json_array_get(values, i))) return false;
  if (window != d->window) return true; /* another window: it fills anew */
  d->count = count;
  for (size_t i = 0; i < json_array_size(values); i++) d->value[i] = json_number_value(json_array_get(values, i));
  return true;
}

static json_t *sources_to_json(const struct run *run) {
  const struct stream_info *info = stream_info(run->train);
  json_t *object = json_object();
  for (int s = 0; s < info->n_sources; s++) record_integer(object, info->source[s].name, run->source_tokens[s]);
  return object;
}

/* By name: where the stream changed (data.allow_change), what was read of a source that is
 * gone is in no count. False where the numbers cannot be. */
static bool sources_from_json(struct run *run, const json_t *object) {
  const struct stream_info *info = stream_info(run->train);
  int64_t sum = 0;
  if (!json_is_object(object)) return false;
  for (int s = 0; s < info->n_sources; s++) {
    const int64_t tokens = json_integer_value(json_object_get(object, info->source[s].name));
    if (tokens < 0 || tokens > run->tokens_read - sum) return false;
    run->source_tokens[s] = tokens;
    sum += tokens;
  }
  return true;
}

char *state_meta(const struct run *run) {
  json_t *meta = json_object();
  record_integer(meta, "format", STATE_META_FORMAT);
  record_integer(meta, "update", run->update);
  record_integer(meta, "applied", run->applied);
  record_integer(meta, "samples", run->samples > 0 ? data_order_index(&run->train_order, run->samples - 1) + 1 : 0);
  record_integer(meta, "tokens", run->tokens_read);
  json_object_set_new(meta, "source_tokens", sources_to_json(run));
  record_integer(meta, "seed", run->config.run.seed);
  record_integer(meta, "world", run->world);
  record_text(meta, "route", run->config.route.name);
  record_text(meta, "build", version_build());
  record_text(meta, "config", run->config_text);
  record_hash(meta, "config_hash", run->config_hash);
  record_hash(meta, "init_hash", run->init_hash);
  record_hash(meta, "train_digest", stream_info(run->train)->digest);
  json_object_set_new(meta, "route_constants", constants_make(&run->config));
  json_object_set_new(meta, "loss_window", detector_to_json(&run->divergence.loss));
  json_object_set_new(meta, "grad_norm_window", detector_to_json(&run->divergence.grad_norm));
  char *text = record_dump(meta);
  json_decref(meta);
  return text;
}

static bool counters_from_json(struct run *run, const struct checkpoint *k, const json_t *meta) {
  run->update = count_of(meta, "update");
  run->applied = count_of(meta, "applied");
  const int64_t index = count_of(meta, "samples");
  run->samples = data_order_samples_before(&run->train_order, index);
  run->tokens_read = count_of(meta, "tokens");
  return run->update == checkpoint_update(k) && run->applied >= 0 && run->applied <= run->update && index >= 0 &&
         index <= INT64_MAX / 4 / run->config.train.seq_len && run->tokens_read >= 0 && run->tokens_read <= INT64_MAX / 4 &&
         sources_from_json(run, json_object_get(meta, "source_tokens")) &&
         detector_from_json(&run->divergence.loss, json_object_get(meta, "loss_window")) &&
         detector_from_json(&run->divergence.grad_norm, json_object_get(meta, "grad_norm_window"));
}

bool state_imported(const struct checkpoint *k) {
  json_t *meta = json_loads(checkpoint_meta(k), 0, NULL);
  const bool imported = json_is_object(json_object_get(meta, "imported"));
  json_decref(meta);
  return imported;
}

bool state_read_counters(struct run *run, struct checkpoint *k, struct error *e) {
  if (state_imported(k)) return true; /* a run's beginning */
  json_error_t where;
  json_t *meta = json_loads(checkpoint_meta(k), 0, &where);
  if (!meta)
    return error_set(e, ERROR_CHECKPOINT, "checkpoint %s: meta is not JSON: %s", checkpoint_path(k), where.text);
  bool good = (json_integer_value(json_object_get(meta, "format")) == STATE_META_FORMAT &&
               hash_parse(json_string_value(json_object_get(meta, "init_hash")), &run->init_hash)) ||
              error_set(e, ERROR_CHECKPOINT, "checkpoint %s: meta of another format", checkpoint_path(k));
  const struct config *c = &run->config;
  good = good && match_stream(k, c->data.train, stream_info(run->train)->digest, c->data.allow_change, run->rank == 0, e);
  good = good && match_samples(k, run->config_text, c->data.allow_change, run->rank == 0, e);
  if (good && !counters_from_json(run, k, meta))
    good = error_set(e, ERROR_CHECKPOINT, "checkpoint %s: meta holds impossible counts", checkpoint_path(k));
  json_decref(meta);
  return good;
}

char *state_saved_config(const struct checkpoint *k, struct error *e) {
  json_t *meta = json_loads(checkpoint_meta(k), 0, NULL);
  const char *text = json_string_value(json_object_get(meta, "config"));
  char *copy = text ? strdup(text) : NULL;
  if (!copy) error_set(e, ERROR_CHECKPOINT, "checkpoint %s carries no configuration", checkpoint_path(k));
  json_decref(meta);
  return copy;
}
