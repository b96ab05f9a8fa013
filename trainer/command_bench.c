/* fp4d bench: how fast the parts are, here. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/threads.h"
#include "kernels/formats.h"
#include "trainer/bench.h"
#include "trainer/command.h"
#include "trainer/record.h"
#include "trainer/table.h"

enum { REPEAT_MOST = 1000 };

const struct argument command_bench_arguments[] = {
    {.name = "WHAT", .type = ARGUMENT_WORD, .offset = offsetof(struct bench_arguments, what),
     .help = "gemm, quantize, attention, step, loader, checkpoint, collectives or tokenizer"},
    {.name = "CONFIG", .type = ARGUMENT_OPTIONAL_WORD, .offset = offsetof(struct bench_arguments, config),
     .help = "the run whose shapes, data or folder are measured; step and loader need it"},
    ARGUMENT_SETS(struct bench_arguments, sets),
    {.name = "--route", .value = "NAME", .type = ARGUMENT_REPEATED, .offset = offsetof(struct bench_arguments, routes),
     .help = "gemm, quantize, step: a route to measure (default bf16 and mxfp4-row-sr; quantize: all that quantise every linear)"},
    {.name = "--from", .value = "FILE.h5", .type = ARGUMENT_TEXT, .offset = offsetof(struct bench_arguments, from),
     .help = "quantize: what `fp4d capture` wrote"},
    {.name = "--shape", .value = "M,N,K", .type = ARGUMENT_REPEATED, .offset = offsetof(struct bench_arguments, shapes),
     .help = "gemm: a product [M,K] x [K,N] instead of the configuration's; attention: SEQ_LEN,HEADS,HEAD_DIM[,BATCH] of a set-up"},
    {.name = "--seq-len", .value = "N", .type = ARGUMENT_REPEATED, .offset = offsetof(struct bench_arguments, lengths),
     .help = "attention: samples of N tokens, another one each time it is given (default train.seq_len)"},
    {.name = "--setup", .value = "NAME", .type = ARGUMENT_TEXT, .offset = offsetof(struct bench_arguments, setup),
     .help = "attention: error of formats against FP64 instead of speed: formats (default with any of the following or --shape), training, table-3, appendix-d"},
    {.name = "--distribution", .value = "NAME", .type = ARGUMENT_TEXT, .offset = offsetof(struct bench_arguments, distribution),
     .help = "attention: of Q, K and V: normal (default), student-t (4 degrees of freedom), outlier-channels (of K every 32nd times 8)"},
    {.name = "--scale", .value = "X", .type = ARGUMENT_NUMBER, .offset = offsetof(struct bench_arguments, scale),
     .help = "attention: multiplies Q and K (default 1)"},
    {.name = "--seed", .value = "N", .type = ARGUMENT_INTEGER, .offset = offsetof(struct bench_arguments, seed),
     .low = 0, .high = INT64_MAX, .help = "attention: of its inputs (default 1)"},
    {.name = "--queries", .value = "N", .type = ARGUMENT_INTEGER, .offset = offsetof(struct bench_arguments, queries),
     .low = 1, .high = 1 << 20, .help = "attention: queries of a head that are measured, evenly spaced (default 256, or all)"},
    {.name = "--folder", .value = "PATH", .type = ARGUMENT_TEXT, .offset = offsetof(struct bench_arguments, folder),
     .help = "checkpoint: where to write (default run.folder, or here), made if absent; what is written there is removed again"},
    {.name = "--megabytes", .value = "N", .type = ARGUMENT_INTEGER, .offset = offsetof(struct bench_arguments, megabytes),
     .low = 1, .high = 1 << 20, .help = "checkpoint, collectives: size (default: the configuration's, or 64)"},
    {.name = "--ranks", .value = "N", .type = ARGUMENT_INTEGER, .offset = offsetof(struct bench_arguments, ranks),
     .low = 1, .high = 1 << 16, .help = "checkpoint: the CONFIG's whole state, cut for N ranks, by this process a rank after the other; once"},
    {.name = "--files", .value = "N", .type = ARGUMENT_INTEGER, .offset = offsetof(struct bench_arguments, files),
     .low = 1, .high = 1 << 16, .help = "checkpoint: of the first N of these ranks alone, where the disk has no room for all"},
    {.name = "--text", .value = "FILE", .type = ARGUMENT_TEXT, .offset = offsetof(struct bench_arguments, text),
     .help = "tokenizer: the text"},
    {.name = "--tokenizer", .value = "FILE", .type = ARGUMENT_TEXT, .offset = offsetof(struct bench_arguments, tokenizer),
     .help = "tokenizer: bytes, a rank file or a tokenizer.json (default data.tokenizer, or bytes)"},
    {.name = "--threads", .value = "N", .type = ARGUMENT_INTEGER, .offset = offsetof(struct bench_arguments, threads),
     .low = 1, .high = 4096, .help = "worker threads (default run.threads, or all processors)"},
    {.name = "--repeat", .value = "N", .type = ARGUMENT_INTEGER, .offset = offsetof(struct bench_arguments, repeat),
     .low = 1, .high = REPEAT_MOST, .help = "repetitions, of which the median counts (default 9)"},
    {.name = "--json", .type = ARGUMENT_FLAG, .offset = offsetof(struct bench_arguments, json),
     .help = "one JSON object a row"},
    {0}};

enum { GEMM, ATTENTION, QUANTIZE, STEP, LOADER, CHECKPOINT, COLLECTIVES, TOKENIZER, BENCHES };

static const struct {
  const char *name;
  bool (*run)(struct bench *b, struct error *e);
  bool ranks;  /* may run under mpirun */
  bool config; /* needs one */
} benches[BENCHES] = {
    [GEMM] = {"gemm", bench_gemm, false, false},
    [ATTENTION] = {"attention", bench_attention, false, false},
    [QUANTIZE] = {"quantize", bench_quantize, false, false},
    [STEP] = {"step", bench_step, false, true},
    [LOADER] = {"loader", bench_loader, false, true},
    [CHECKPOINT] = {"checkpoint", bench_checkpoint, true, false},
    [COLLECTIVES] = {"collectives", bench_collectives, true, false},
    [TOKENIZER] = {"tokenizer", bench_tokenizer, false, false},
};

/* ---- time -------------------------------------------------------------------- */

static int ascending(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

struct bench_seconds bench_median(double *seconds, int n) {
  qsort(seconds, (size_t)n, sizeof *seconds, ascending);
  const double median = n % 2 ? seconds[n / 2] : (seconds[n / 2 - 1] + seconds[n / 2]) / 2;
  return (struct bench_seconds){median, seconds[0], seconds[n - 1]};
}

bool bench_measure(const struct bench *b, int times, bool (*body)(void *context, struct error *e), void *context,
                   struct bench_seconds *out, struct error *e) {
  double seconds[REPEAT_MOST], t = clock_seconds();
  if (!body(context, e)) return false;
  t = clock_seconds() - t;
  if (times == 0) times = t < 5e-3 ? (int)(5e-3 / (t > 1e-8 ? t : 1e-8)) + 1 : 1;
  for (int i = 0; i < (int)b->a.repeat; i++) {
    t = clock_seconds();
    for (int j = 0; j < times; j++)
      if (!body(context, e)) return false;
    seconds[i] = (clock_seconds() - t) / times;
  }
  *out = bench_median(seconds, (int)b->a.repeat);
  return true;
}

bool bench_measure_device(const struct bench *b, struct device *d, void (*launch)(void *context), void *context,
                          struct bench_seconds *out, struct error *e) {
  const int repeat = (int)b->a.repeat;
  const double least = d->k->host_memory ? 5e-3 : 20e-3; /* a repetition's */
  double seconds[REPEAT_MOST], t = 0;
  if (!d->k->make_events(d, repeat + 1, e)) return false;
  for (int i = 0; i < 2; i++) { /* the first one loads code and chooses algorithms */
    t = clock_seconds();
    launch(context);
    if (!d->k->synchronize(d, e)) return false;
    t = clock_seconds() - t;
  }
  const int times = t < least ? (int)(least / (t > 1e-8 ? t : 1e-8)) + 1 : 1;
  for (int i = 0; i <= repeat; i++) {
    for (int j = 0; i > 0 && j < times; j++) launch(context);
    d->k->record_event(d, i);
  }
  if (!d->k->synchronize(d, e)) return false;
  for (int i = 0; i < repeat; i++) seconds[i] = d->k->seconds_between(d, i, i + 1) / times;
  *out = bench_median(seconds, repeat);
  return true;
}

/* ---- the device --------------------------------------------------------------- */

struct device *bench_device(const struct bench *b, const struct extent *x, int n, void **scratch, struct error *e) {
  const int64_t configured = b->config ? b->config->run.threads : 0;
  const int threads = (int)(b->a.threads > 0 ? b->a.threads : configured > 0 ? configured : threads_available());
  struct device *d = device_open(b->config ? b->config->run.backend : "cpu", threads, e);
  if (!d) return NULL;
  int64_t most = 0;
  const char *why = NULL;
  for (int i = 0; i < n && !why; i++) {
    why = d->k->refuse_extent(d, &x[i], b->config ? b->config->route.activations : DTYPE_BF16);
    const int64_t bytes = why ? 0 : d->k->scratch_bytes(d, &x[i]);
    if (bytes > most) most = bytes;
  }
  if (why) error_set(e, ERROR_DEVICE, "bench %s: backend %s does not execute %s", b->a.what, d->k->backend, why);
  *scratch = why ? NULL : d->k->allocate(d, (size_t)most, e);
  if (!*scratch) {
    d->k->close(d);
    return NULL;
  }
  d->k->set_scratch(d, *scratch, most);
  return d;
}

void bench_close(struct device *d, void *scratch) {
  if (!d) return;
  d->k->release(d, scratch);
  d->k->close(d);
}

bool bench_random(struct device *d, struct matrix *m, uint64_t seed, struct error *e) {
  const size_t n = (size_t)(m->rows * m->cols), size = dtype_bytes(m->dtype);
  char *host = malloc(n * size + 1);
  m->data = d->k->allocate(d, n * size, e);
  if (!host || !m->data) {
    free(host);
    if (m->data) d->k->release(d, m->data);
    m->data = NULL;
    return error_set(e, ERROR_SYSTEM, "no memory for [%lld, %lld]", (long long)m->rows, (long long)m->cols);
  }
  for (size_t i = 0; i < n; i++) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    const float x = (float)((int64_t)(seed >> 40) - (1 << 23)) * 0x1p-23f;
    const uint16_t half = bf16_encode(x);
    if (m->dtype == DTYPE_BF16)
      memcpy(host + i * size, &half, sizeof half);
    else
      memcpy(host + i * size, &x, sizeof x);
  }
  d->k->upload(d, m->data, host, n * size);
  const bool good = d->k->synchronize(d, e);
  free(host);
  return good;
}

/* ---- rows ---------------------------------------------------------------------- */

void bench_title(const struct bench *b, const char *format, ...) {
  if (b->a.json || comm_rank(b->comm) != 0) return;
  va_list arguments;
  va_start(arguments, format);
  vprintf(format, arguments);
  putchar('\n');
  va_end(arguments);
}

void bench_row(const struct bench *b, json_t *row, const struct bench_seconds *s, const char *format, ...) {
  if (comm_rank(b->comm) == 0 && b->a.json) {
    record_text(row, "bench", b->a.what);
    if (s) {
      record_real(row, "seconds", s->median);
      record_real(row, "seconds_least", s->least);
      record_real(row, "seconds_most", s->most);
    }
    char *text = record_dump(row);
    if (text) puts(text);
    free(text);
  } else if (comm_rank(b->comm) == 0) {
    char line[8192]; /* an error and its hint fit */
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    table_unsign_nan(line);
    printf("  %s\n", line);
  }
  fflush(stdout);
  json_decref(row);
}

/* An option that a bench would pass over would make its figures look like those of something else. */
static bool check_options(const struct bench_arguments *a, int which, struct error *e) {
  const struct {
    const char *name;
    bool given;
    unsigned benches;
  } option[] = {
      {"--route", a->routes.n > 0, 1u << GEMM | 1u << QUANTIZE | 1u << STEP},
      {"--from", a->from != NULL, 1u << QUANTIZE},
      {"--shape", a->shapes.n > 0, 1u << GEMM | 1u << ATTENTION},
      {"--seq-len", a->lengths.n > 0, 1u << ATTENTION},
      {"--setup", a->setup != NULL, 1u << ATTENTION},
      {"--distribution", a->distribution != NULL, 1u << ATTENTION},
      {"--scale", !isnan(a->scale), 1u << ATTENTION},
      {"--seed", a->seed >= 0, 1u << ATTENTION},
      {"--queries", a->queries > 0, 1u << ATTENTION},
      {"--folder", a->folder != NULL, 1u << CHECKPOINT},
      {"--megabytes", a->megabytes > 0, 1u << CHECKPOINT | 1u << COLLECTIVES},
      {"--ranks", a->ranks > 0, 1u << CHECKPOINT},
      {"--files", a->files > 0, 1u << CHECKPOINT},
      {"--text", a->text != NULL, 1u << TOKENIZER},
      {"--tokenizer", a->tokenizer != NULL, 1u << TOKENIZER},
  };
  for (size_t i = 0; i < sizeof option / sizeof *option; i++) {
    if (!option[i].given || option[i].benches >> which & 1u) continue;
    error_set(e, ERROR_USAGE, "bench %s takes no %s", benches[which].name, option[i].name);
    return error_hint(e, "`fp4d help bench` shows what it takes");
  }
  return true;
}

static bool choose(const struct bench_arguments *a, int *which, struct error *e) {
  for (*which = 0; *which < BENCHES; ++*which)
    if (strcmp(benches[*which].name, a->what) == 0) break;
  if (*which == BENCHES) {
    error_set(e, ERROR_USAGE, "bench: nothing is named '%.40s'; there are gemm, quantize, attention, step, loader, checkpoint, collectives and tokenizer",
              a->what);
    return error_hint(e, "`fp4d help bench` shows what it takes");
  }
  if (benches[*which].config && !a->config) {
    error_set(e, ERROR_USAGE, "bench %s: CONFIG is missing", a->what);
    return error_hint(e, "`fp4d help bench` shows what it takes");
  }
  if (!a->config && a->sets.n > 0) return error_set(e, ERROR_USAGE, "bench %s: --set without CONFIG", a->what);
  return check_options(a, *which, e);
}

int command_bench(int argc, char **argv) {
  static struct config config;
  struct bench b = {.a = {.repeat = 9, .seed = -1, .scale = NAN}};
  struct error e = {0}, unread = {0};
  int which;
  if (!arguments_parse(command_bench_arguments, argc, argv, &b.a, &e) || !choose(&b.a, &which, &e)) return command_fail(&e);
  const bool loaded = !b.a.config || config_load(&config, b.a.config, b.a.sets.item, b.a.sets.n, &unread);
  if (b.a.config && loaded) {
    b.config = &config;
    if (b.a.threads > 0) config.run.threads = b.a.threads;
    comm_start_limit(config.limits.start_s);
  }
  b.comm = comm_open(0, &e);
  if (!b.comm) return command_fail(&e);
  comm_enter(b.comm, COMM_UNTIMED, "bench", -1);
  log_setup(comm_rank(b.comm), comm_world(b.comm), LOG_INFO);
  struct comm_limits limits;
  config_default_limits(&limits);
  if (b.config) limits = b.config->limits;
  bool good = comm_watch(b.comm, &limits, &e);
  good = good && (benches[which].ranks || comm_world(b.comm) == 1 ||
                   error_set(&e, ERROR_USAGE, "bench %s runs in one process, %d were started", b.a.what, comm_world(b.comm)));
  if (good && !loaded) {
    e = unread;
    good = false;
  }
  good = comm_agree(b.comm, good, &e) && benches[which].run(&b, &e);
  if (!good && comm_rank(b.comm) != 0 && !comm_is_broken(b.comm)) e.message[0] = 0; /* rank 0 has the same, or it was said here already */
  const int code = good ? ERROR_NONE : command_fail(&e); /* said before any rank leaves */
  comm_close(b.comm);
  return code;
}
