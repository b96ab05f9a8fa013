/* From text to token streams: the request, its work folder, and the passes in turn. */
#include "data/prepare.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "base/threads.h"
#include "data/prepare_parts.h"
#include "data/stream_file.h"

#define FINISHED ".work-finished" /* the work folder, once the streams have their names */
enum { LEAST_MEMORY = 4 << 20, USUAL_MEMORY = 1 << 30 };

/* ---- the request ----------------------------------------------------------- */

static bool check_request(const struct data_prepare *r, struct error *e) {
  if (r->n_sources > DATA_SOURCES)
    return error_set(e, ERROR_DATA, "%d sources, a stream has at most %d", r->n_sources, DATA_SOURCES);
  if (r->n_sources < 1) {
    error_set(e, ERROR_DATA, "no sources to prepare");
    return error_hint(e, "set data.sources");
  }
  if (r->validation_path && !(r->validation_fraction > 0 && r->validation_fraction < 1))
    return error_set(e, ERROR_DATA, "data.validation_fraction is %g, it must lie between 0 and 1", r->validation_fraction);
  for (int i = 0; i < r->n_sources; i++) {
    if (r->sources[i].format <= DATA_JSONL) continue;
    error_set(e, ERROR_DATA, "%s: `prepare` reads text, its format is one of token files", r->sources[i].path);
    return error_hint(e, "`fp4d index` makes an order over token files");
  }
  return true;
}

/* The streams must not take the place of the text that they are made of. */
static bool check_targets(const struct preparation *p, struct error *e) {
  const char *targets[2] = {p->request->train_path, p->request->validation_path};
  for (int side = 0; side < 2; side++)
    if (targets[side] && !file_make_parent(targets[side], ERROR_DATA, e)) return false;
  if (targets[1] && file_same_place(targets[0], targets[1]))
    return error_set(e, ERROR_DATA, "training and validation stream have the same path %s", targets[0]);
  for (int side = 0; side < 2; side++) {
    struct stat target, st;
    if (!targets[side]) continue;
    if (stat(targets[side], &target) != 0) continue; /* new */
    if (S_ISDIR(target.st_mode)) return error_set(e, ERROR_DATA, "cannot write the stream %s: it is a folder", targets[side]);
    for (int64_t i = 0; i < p->files.count; i++)
      if (stat(p->files.file[i].path, &st) == 0 && st.st_dev == target.st_dev && st.st_ino == target.st_ino)
        return error_set(e, ERROR_DATA, "the stream %s would overwrite the source %s", targets[side], p->files.file[i].path);
  }
  return true;
}

static bool list_files(struct preparation *p, struct error *e) {
  for (int i = 0; i < p->request->n_sources; i++) {
    const int64_t before = p->files.count;
    if (!corpus_find(&p->files, p->request->sources[i].path, p->request->sources[i].format, i, e)) return false;
    p->state.source[i].files = p->files.count - before;
  }
  for (int64_t i = 0; i < p->files.count; i++) p->file_bytes += p->files.file[i].bytes;
  return true;
}

/* Which tokens stand round documents: a vocabulary in which one token is both gets one of them. */
static void choose_ends(struct preparation *p) {
  const struct tokenizer_info *t = tokenizer_info(p->tokenizer);
  const struct data_prepare *r = p->request;
  p->bos = r->bos ? t->bos : -1;
  p->eos = r->eos ? t->eos : -1;
  if (p->bos >= 0 && p->bos == p->eos) p->bos = -1;
  if (r->bos && t->bos < 0) log_warning("the tokenizer %s has no BOS: documents begin without one (data.bos: false says so)", t->name);
  if (r->eos && t->eos < 0) log_warning("the tokenizer %s has no EOS: documents end without one (data.eos: false says so)", t->name);
  p->token_bytes = t->vocab_size <= 65536 ? 2 : 4;
}

/* All that the runs of pass 1 depend on, as text; shares and lengths act later and are not part of it. */
static bool describe(const struct preparation *p, char **text, struct error *e) {
  const struct data_prepare *r = p->request;
  char tokenizer[HASH_TEXT];
  size_t bytes;
  FILE *f = open_memstream(text, &bytes);
  if (!f) return error_set(e, ERROR_SYSTEM, "out of memory preparing data");
  hash_text(tokenizer_info(p->tokenizer)->digest, tokenizer);
  fprintf(f, "fp4d prepare, work of format 1\ntokenizer %s bos %d eos %d\n", tokenizer, p->bos, p->eos);
  fprintf(f, "validation %.17g seed %" PRIu64 " in_file_order %d invalid_utf8 %d dedup %d pool %d\n",
          r->validation_path ? r->validation_fraction : 0, r->seed, r->in_file_order, (int)r->invalid_utf8, (int)r->dedup, p->pool);
  for (int i = 0; i < r->n_sources; i++)
    fprintf(f, "source %d format %d key %s %s\n", i, (int)r->sources[i].format, r->sources[i].text_key, r->sources[i].path);
  for (int64_t i = 0; i < p->files.count; i++) {
    const struct corpus_file *c = &p->files.file[i];
    fprintf(f, "file %d %d %" PRId64 " %" PRId64 ".%09" PRId64 " %s\n", c->source, (int)c->kind, c->bytes, c->changed_s, c->changed_ns, c->path);
  }
  if (fclose(f) == 0) return true;
  free(*text);
  *text = NULL;
  return error_set(e, ERROR_SYSTEM, "out of memory preparing data");
}

char *data_prepare_settings(const struct data_prepare *r) {
  static const char *const policies[] = {"replace", "drop", "error"}, *const dedups[] = {"none", "exact", "minhash"};
  char *text = NULL;
  size_t bytes;
  FILE *f = open_memstream(&text, &bytes);
  if (!f) return NULL;
  fprintf(f, "seed=%" PRIu64 " shuffle_documents=%s tokens=%" PRId64 " validation_fraction=%.17g bos=%s eos=%s invalid_utf8=%s dedup=%s", r->seed,
          r->in_file_order ? "false" : "true", r->tokens, r->validation_path ? r->validation_fraction : 0, r->bos ? "true" : "false",
          r->eos ? "true" : "false", policies[r->invalid_utf8], dedups[r->dedup]);
  if (r->dedup == DATA_DEDUP_MINHASH) fprintf(f, " minhash_threshold=%.17g", r->minhash_threshold);
  for (int i = 0; i < r->n_sources; i++) fprintf(f, "%s%.17g", i ? "," : " weights=", r->sources[i].weight);
  for (int i = 0; i < r->n_sources; i++) fprintf(f, "%s%.17g", i ? "," : " max_repetition=", r->sources[i].max_repetition);
  for (int k = 0; k < r->n_stages; k++) {
    fprintf(f, " stage%d=%" PRId64, k + 1, r->stages[k].at);
    for (int i = 0; i < r->n_sources; i++) fprintf(f, ",%.17g", r->stages[k].weight[i]);
  }
  if (fclose(f) == 0) return text;
  free(text);
  return NULL;
}

/* ---- the work folder ------------------------------------------------------- */

static char *work_folder(const char *train_path) {
  char *path;
  return asprintf(&path, "%s.work", train_path) < 0 ? NULL : path;
}

static bool work_has(const char *train_path, const char *name) {
  char *path = NULL;
  const bool has = asprintf(&path, "%s.work/%s", train_path, name) > 0 && file_exists(path);
  free(path);
  return has;
}

/* What a finished preparation was removing when it was ended. */
static void remove_finished(const char *train_path) {
  char *path = NULL;
  struct error none;
  if (asprintf(&path, "%s" FINISHED, train_path) > 0 && file_exists(path)) file_remove_tree(path, ERROR_DATA, &none);
  free(path);
}

enum data_prepare_left data_prepare_left(const char *train_path) {
  remove_finished(train_path);
  if (work_has(train_path, PREPARE_PUBLISHING)) return PREPARE_PUBLISHING_LEFT;
  return work_has(train_path, "request") ? PREPARE_WORK_LEFT : PREPARE_NOTHING_LEFT;
}

/* One process at a time.  Where the file system has no locks there is none. */
static bool lock_work(const struct preparation *p, int *fd, struct error *e) {
  char *path;
  if (asprintf(&path, "%s/lock", p->work) < 0) return error_set(e, ERROR_SYSTEM, "out of memory preparing data");
  *fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  bool ok = *fd >= 0 || error_errno(e, ERROR_DATA, "cannot create %s", path);
  if (ok && flock(*fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
    ok = error_set(e, ERROR_DATA, "another process prepares %s", p->request->train_path);
  struct stat st;
  if (ok && fstat(*fd, &st) == 0 && st.st_nlink == 0) /* its owner, at its end, removed it before we had it */
    ok = error_set(e, ERROR_DATA, "another process has just prepared %s", p->request->train_path);
  free(path);
  return ok;
}

/* Removes everything in the folder but the lock. */
static bool clear_work(const struct preparation *p, struct error *e) {
  static const char *const names[] = {"request", "runs", PREPARE_PUBLISHING, NULL};
  for (int i = 0; names[i]; i++) {
    char *path;
    if (asprintf(&path, "%s/%s", p->work, names[i]) < 0) return error_set(e, ERROR_SYSTEM, "out of memory preparing data");
    const bool ok = file_remove_tree(path, ERROR_DATA, e);
    free(path);
    if (!ok) return false;
  }
  return true;
}

/* The folder holds the work of this request: what is there of another is removed. */
static bool claim_work(const struct preparation *p, const char *description, struct error *e) {
  char *path, *before = NULL;
  size_t bytes;
  if (asprintf(&path, "%s/request", p->work) < 0) return error_set(e, ERROR_SYSTEM, "out of memory preparing data");
  struct error none;
  const bool there = file_exists(path);
  const bool same = there && file_read(path, (size_t)1 << 32, ERROR_DATA, &before, &bytes, &none) && strcmp(before, description) == 0;
  bool ok = true;
  if (!same && p->request->go_on) {
    error_set(e, ERROR_DATA, "streams were being published, and %s is of other sources or settings", p->work);
    ok = error_hint(e, "--force makes both anew");
  } else if (!same) {
    if (there) log_info("%s is of other sources or settings: begun anew", p->work);
    ok = clear_work(p, e) && file_publish(path, description, strlen(description), ERROR_DATA, e);
  }
  free(before);
  free(path);
  return ok;
}

static bool open_sort(struct preparation *p, struct error *e) {
  char *folder;
  if (asprintf(&folder, "%s/runs", p->work) < 0) return error_set(e, ERROR_SYSTEM, "out of memory preparing data");
  const struct sort_request request = {.folder = folder, .owner = p->owner, .key_bytes = PREPARE_KEY, .memory = p->memory / 4,
                                       .state_bytes = (int64_t)sizeof p->state};
  p->sort = sort_external_open(&request, e);
  free(folder);
  if (!p->sort) return false;
  const void *state = sort_external_state(p->sort);
  if (!state) return true;
  memcpy(&p->state, state, sizeof p->state);
  p->done->resumed = true;
  if (p->state.finished)
    log_info("%s: all sources are read already", p->work);
  else
    log_info("%s: goes on after %" PRId64 " records", p->work, p->state.ordinal);
  return true;
}

/* The folder goes, under another name, so that a kill cannot leave a part of it that looks like work. */
static void forget_work(const struct preparation *p) {
  char *finished = NULL;
  remove_finished(p->request->train_path);
  if (asprintf(&finished, "%s" FINISHED, p->request->train_path) > 0) rename(p->work, finished);
  free(finished);
  remove_finished(p->request->train_path);
}

/* ---- all of it ------------------------------------------------------------- */

/* A document at least must be on each side. */
static bool check_sides(const struct preparation *p, struct error *e) {
  const struct data_prepare *r = p->request;
  int64_t side[2] = {0, 0}, read = 0;
  for (int i = 0; i < r->n_sources; i++) {
    read += p->done->source[i].documents;
    for (int k = 0; k < 2; k++) side[k] += p->done->source[i].side[k].documents;
  }
  const int64_t kept = side[0] + side[1];
  if (kept == 0) return error_set(e, ERROR_DATA, "of %" PRId64 " documents none has text: all are empty or dropped", read);
  for (int k = 0; r->validation_path && k < 2; k++) {
    if (side[k] > 0) continue;
    error_set(e, ERROR_DATA, "of %" PRId64 " distinct documents none is left for %s (data.validation_fraction %g)", kept,
              k == PREPARE_TRAIN ? "training" : "validation", r->validation_fraction);
    if (kept == 1) return error_hint(e, "give at least two documents: a text file is one, a line of .jsonl is one");
    return error_hint(e, "%s data.validation_fraction or add documents", k == PREPARE_TRAIN ? "lower" : "raise");
  }
  return true;
}

static bool run_passes(struct preparation *p, struct error *e) {
  return open_sort(p, e) && prepare_read(p, e) && prepare_drop(p, e) && check_sides(p, e) && prepare_write(p, e);
}

static void sum_up(struct data_prepared *done, int n_sources) {
  for (int i = 0; i < n_sources; i++) {
    done->files += done->source[i].files;
    done->empty += done->source[i].empty;
    done->duplicates += done->source[i].duplicates;
  }
}

bool data_prepare(const struct data_prepare *r, struct data_prepared *done, struct error *e) {
  *done = (struct data_prepared){.exhausted = {-1, -1}};
  if (!check_request(r, e)) return false;
  struct preparation p = {.request = r, .done = done, .memory = r->memory ? r->memory : USUAL_MEMORY,
                          .threads = r->threads > 0 ? r->threads : threads_available(),
                          .pool = mixture_is_pool(r->sources, r->n_sources, r->n_stages)};
  if (p.memory < LEAST_MEMORY) p.memory = LEAST_MEMORY;
  done->pool = p.pool;
  char *description = NULL;
  int lock = -1;
  bool ok = list_files(&p, e) && check_targets(&p, e) && (p.tokenizer = tokenizer_open(r->tokenizer ? r->tokenizer : "bytes", e)) != NULL;
  if (ok) choose_ends(&p);
  ok = ok && describe(&p, &description, e);
  if (ok) p.owner = hash_bytes(description, strlen(description));
  p.work = ok ? work_folder(r->train_path) : NULL;
  if (ok && !p.work) ok = error_set(e, ERROR_SYSTEM, "out of memory preparing data");
  ok = ok && file_make_folder(p.work, ERROR_DATA, e) && lock_work(&p, &lock, e);
  ok = ok && claim_work(&p, description, e);
  const bool mine = ok;
  ok = ok && run_passes(&p, e);
  const bool finished_some = p.sort && sort_external_runs(p.sort) > 0;
  sort_external_close(p.sort);
  if (mine && (ok || !finished_some)) forget_work(&p);
  if (ok) sum_up(done, r->n_sources);
  if (lock >= 0) close(lock);
  if (p.tokenizer) tokenizer_close(p.tokenizer);
  corpus_files_free(&p.files);
  free(p.dropped);
  free(p.work);
  free(description);
  return ok;
}
