#include "trainer/records.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

bool records_each(const char *path, bool (*take)(void *context, const json_t *object), void *context, int64_t *torn,
                  struct error *e) {
  *torn = 0;
  FILE *in = fopen(path, "r");
  if (!in) return error_errno(e, ERROR_DATA, "cannot open %s", path);
  char *line = NULL;
  size_t room = 0;
  ssize_t n;
  bool good = true;
  for (int64_t number = 1; good && (n = getline(&line, &room, in)) > 0; number++) {
    if (line[n - 1] != '\n') {
      *torn = number;
      break;
    }
    json_error_t where;
    json_t *o = json_loadb(line, (size_t)n - 1, 0, &where);
    if (!o)
      good = error_set(e, ERROR_DATA, "%s:%" PRId64 ": not JSON: %s", path, number, where.text);
    else if (!json_string_value(json_object_get(o, "kind")) || !json_is_integer(json_object_get(o, "update")))
      good = error_set(e, ERROR_DATA, "%s:%" PRId64 ": not a record: it has no \"kind\" or no \"update\"", path, number);
    else if (!take(context, o))
      good = error_set(e, ERROR_DATA, "%s:%" PRId64 ": not a record that can follow those before it", path, number);
    json_decref(o);
  }
  if (good && ferror(in)) good = error_errno(e, ERROR_DATA, "cannot read %s", path);
  free(line);
  fclose(in);
  return good;
}

double records_real(const json_t *value) {
  const char *word = json_string_value(value);
  return word ? strtod(word, NULL) : json_is_number(value) ? json_number_value(value) : NAN;
}

static void copy(char *to, size_t size, const json_t *o, const char *key) {
  const char *word = json_string_value(json_object_get(o, key));
  if (word) snprintf(to, size, "%s", word);
}

/* Room for one more. */
static void *grow(void *items, int64_t n, int64_t *room, size_t size) {
  if (n < *room) return items;
  const int64_t more = *room ? 2 * *room : 256;
  void *bigger = realloc(items, (size_t)more * size);
  if (bigger) *room = more;
  return bigger;
}

static bool take_start(struct records *r, const json_t *o) {
  const char *config = json_string_value(json_object_get(o, "config"));
  if (r->config) {
    r->config_changed |= config && strcmp(config, r->config) != 0;
    return true;
  }
  copy(r->name, sizeof r->name, o, "name");
  copy(r->route, sizeof r->route, o, "route");
  copy(r->init_hash, sizeof r->init_hash, o, "init_hash");
  copy(r->train_digest, sizeof r->train_digest, o, "train_digest");
  copy(r->validation_digest, sizeof r->validation_digest, o, "validation_digest");
  r->config = strdup(config ? config : "");
  return r->config != NULL;
}

static bool take_update(struct records *r, const json_t *o, int64_t at) {
  const char *verdict = json_string_value(json_object_get(o, "verdict"));
  struct records_update *all = grow(r->update, r->n_updates, &r->update_room, sizeof *all);
  if (!all) return false;
  r->update = all;
  if (r->n_updates > 0 && at <= all[r->n_updates - 1].update) return false;
  struct records_update *u = &all[r->n_updates++];
  *u = (struct records_update){.update = at,
                               .loss = records_real(json_object_get(o, "loss")),
                               .grad_norm = records_real(json_object_get(o, "grad_norm"))};
  copy(u->batch_hash, sizeof u->batch_hash, o, "batch_hash");
  r->applied += verdict && strcmp(verdict, "applied") == 0;
  r->skipped += verdict && strcmp(verdict, "skipped") == 0;
  r->halted += verdict && strcmp(verdict, "halted") == 0;
  return true;
}

static bool take_validation(struct records *r, const json_t *o, int64_t at) {
  struct records_validation *all = grow(r->validation, r->n_validations, &r->validation_room, sizeof *all);
  if (!all) return false;
  r->validation = all;
  if (r->n_validations > 0 && at <= all[r->n_validations - 1].update) return at == all[r->n_validations - 1].update;
  all[r->n_validations++] = (struct records_validation){.update = at,
                                                        .samples = json_integer_value(json_object_get(o, "samples")),
                                                        .targets = json_integer_value(json_object_get(o, "targets")),
                                                        .loss = records_real(json_object_get(o, "loss"))};
  return true;
}

static bool take(void *context, const json_t *o) {
  struct records *r = context;
  const char *kind = json_string_value(json_object_get(o, "kind"));
  const int64_t at = json_integer_value(json_object_get(o, "update"));
  if (strcmp(kind, "end") != 0) r->reason[0] = 0;
  if (strcmp(kind, "start") == 0) return take_start(r, o);
  if (strcmp(kind, "update") == 0) return take_update(r, o, at);
  if (strcmp(kind, "validation") == 0) return take_validation(r, o, at);
  if (strcmp(kind, "end") == 0) copy(r->reason, sizeof r->reason, o, "reason");
  return true;
}

bool records_read(struct records *r, const char *run, struct error *e) {
  char path[1100];
  struct stat s;
  int64_t torn;
  memset(r, 0, sizeof *r);
  const bool folder = stat(run, &s) == 0 && S_ISDIR(s.st_mode);
  snprintf(path, sizeof path, folder ? "%s/metrics.jsonl" : "%s", run);
  bool good = records_each(path, take, r, &torn, e);
  if (good && (!r->config || r->n_updates == 0)) good = error_set(e, ERROR_DATA, "%s holds no update of a run", path);
  if (!good) records_free(r);
  return good;
}

void records_free(struct records *r) {
  free(r->config);
  free(r->update);
  free(r->validation);
  memset(r, 0, sizeof *r);
}

const struct records_update *records_update(const struct records *r, int64_t update) {
  int64_t low = 0, high = r->n_updates;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (r->update[middle].update < update)
      low = middle + 1;
    else
      high = middle;
  }
  return low < r->n_updates && r->update[low].update == update ? &r->update[low] : NULL;
}

const struct records_validation *records_validation(const struct records *r, int64_t update) {
  for (int64_t i = 0; i < r->n_validations; i++)
    if (r->validation[i].update == update) return &r->validation[i];
  return NULL;
}
