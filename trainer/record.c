#include "trainer/record.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"

struct record_file {
  FILE *out;
  int lock;
  char path[1024];
  json_t *contractions;
};

json_t *record_number(double value) {
  return isfinite(value) ? json_real(value) : json_string(isnan(value) ? "nan" : value > 0 ? "inf" : "-inf");
}

void record_real(json_t *object, const char *key, double value) { json_object_set_new(object, key, record_number(value)); }

void record_integer(json_t *object, const char *key, int64_t value) {
  json_object_set_new(object, key, json_integer(value));
}

void record_text(json_t *object, const char *key, const char *value) {
  json_t *text = json_string(value);
  json_object_set_new(object, key, text ? text : json_string("(not UTF-8)"));
}

void record_hash(json_t *object, const char *key, struct hash value) {
  char text[HASH_TEXT];
  hash_text(value, text);
  record_text(object, key, text);
}

char *record_dump(const json_t *object) { return json_dumps(object, JSON_REAL_PRECISION(17) | JSON_COMPACT); }

/* What a resume from `update` keeps: everything before the first record of a later update
 * that is not damage at the end, and from there on the lines of its checkpoints, which go
 * to `saves`.  A damaged line among good ones is kept, and said. */
static bool kept_length(struct record_file *f, int64_t update, int64_t *bytes, FILE *saves, struct error *e) {
  const char *path = f->path;
  *bytes = 0;
  FILE *in = fopen(path, "r");
  if (!in) {
    if (errno == ENOENT) return true;
    return error_errno(e, ERROR_SYSTEM, "cannot read %s", path);
  }
  char *line = NULL;
  size_t room = 0;
  bool beyond = false, good = true;
  int64_t position = 0, number = 0, damaged = 0; /* damaged: the first such line since the last good one */
  for (ssize_t n; (n = getline(&line, &room, in)) > 0 && line[n - 1] == '\n';) {
    json_t *object = json_loadb(line, (size_t)n, 0, NULL);
    const json_t *at = json_object_get(object, "update");
    const char *kind = json_string_value(json_object_get(object, "kind"));
    const bool record = json_is_integer(at), save = record && kind && strcmp(kind, "checkpoint") == 0;
    beyond |= record && json_integer_value(at) > update;
    /* A checkpoint that was saved beside training is on record after later updates. */
    if (beyond && save && json_integer_value(at) <= update) good = fwrite(line, 1, (size_t)n, saves) == (size_t)n;
    json_t *contractions = json_object_get(object, "contractions");
    if (contractions && !beyond) {
      json_decref(f->contractions);
      f->contractions = json_incref(contractions);
    }
    json_decref(object);
    if (beyond) continue;
    position += n;
    number++;
    if (!record) {
      if (damaged == 0) damaged = number;
      continue;
    }
    if (damaged > 0) log_warning("%s:%" PRId64 ": not a record; left as it is", path, damaged);
    damaged = 0;
    *bytes = position;
  }
  free(line);
  good = good && !ferror(in);
  fclose(in);
  return good || error_errno(e, ERROR_SYSTEM, "cannot read %s", path);
}

struct record_file *record_open(const char *folder, struct error *e) {
  struct record_file *f = calloc(1, sizeof *f);
  if (!f) {
    error_set(e, ERROR_SYSTEM, "out of memory");
    return NULL;
  }
  f->lock = -1;

  char lock[1024];
  snprintf(lock, sizeof lock, "%s/lock", folder);
  snprintf(f->path, sizeof f->path, "%s/metrics.jsonl", folder);
  f->lock = open(lock, O_CREAT | O_RDWR | O_CLOEXEC, 0666);
  if (f->lock < 0) {
    error_errno(e, ERROR_SYSTEM, "cannot open %s", lock);
    goto failed;
  }
  if (flock(f->lock, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) {
      error_set(e, ERROR_CONFIG, "run folder %s is in use by another process", folder);
      error_hint(e, "give this run its own run.folder, or wait for the other one");
    } else {
      error_errno(e, ERROR_SYSTEM, "cannot lock %s", lock);
    }
    goto failed;
  }
  return f;

failed:
  record_close(f);
  return NULL;
}

bool record_begin(struct record_file *f, int64_t update, struct error *e) {
  int64_t bytes = 0;
  struct stat st;
  if (stat(f->path, &st) == 0 && S_ISFIFO(st.st_mode)) /* opening it would wait for a reader */
    return error_set(e, ERROR_SYSTEM, "cannot write %s: it is a FIFO", f->path);
  char *text = NULL;
  size_t n = 0;
  FILE *saves = open_memstream(&text, &n);
  bool good = saves || error_set(e, ERROR_SYSTEM, "out of memory");
  good = good && (update == 0 || kept_length(f, update, &bytes, saves, e));
  if (saves && fclose(saves) != 0 && good) good = error_set(e, ERROR_SYSTEM, "out of memory");
  if (good) {
    f->out = fopen(f->path, "a");
    good = (f->out && ftruncate(fileno(f->out), bytes) == 0 && fwrite(text, 1, n, f->out) == n && fflush(f->out) == 0) ||
           error_errno(e, ERROR_SYSTEM, "cannot write %s", f->path);
  }
  free(text);
  return good;
}

bool record_write(struct record_file *f, json_t *object, struct error *e) {
  char *line = record_dump(object);
  json_decref(object);
  if (!line) return error_set(e, ERROR_INTERNAL, "a record for %s cannot be written as JSON", f->path);
  bool good = fprintf(f->out, "%s\n", line) > 0 && fflush(f->out) == 0;
  free(line);
  return good || error_errno(e, ERROR_SYSTEM, "cannot write %s", f->path);
}

bool record_write_together(struct record_file *f, struct comm *c, json_t *object, struct error *e) {
  bool good = true;
  if (f)
    good = record_write(f, object, e);
  else
    json_decref(object);
  return comm_agree(c, good, e);
}

const json_t *record_contractions(const struct record_file *f) { return f->contractions; }

void record_close(struct record_file *f) {
  if (!f) return;
  json_decref(f->contractions);
  if (f->out) fclose(f->out);
  if (f->lock >= 0) close(f->lock);
  free(f);
}
