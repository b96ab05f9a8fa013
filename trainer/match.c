#include "trainer/match.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "trainer/changes.h"
#include "trainer/constants.h"
#include "trainer/state.h"

/* Keys that are looked for, and what of them differs: "KEY: WAS -> IS, ...". */
struct search {
  const char *const *keys;
  char found[1024];
};

static void collect(void *context, const char *key, const char *text) {
  struct search *s = context;
  for (const char *const *k = s->keys; *k; k++) {
    if (strcmp(*k, key) != 0) continue;
    const size_t used = strlen(s->found);
    snprintf(s->found + used, sizeof s->found - used, "%s%s", used ? ", " : "", text);
  }
}

/* False: the checkpoint carries no configuration. */
static bool search(const struct checkpoint *k, const char *config, struct search *s, struct error *e) {
  char *saved = state_saved_config(k, e);
  if (!saved) return false;
  changes_list(saved, config, collect, s);
  free(saved);
  return true;
}

bool match_model(const struct checkpoint *k, const char *config, struct error *e) {
  static const char *const keys[] = {"model.vocab_size", "model.hidden_size", "model.ffn_size", "model.n_layers", "model.n_heads",
                                     "model.n_kv_heads", "model.head_dim",    "model.tied",     NULL};
  struct search s = {.keys = keys};
  if (!search(k, config, &s, e)) return false;
  if (!s.found[0]) return true;
  error_set(e, ERROR_CHECKPOINT, "checkpoint %s is of another model: %s", checkpoint_path(k), s.found);
  return error_hint(e, "give the keys as they were, or this run a run.folder of its own");
}

bool match_precision(const struct checkpoint *k, const char *config, struct error *e) {
  if (state_imported(k)) return true;
  static const char *const keys[] = {"train.param_dtype", "train.master", NULL};
  struct search s = {.keys = keys};
  if (!search(k, config, &s, e)) return false;
  if (!s.found[0]) return true;
  error_set(e, ERROR_CHECKPOINT, "checkpoint %s holds parameters of other types: %s", checkpoint_path(k), s.found);
  return error_hint(e, "give the keys as they were, or this run a run.folder of its own");
}

bool match_samples(const struct checkpoint *k, const char *config, bool allowed, bool speak, struct error *e) {
  if (state_imported(k)) return true;
  static const char *const keys[] = {"train.seq_len", "data.seed", "data.shuffle_samples", NULL};
  struct search s = {.keys = keys};
  if (!search(k, config, &s, e)) return false;
  if (!s.found[0]) return true;
  if (allowed) {
    if (speak) log_warning("samples are others than before: %s; text is read twice or left out (data.allow_change)", s.found);
    return true;
  }
  error_set(e, ERROR_DATA, "checkpoint %s: its next sample would begin elsewhere in the stream: %s", checkpoint_path(k), s.found);
  return error_hint(e, "text would be read twice or left out; allow it with --allow-data-change (data.allow_change)");
}

bool match_stream(const struct checkpoint *k, const char *path, struct hash digest, bool allowed, bool speak, struct error *e) {
  if (state_imported(k)) return true;
  json_t *meta = json_loads(checkpoint_meta(k), 0, NULL);
  struct hash saved;
  char was[HASH_TEXT], is[HASH_TEXT];
  const bool known = hash_parse(json_string_value(json_object_get(meta, "train_digest")), &saved);
  json_decref(meta);
  if (!known) return error_set(e, ERROR_CHECKPOINT, "checkpoint %s names no training stream", checkpoint_path(k));
  if (hash_equal(saved, digest)) return true;
  hash_text(saved, was);
  hash_text(digest, is);
  if (allowed) {
    if (speak) log_warning("the training stream changed: digest %s -> %s (data.allow_change)", was, is);
    return true;
  }
  error_set(e, ERROR_DATA, "the training stream %s is not the one this run read: digest %s, now %s", path, was, is);
  return error_hint(e, "restore the stream, or allow it with --allow-data-change (data.allow_change)");
}

bool match_constants(const struct checkpoint *k, const struct config *c, struct error *e) {
  if (state_imported(k)) return true;
  json_t *meta = json_loads(checkpoint_meta(k), 0, NULL);
  const bool good = constants_check(json_object_get(meta, "route_constants"), c, e) ||
                    error_context(e, "checkpoint %s", checkpoint_path(k));
  json_decref(meta);
  return good;
}

static void warn(void *context, const char *key, const char *text) {
  (void)context;
  if (strncmp(key, "model.", 6) == 0 && strcmp(key, "model.preset") != 0) log_warning("not as the checkpoint was trained: %s", text);
  if (strcmp(key, "data.attention") == 0 || strcmp(key, "data.boundary") == 0) log_warning("not as the checkpoint was trained: %s", text);
  if (strcmp(key, "route") == 0) log_info("not the checkpoint's route: %s", text);
}

void match_warn(const struct checkpoint *k, const char *config) {
  struct error none;
  char *saved = state_saved_config(k, &none);
  if (saved) changes_list(saved, config, warn, NULL);
  free(saved);
}
