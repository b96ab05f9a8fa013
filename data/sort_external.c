/* Sorting more records than memory holds: collecting, runs, and fewer runs of them. */
#include "data/sort_external.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "data/sort_parts.h"
#include "data/stream_file.h"

enum { FILES = 128 }; /* runs that are open at once, at most */

/* A record in memory: where it lies, and the first bytes of its key as a number. */
struct held {
  uint64_t prefix;
  int64_t at;
};

struct sort_external {
  struct sort_request request;
  char *folder;
  unsigned char *state;
  struct sort_run *run; /* one after the other: run[i].last + 1 == run[i + 1].first */
  int64_t n_runs, runs_room;
  /* Held: key, u64 bytes, payload. */
  unsigned char *bytes;
  int64_t used, bytes_room;
  struct held *held;
  int64_t n, held_room;
};

static bool no_memory(const struct sort_external *s, struct error *e) {
  return error_set(e, ERROR_SYSTEM, "out of memory sorting in %s", s->folder);
}

static bool add_run(struct sort_external *s, const struct sort_run *run, struct error *e) {
  if (s->n_runs == s->runs_room) {
    const int64_t room = s->runs_room ? 2 * s->runs_room : 16;
    struct sort_run *runs = realloc(s->run, (size_t)room * sizeof *runs);
    if (!runs) return no_memory(s, e);
    s->run = runs;
    s->runs_room = room;
  }
  s->run[s->n_runs++] = *run;
  return true;
}

/* ---- what an earlier process left ------------------------------------------ */

struct found {
  char name[64];
  int64_t first, last;
};

/* Runs that begin early first; of those that begin together the longest. */
static int by_range(const void *x, const void *y) {
  const struct found *a = x, *b = y;
  if (a->first != b->first) return a->first < b->first ? -1 : 1;
  return (a->last < b->last) - (a->last > b->last);
}

static bool list_runs(const struct sort_external *s, struct found **found, int64_t *n, struct error *e) {
  DIR *folder = opendir(s->folder);
  if (!folder) return error_errno(e, ERROR_DATA, "cannot read folder %s", s->folder);
  int64_t room = 0;
  bool ok = true;
  for (struct dirent *entry; ok && (entry = readdir(folder));) {
    struct found f;
    int length = 0;
    if (sscanf(entry->d_name, "run-%" SCNd64 "-%" SCNd64 "%n", &f.first, &f.last, &length) != 2 || length >= (int)sizeof f.name) continue;
    if (entry->d_name[length] != 0) { /* .tmp: was being written */
      char *path;
      if (asprintf(&path, "%s/%s", s->folder, entry->d_name) < 0) continue;
      unlink(path);
      free(path);
      continue;
    }
    snprintf(f.name, sizeof f.name, "%.63s", entry->d_name);
    if (*n == room) {
      room = room ? 2 * room : 64;
      struct found *more = realloc(*found, (size_t)room * sizeof *more);
      ok = more || no_memory(s, e);
      if (more) *found = more;
    }
    if (ok) (*found)[(*n)++] = f;
  }
  closedir(folder);
  return ok;
}

static bool recover(struct sort_external *s, struct error *e) {
  const struct sort_request *r = &s->request;
  struct found *found = NULL;
  unsigned char *state = malloc((size_t)r->state_bytes + 1);
  int64_t n = 0, next = 0;
  bool ok = state ? list_runs(s, &found, &n, e) : no_memory(s, e);
  if (ok && n > 0) qsort(found, (size_t)n, sizeof *found, by_range);
  for (int64_t i = 0; ok && i < n; i++) {
    char *path;
    if (asprintf(&path, "%s/%s", s->folder, found[i].name) < 0) {
      ok = no_memory(s, e);
      break;
    }
    struct sort_run run;
    struct error why = {0};
    if (found[i].first == next && sort_run_open(&run, path, r->owner, r->key_bytes, r->state_bytes, state, true, &why)) {
      close(run.fd);
      run.fd = -1;
      ok = add_run(s, &run, e);
      next = run.last + 1;
      memcpy(s->state, state, (size_t)r->state_bytes);
    } else {
      if (why.code) log_warning("%s: it is left out, with what came after it", why.message);
      unlink(path); /* damaged, merged into another, or after a gap */
    }
    free(path);
  }
  free(found);
  free(state);
  return ok;
}

struct sort_external *sort_external_open(const struct sort_request *r, struct error *e) {
  struct sort_external *s = calloc(1, sizeof *s);
  if (s) s->request = *r;
  if (!s || !(s->folder = strdup(r->folder)) || !(s->state = malloc((size_t)r->state_bytes + 1))) {
    error_set(e, ERROR_SYSTEM, "out of memory sorting in %s", r->folder);
    sort_external_close(s);
    return NULL;
  }
  if (s->request.memory < 1 << 20) s->request.memory = 1 << 20;
  if (!file_make_folder(s->folder, ERROR_DATA, e) || !recover(s, e)) {
    sort_external_close(s);
    return NULL;
  }
  return s;
}

void sort_external_close(struct sort_external *s) {
  if (!s) return;
  for (int64_t i = 0; i < s->n_runs; i++) sort_run_forget(&s->run[i]);
  free(s->run);
  free(s->bytes);
  free(s->held);
  free(s->state);
  free(s->folder);
  free(s);
}

const void *sort_external_state(const struct sort_external *s) { return s->n_runs > 0 ? s->state : NULL; }
int64_t sort_external_runs(const struct sort_external *s) { return s->n_runs; }
int64_t sort_external_held(const struct sort_external *s) { return s->n; }

/* ---- collecting ------------------------------------------------------------ */

/* Bytes that n records of `bytes` payload take; sorting wants the heads twice. */
static int64_t cost(const struct sort_external *s, int64_t n, int64_t bytes) {
  return bytes + n * (s->request.key_bytes + 8 + 2 * (int64_t)sizeof(struct held));
}

bool sort_external_fits(const struct sort_external *s, int64_t records, int64_t bytes) {
  const int64_t held = s->used + 2 * (int64_t)sizeof(struct held) * s->n;
  return held + cost(s, records, bytes) <= s->request.memory;
}

static bool make_room(struct sort_external *s, int64_t bytes, struct error *e) {
  if (s->used + bytes > s->bytes_room) {
    int64_t room = s->bytes_room ? 2 * s->bytes_room : 1 << 20;
    if (room > s->request.memory) room = s->request.memory;
    if (room < s->used + bytes) room = s->used + bytes;
    unsigned char *grown = realloc(s->bytes, (size_t)room);
    if (!grown) return no_memory(s, e);
    s->bytes = grown;
    s->bytes_room = room;
  }
  if (s->n == s->held_room) {
    const int64_t room = s->held_room ? s->held_room + s->held_room / 2 : 4096;
    struct held *grown = realloc(s->held, (size_t)room * sizeof *grown);
    if (!grown) return no_memory(s, e);
    s->held = grown;
    s->held_room = room;
  }
  return true;
}

bool sort_external_add(struct sort_external *s, const unsigned char *key, const void *payload, int64_t bytes, struct error *e) {
  const int key_bytes = s->request.key_bytes;
  if (!make_room(s, key_bytes + 8 + bytes, e)) return false;
  uint64_t prefix = 0;
  for (int i = 0; i < 8; i++) prefix = prefix << 8 | (i < key_bytes ? key[i] : 0);
  s->held[s->n++] = (struct held){prefix, s->used};
  unsigned char *to = s->bytes + s->used;
  memcpy(to, key, (size_t)key_bytes);
  store_u64(to + key_bytes, (uint64_t)bytes);
  if (bytes > 0) memcpy(to + key_bytes + 8, payload, (size_t)bytes);
  s->used += key_bytes + 8 + bytes;
  return true;
}

static int by_key(const void *x, const void *y, void *context) {
  const struct held *a = x, *b = y;
  if (a->prefix != b->prefix) return a->prefix < b->prefix ? -1 : 1;
  const struct sort_external *s = context;
  const int order = memcmp(s->bytes + a->at, s->bytes + b->at, (size_t)s->request.key_bytes);
  return order ? order : (a->at > b->at) - (a->at < b->at);
}

bool sort_external_flush(struct sort_external *s, const void *state, struct error *e) {
  const struct sort_request *r = &s->request;
  const int64_t number = s->n_runs > 0 ? s->run[s->n_runs - 1].last + 1 : 0;
  if (s->n > 0) qsort_r(s->held, (size_t)s->n, sizeof *s->held, by_key, s);
  struct sort_run_writer *w = sort_run_writer_open(s->folder, r->owner, r->key_bytes, number, number, e);
  bool ok = w != NULL;
  for (int64_t i = 0; ok && i < s->n; i++) {
    const unsigned char *at = s->bytes + s->held[i].at;
    ok = sort_run_writer_add(w, at, at + r->key_bytes + 8, (int64_t)load_u64(at + r->key_bytes), e);
  }
  struct sort_run run;
  ok = ok && sort_run_writer_publish(w, state, r->state_bytes, &run, e);
  sort_run_writer_close(w);
  if (!ok || !add_run(s, &run, e)) return false;
  close(run.fd);
  s->run[s->n_runs - 1].fd = -1;
  if (r->state_bytes > 0) memcpy(s->state, state, (size_t)r->state_bytes);
  s->used = s->n = 0;
  return true;
}

/* ---- fewer runs ------------------------------------------------------------ */

/* Runs first..first+n-1 become one, with the state of the last of them. */
static bool merge_runs(struct sort_external *s, int64_t first, int64_t n, struct error *e) {
  const struct sort_request *r = &s->request;
  struct sort_run *from = s->run + first, merged;
  unsigned char *state = malloc((size_t)r->state_bytes + 1);
  if (!state) return no_memory(s, e);
  struct sort_run last;
  struct sort_run_writer *w = NULL;
  if (sort_run_open(&last, from[n - 1].path, r->owner, r->key_bytes, r->state_bytes, state, false, e)) {
    sort_run_forget(&last);
    w = sort_run_writer_open(s->folder, r->owner, r->key_bytes, from[0].first, from[n - 1].last, e);
  }
  struct sort_merge *m = w ? sort_merge_of(from, n, r->key_bytes, 0, SORT_GROUPS - 1, r->memory, e) : NULL;
  struct sort_record record;
  int more = m ? 1 : -1;
  while (more > 0 && (more = sort_merge_next(m, &record, e)) > 0)
    if (!sort_run_writer_add(w, record.key, record.payload, record.bytes, e)) more = -1;
  const bool ok = more == 0 && sort_run_writer_publish(w, state, r->state_bytes, &merged, e);
  sort_merge_close(m);
  sort_run_writer_close(w);
  free(state);
  if (!ok) return false;
  close(merged.fd);
  merged.fd = -1;
  for (int64_t i = 0; i < n; i++) {
    unlink(from[i].path);
    sort_run_forget(&from[i]);
  }
  from[0] = merged;
  memmove(from + 1, from + n, (size_t)(s->n_runs - first - n) * sizeof *from);
  s->n_runs -= n - 1;
  return true;
}

bool sort_external_reduce(struct sort_external *s, int merges, void (*step)(void *context, int64_t done, int64_t all),
                          void *context, struct error *e) {
  const int64_t blocks = s->request.memory / SORT_BLOCK;
  int64_t most = blocks / (merges > 0 ? merges : 1), ways = blocks < FILES ? blocks : FILES, all = 0, done = 0;
  if (most > FILES) most = FILES;
  if (most < 1) most = 1;
  for (int64_t i = 0; i < s->n_runs; i++) all += s->run[i].payload;
  for (int64_t i = 0; s->n_runs > most; i++) {
    if (i >= s->n_runs - 1) i = 0; /* the next level */
    int64_t n = s->n_runs - most + 1;
    if (n > ways) n = ways;
    if (n > s->n_runs - i) n = s->n_runs - i;
    if (!merge_runs(s, i, n, e)) return false;
    done += s->run[i].payload;
    if (step) step(context, done, all);
  }
  return true;
}

struct sort_merge *sort_merge_open(struct sort_external *s, int first, int last, int64_t memory, struct error *e) {
  return sort_merge_of(s->run, s->n_runs, s->request.key_bytes, first, last, memory, e);
}
