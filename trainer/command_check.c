/* `fp4d check`: would this run start, and would it get to its end? */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/file.h"
#include "base/hash.h"
#include "base/threads.h"
#include "checkpoints/checkpoint.h"
#include "data/data.h"
#include "kernels/probe.h"
#include "trainer/command.h"
#include "trainer/config.h"
#include "trainer/indexing.h"
#include "trainer/machine.h"
#include "trainer/match.h"
#include "trainer/plan.h"
#include "trainer/state.h"

struct check_arguments {
  const char *config;
  struct argument_list sets;
};

const struct argument command_check_arguments[] = {
    ARGUMENT_CONFIG(struct check_arguments, config),
    ARGUMENT_SETS(struct check_arguments, sets),
    {0},
};

struct report {
  enum error_code first; /* kind of the first problem */
  int problems;
};

static void say_ok(const char *subject, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void say_ok(const char *subject, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  printf("ok       %-11s ", subject);
  vprintf(format, arguments);
  putchar('\n');
  va_end(arguments);
}

/* What need not be here. */
static void say_absent(const char *subject, const char *what) { printf("absent   %-11s %s\n", subject, what); }

/* One line for each line of the message. */
static void say_problem(struct report *r, const char *subject, const struct error *e) {
  if (r->problems == 0) r->first = e->code;
  for (const char *line = e->message; *line;) {
    int length = (int)strcspn(line, "\n");
    const char *next = line + length + (line[length] == '\n');
    printf("PROBLEM  %-11s %.*s", subject, length, line);
    if (*next == 0 && e->hint[0]) printf(" (%s)", e->hint);
    putchar('\n');
    r->problems++;
    line = next;
  }
}

static double gigabytes(int64_t bytes) { return (double)bytes / 1e9; }

/* False where memory cannot be planned: nothing would execute the route. */
static bool check_route(struct report *r, const struct config *c, int threads) {
  struct error e = {0};
  struct device *d = device_open_plan(c->run.backend, threads, &e);
  if (!d) {
    say_problem(r, "device", &e);
    return false;
  }
  const struct extent x = plan_extent(c);
  bool good = route_check(&c->route, (int)c->model.shape.n_layers, &x, d, &e);
  if (good)
    say_ok("route", "%s: backend %s executes all of it", c->route.name, d->k->backend);
  else
    say_problem(r, "route", &e);
  d->k->close(d);
  return good;
}

/* The GPU of this machine that a first rank would take; its absence is no problem of the configuration's. */
static struct device *check_gpu(struct report *r, const struct config *c, int threads) {
  struct error e = {0}, none = {0};
  struct gpus_found found;
  char text[512];
  struct device *d = device_open(c->run.backend, threads, &e);
  if (d) {
    d->k->describe(d, text, sizeof text);
    say_ok("device", "backend %s: %s", c->run.backend, text);
  } else if (gpus_find(&found, &none)) {
    say_problem(r, "device", &e);
    gpus_release(&found);
  } else {
    say_absent("device", e.message);
  }
  return d;
}

/* Of one of `ranks`, on a GPU of its own. */
static void check_gpu_memory(struct report *r, const struct config *c, int threads, int64_t ranks, int64_t need) {
  static const char less[] = "a smaller train.local_batch, train.recompute: boundaries or all, or more ranks (run.ranks says how many are meant); "
                             "`fp4d plan` shows where it goes";
  struct error e = {0};
  struct device *d = check_gpu(r, c, threads);
  int64_t used, total;
  if (d && !d->k->memory(d, &used, &total, &e)) {
    say_problem(r, "memory", &e);
  } else if (d) {
    const int64_t left = total - used + d->k->own_bytes; /* this process' own is in use already */
    if (need <= left) {
      say_ok("memory", "%.3f GB a rank of %" PRId64 ", this GPU has %.3f GB and %.3f free; `fp4d plan` has the table", gigabytes(need), ranks, gigabytes(total), gigabytes(left));
    } else {
      error_set(&e, ERROR_SYSTEM, "a rank of %" PRId64 " needs %.3f GB, this GPU has %.3f GB and %.3f free", ranks, gigabytes(need), gigabytes(total), gigabytes(left));
      error_hint(&e, left < need && need <= total ? "end what else holds its memory (nvidia-smi), or a smaller train.local_batch"
                                                  : less);
      say_problem(r, "memory", &e);
    }
  } else {
    char fits[256] = "", small[256] = "";
    int n;
    const struct machine *all = machine_list(&n);
    for (int i = 0; i < n; i++) {
      if (!all[i].backend || strcmp(all[i].backend, c->run.backend) != 0) continue;
      char *to = (double)need <= all[i].memory_bytes ? fits : small;
      snprintf(to + strlen(to), sizeof fits - strlen(to), "%s%s (%.0f GB)", to[0] ? ", " : "", all[i].name, all[i].memory_bytes / 1e9);
    }
    if (fits[0]) {
      say_ok("memory", "%.3f GB a rank of %" PRId64 " fit %s%s%s", gigabytes(need), ranks, fits, small[0] ? ", not " : "", small);
    } else {
      error_set(&e, ERROR_SYSTEM, "a rank of %" PRId64 " needs %.3f GB, more than %s has", ranks, gigabytes(need), small);
      error_hint(&e, less);
      say_problem(r, "memory", &e);
    }
  }
  if (d) d->k->close(d);
}

static void check_memory(struct report *r, const struct config *c, int threads) {
  struct error e = {0};
  struct arena arena;
  int64_t own;
  const int64_t ranks = c->run.ranks > 0 ? c->run.ranks : 1, limit = machine_memory();
  if (!plan_memory(c, threads, ranks, &arena, &own, &e)) {
    say_problem(r, "memory", &e);
    return;
  }
  if (strcmp(c->run.backend, "cpu") != 0) {
    check_gpu_memory(r, c, threads, ranks, (int64_t)arena.used + own);
    return;
  }
  int64_t need = (int64_t)arena.used * ranks;
  if (need <= limit) {
    say_ok("memory", "%.3f GB a rank, %.1f GB here%s", gigabytes((int64_t)arena.used), gigabytes(limit),
           c->run.ranks > 1 ? "" : "; `fp4d plan` has the table");
    return;
  }
  error_set(&e, ERROR_SYSTEM, "%" PRId64 " rank%s of %.3f GB need %.3f GB, this machine has %.3f GB", ranks,
            ranks > 1 ? "s" : "", gigabytes((int64_t)arena.used), gigabytes(need), gigabytes(limit));
  error_hint(&e, "a smaller train.local_batch, train.recompute: boundaries or all, or more machines; `fp4d plan` shows where it goes");
  say_problem(r, "memory", &e);
}

/* *name is what streams keep of the tokenizer; empty where it cannot be opened. */
static void check_tokenizer(struct report *r, const struct config *c, char name[TOKENIZER_NAME]) {
  struct error e = {0};
  name[0] = 0;
  struct tokenizer *t = tokenizer_open(c->data.tokenizer, &e);
  if (!t) {
    say_problem(r, "tokenizer", &e);
    return;
  }
  const struct tokenizer_info *info = tokenizer_info(t);
  snprintf(name, TOKENIZER_NAME, "%s", info->name);
  if (info->vocab_size > c->model.shape.vocab_size) {
    error_set(&e, ERROR_CONFIG, "model.vocab_size: %" PRId64 " is less than the %d ids of data.tokenizer %s", c->model.shape.vocab_size,
              info->vocab_size, c->data.tokenizer);
    say_problem(r, "tokenizer", &e);
  } else {
    say_ok("tokenizer", "%s: %d ids, BOS %d, EOS %d", info->name, info->vocab_size, info->bos, info->eos);
  }
  tokenizer_close(t);
}

/* *digest is the stream's where it can be opened; `tokenizer` is the configuration's by name, empty: unknown. */
static void check_stream(struct report *r, const struct config *c, const char *subject, const char *path, bool training,
                         const char *tokenizer, struct hash *digest) {
  struct error e = {0};
  if (!file_exists(path) && indexing_is_wanted(c) && c->data.n_sources > 0) {
    say_ok(subject, "%s does not exist: `fp4d index`, or train at its start, makes it from data.sources", path);
    return;
  }
  if (!file_exists(path)) {
    error_set(&e, ERROR_DATA, "%s does not exist", path);
    error_hint(&e, c->data.n_sources > 0 ? "`fp4d prepare` makes it from data.sources" : "give data.sources and run `fp4d prepare`");
    say_problem(r, subject, &e);
    return;
  }
  struct stream *s = stream_open(path, (int32_t)c->model.shape.vocab_size, &e);
  struct data_order order;
  if (s && stream_info(s)->token_files > 0 && indexing_is_wanted(c) && !indexing_is_current(c, path, &e)) {
    stream_close(s);
    s = NULL;
  }
  if (!s) {
    say_problem(r, subject, &e);
    return;
  }
  const struct stream_info *info = stream_info(s);
  *digest = info->digest;
  if (tokenizer[0] && info->tokenizer[0] && strcmp(info->tokenizer, tokenizer) != 0) {
    error_set(&e, ERROR_DATA, "%s was made with tokenizer %s, data.tokenizer is %s", path, info->tokenizer, tokenizer);
    say_problem(r, subject, &e);
  } else if (!data_order_make(&order, s, c->train.seq_len, (uint64_t)c->data.seed, &e)) {
    say_problem(r, subject, &e);
  } else {
    int64_t samples = data_order_epoch_samples(&order);
    int64_t wanted = training ? c->train.updates * c->train.global_batch : c->validation.samples;
    if (!training && wanted > samples) {
      error_set(&e, ERROR_DATA, "%s holds %" PRId64 " samples, validation.samples is %" PRId64, path, samples, wanted);
      error_hint(&e, "0 takes all there are");
      say_problem(r, subject, &e);
    } else if (training) {
      say_ok(subject, "%s: %" PRId64 " tokens, %" PRId64 " samples of %" PRId64 " and %" PRId64 " tokens over; the run reads %.2f times that",
             path, info->tokens, samples, c->train.seq_len, data_order_dropped_tokens(&order), (double)wanted / (double)samples);
      char text[RUN_DOCUMENTS_TEXT];
      run_documents_text(c, text);
      say_ok("documents", "%" PRId64 " of %.1f tokens on average; %s%s", info->documents, (double)info->tokens / (double)info->documents, text,
             info->documents == 1 ? ": nothing, with one document" : "");
    } else {
      say_ok(subject, "%s: %" PRId64 " tokens, %" PRId64 " samples, %" PRId64 " of them used", path, info->tokens, samples,
             wanted > 0 ? wanted : samples);
    }
  }
  stream_close(s);
}

/* The nearest name above `path`, or itself, that exists: a folder, if `path` can be one. */
static void existing_folder(const char *path, char *folder, size_t size) {
  struct stat st;
  snprintf(folder, size, "%s", path);
  while (lstat(folder, &st) != 0) {
    char *slash = strrchr(folder, '/');
    if (!slash) {
      snprintf(folder, size, ".");
      return;
    }
    slash[slash == folder] = 0;
  }
}

/* False where nothing can be written there. */
static bool check_folder(struct report *r, const struct config *c, const char *folder) {
  struct error e = {0};
  struct stat st;
  if (stat(folder, &st) != 0) { /* it is there, and leads nowhere */
    error_set(&e, ERROR_SYSTEM, "run.folder %s cannot be made: %s is a link to nothing", c->run.folder, folder);
    say_problem(r, "folder", &e);
    return false;
  }
  if (!S_ISDIR(st.st_mode)) {
    error_set(&e, ERROR_SYSTEM, "run.folder %s cannot be made: %s is a file, not a folder", c->run.folder, folder);
    say_problem(r, "folder", &e);
    return false;
  }
  if (access(folder, W_OK | X_OK) == 0) {
    say_ok("folder", "%s%s", c->run.folder, file_exists(c->run.folder) ? "" : " (will be made)");
    return true;
  }
  error_errno(&e, ERROR_SYSTEM, "run.folder %s cannot be written, %s", c->run.folder, folder);
  say_problem(r, "folder", &e);
  return false;
}

/* Would a start take it? */
static bool check_match(struct report *r, const struct config *c, const struct checkpoint *k, struct hash train) {
  struct error e = {0};
  char *dump = config_dump(c);
  bool good = dump != NULL || error_set(&e, ERROR_SYSTEM, "out of memory");
  good = good && match_constants(k, c, &e) && match_model(k, dump, &e) && match_precision(k, dump, &e);
  if (good && !hash_equal(train, (struct hash){0, 0})) /* else there is a problem of the stream's */
    good = match_stream(k, c->data.train, train, c->data.allow_change, false, &e);
  good = good && match_samples(k, dump, c->data.allow_change, false, &e);
  free(dump);
  if (!good) say_problem(r, "checkpoint", &e);
  return good;
}

static void check_checkpoints(struct report *r, const struct config *c, const char *checkpoints, struct hash train, bool *some) {
  struct error e = {0};
  *some = false;
  if (!file_exists(checkpoints)) {
    say_ok("checkpoint", "none: the run starts at update 0");
    return;
  }
  struct checkpoint *k = checkpoint_open_newest(checkpoints, &e);
  if (!k && e.code == ERROR_NONE) {
    say_ok("checkpoint", "none: the run starts at update 0");
  } else if (!k) {
    say_problem(r, "checkpoint", &e);
  } else {
    *some = true;
    int64_t update = checkpoint_update(k);
    if (check_match(r, c, k, train))
      say_ok("checkpoint", "%s is whole: the run %s", checkpoint_path(k),
             update >= c->train.updates ? "is done" : "goes on from there");
    checkpoint_close(k);
  }
}

/* Room for what will be kept and the one that is being written. */
static void check_disk(struct report *r, const struct config *c, const char *folder, bool some) {
  struct statvfs fs;
  struct error e = {0};
  if (statvfs(folder, &fs) != 0) {
    error_errno(&e, ERROR_SYSTEM, "cannot ask %s for its free space", folder);
    say_problem(r, "disk", &e);
    return;
  }
  int64_t bytes = plan_checkpoint_bytes(c), saves = c->checkpoint.at_end ? 1 : 0;
  if (c->checkpoint.every > 0) saves += c->train.updates / c->checkpoint.every;
  int64_t kept = c->checkpoint.keep > 0 && c->checkpoint.keep < saves ? c->checkpoint.keep + 1 : saves;
  if (c->checkpoint.keep > 0 && c->checkpoint.keep_every > 0) kept += c->train.updates / c->checkpoint.keep_every;
  if (kept > saves) kept = saves;
  if (some || kept < 1) kept = 1; /* the others are there, or are only made on a signal */
  double need = (double)bytes * (double)kept, have = (double)fs.f_bavail * (double)fs.f_frsize;
  if (need <= have) {
    say_ok("disk", "%.3f GB a checkpoint, %.1f GB free", gigabytes(bytes), have / 1e9);
    return;
  }
  error_set(&e, ERROR_CHECKPOINT, "%" PRId64 " checkpoint%s of %.3f GB need %.3f GB, %s has %.3f GB free", kept,
            kept > 1 ? "s" : "", gigabytes(bytes), need / 1e9, folder, have / 1e9);
  error_hint(&e, "a smaller checkpoint.keep, or run.folder elsewhere");
  say_problem(r, "disk", &e);
}

static void check_config(const struct config *c) {
  char text[HASH_TEXT] = "", *dump = config_dump(c);
  if (dump) hash_text(hash_bytes(dump, strlen(dump)), text);
  free(dump);
  say_ok("config", "%s: %" PRId64 " parameters, route %s, %" PRId64 " updates of %" PRId64 " x %" PRId64 " tokens, hash %.8s",
         c->run.name, model_config_param_count(&c->model.shape), c->route.name, c->train.updates, c->train.global_batch,
         c->train.seq_len, text);
}

int command_check(int argc, char **argv) {
  struct check_arguments a = {0};
  struct error e = {0};
  if (!arguments_parse(command_check_arguments, argc, argv, &a, &e)) return command_fail(&e);
  struct report r = {0};
  static struct config c;
  if (!config_load(&c, a.config, a.sets.item, a.sets.n, &e)) {
    say_problem(&r, "config", &e);
  } else {
    char folder[CONFIG_TEXT], checkpoints[CONFIG_TEXT + 16];
    int threads = c.run.threads > 0 ? (int)c.run.threads : threads_available();
    bool some;
    state_folder(c.run.folder, checkpoints, sizeof checkpoints);
    existing_folder(c.run.folder, folder, sizeof folder);
    check_config(&c);
    if (check_route(&r, &c, threads)) check_memory(&r, &c, threads);
    struct hash train = {0, 0}, validation = {0, 0};
    char tokenizer[TOKENIZER_NAME];
    check_tokenizer(&r, &c, tokenizer);
    check_stream(&r, &c, "train data", c.data.train, true, tokenizer, &train);
    if (c.data.validation[0]) check_stream(&r, &c, "validation", c.data.validation, false, tokenizer, &validation);
    bool writable = check_folder(&r, &c, folder);
    check_checkpoints(&r, &c, checkpoints, train, &some);
    if (writable) check_disk(&r, &c, folder, some);
  }
  if (r.problems == 0)
    printf("all is well\n");
  else
    printf("%d problem%s\n", r.problems, r.problems > 1 ? "s" : "");
  return (int)r.first;
}
