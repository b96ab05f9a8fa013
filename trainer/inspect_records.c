/* metrics.jsonl: what a run did, from its records. */
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "trainer/inspect.h"
#include "trainer/records.h"

struct point {
  int64_t update;
  double loss;
};

struct tally {
  int64_t lines, starts, updates, validations, checkpoints, ends;
  int64_t applied, skipped, halted;
  int64_t last_update; /* of the last "update" record */
  int64_t gap_after;   /* the first place where an update is missing; -1 none */
  int64_t tokens;
  char name[64], route[64], build[64], topology[128], init_hash[40], reason[32];
  struct point first, last, lowest, first_validation, last_validation;
  double seconds; /* of all updates */
  char sources[512]; /* tokens by source, of the last update */
};

static void copy_text(char *to, size_t size, const json_t *o, const char *key) {
  const char *word = json_string_value(json_object_get(o, key));
  if (word) snprintf(to, size, "%s", word);
}

static void add_start(struct tally *t, const json_t *o) {
  t->starts++;
  copy_text(t->name, sizeof t->name, o, "name");
  copy_text(t->route, sizeof t->route, o, "route");
  copy_text(t->build, sizeof t->build, o, "build");
  copy_text(t->topology, sizeof t->topology, o, "topology");
  copy_text(t->init_hash, sizeof t->init_hash, o, "init_hash");
}

static void add_sources(struct tally *t, json_t *sources) {
  const char *name;
  json_t *one;
  size_t used = 0;
  t->sources[0] = 0;
  json_object_foreach(sources, name, one) {
    if (used >= sizeof t->sources) return;
    used += (size_t)snprintf(t->sources + used, sizeof t->sources - used, "%s%s %" JSON_INTEGER_FORMAT, used ? ", " : "", name,
                             json_integer_value(json_object_get(one, "tokens")));
  }
}

static void add_update(struct tally *t, const json_t *o, int64_t update) {
  const char *verdict = json_string_value(json_object_get(o, "verdict"));
  const struct point p = {update, records_real(json_object_get(o, "loss"))};
  if (t->updates == 0) t->first = t->lowest = p;
  if (t->updates > 0 && update != t->last_update + 1 && t->gap_after < 0) t->gap_after = t->last_update;
  if (p.loss < t->lowest.loss || isnan(t->lowest.loss)) t->lowest = p;
  t->last = p;
  t->last_update = update;
  t->updates++;
  t->applied += verdict && strcmp(verdict, "applied") == 0;
  t->skipped += verdict && strcmp(verdict, "skipped") == 0;
  t->halted += verdict && strcmp(verdict, "halted") == 0;
  t->tokens = json_integer_value(json_object_get(o, "tokens"));
  add_sources(t, json_object_get(o, "sources"));
  const double seconds = records_real(json_object_get(json_object_get(o, "seconds"), "total"));
  if (isfinite(seconds)) t->seconds += seconds;
}

static bool add_record(void *context, const json_t *o) {
  struct tally *t = context;
  const char *kind = json_string_value(json_object_get(o, "kind"));
  const int64_t at = json_integer_value(json_object_get(o, "update"));
  t->lines++;
  if (strcmp(kind, "start") == 0) {
    add_start(t, o);
  } else if (strcmp(kind, "update") == 0) {
    add_update(t, o, at);
  } else if (strcmp(kind, "validation") == 0) {
    const struct point p = {at, records_real(json_object_get(o, "loss"))};
    if (t->validations++ == 0) t->first_validation = p;
    t->last_validation = p;
  } else if (strcmp(kind, "checkpoint") == 0) {
    t->checkpoints++;
  } else if (strcmp(kind, "end") == 0) {
    t->ends++;
    copy_text(t->reason, sizeof t->reason, o, "reason");
  }
  return true;
}

static void print_tally(const char *path, const struct tally *t) {
  printf("%s: records of a run\n", path);
  if (t->starts) {
    inspect_line("run", "%s, route %s", t->name, t->route);
    inspect_line("build", "%s", t->build);
    inspect_line("topology", "%s", t->topology);
    inspect_line("init_hash", "%s", t->init_hash);
  }
  inspect_line("starts", "%" PRId64 "%s", t->starts, t->starts > 1 ? " (resumed)" : "");
  if (t->updates) {
    inspect_line("updates", "%" PRId64 ": %" PRId64 " to %" PRId64 ", %" PRId64 " tokens read, %.1f s", t->updates,
                 t->first.update, t->last_update, t->tokens, t->seconds);
    if (t->sources[0]) inspect_line("tokens read", "%s", t->sources);
    inspect_line("verdicts", "%" PRId64 " applied, %" PRId64 " skipped, %" PRId64 " halted", t->applied, t->skipped, t->halted);
    inspect_line("loss", "first %.6f (update %" PRId64 "), last %.6f (%" PRId64 "), lowest %.6f (%" PRId64 ")", t->first.loss,
                 t->first.update, t->last.loss, t->last.update, t->lowest.loss, t->lowest.update);
  } else {
    inspect_line("updates", "0");
  }
  if (t->validations)
    inspect_line("validations", "%" PRId64 ": first %.6f (update %" PRId64 "), last %.6f (%" PRId64 ")", t->validations,
                 t->first_validation.loss, t->first_validation.update, t->last_validation.loss, t->last_validation.update);
  inspect_line("checkpoints", "%" PRId64 " saved", t->checkpoints);
  inspect_line("end", "%s", t->ends ? t->reason : "none recorded: still running, or ended from outside");
}

bool inspect_records(const struct inspection *i, struct error *e) {
  struct tally t = {.gap_after = -1};
  int64_t torn;
  bool good = records_each(i->path, add_record, &t, &torn, e);
  if (!good && t.lines == 0) return false;
  if (torn > 0)
    inspect_line("last line", "not whole (line %" PRId64 "): being written, or the run was cut off there", torn);
  print_tally(i->path, &t);
  if (good && t.gap_after >= 0)
    good = error_set(e, ERROR_DATA, "%s: the record after update %" PRId64 " is not that of update %" PRId64, i->path,
                     t.gap_after, t.gap_after + 1);
  return good;
}
