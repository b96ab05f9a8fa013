/* Measuring: what `fp4d bench` is made of.
 *
 * A figure is the median of several repetitions after one that does not count.
 * Each row is one line: words for people, or with --json one object.
 */
#ifndef FP4D_TRAINER_BENCH_H
#define FP4D_TRAINER_BENCH_H

#include <jansson.h>
#include <stdint.h>

#include "comm/comm.h"
#include "trainer/arguments.h"
#include "trainer/config.h"

struct bench_arguments {
  const char *what, *config, *folder;
  const char *from, *setup, *distribution, *text, *tokenizer;
  struct argument_list sets, shapes, routes, lengths;
  int64_t repeat, threads, megabytes, seed, queries, ranks, files;
  double scale; /* NaN: not given; seed -1, queries, ranks, files 0 likewise */
  bool json;
};

struct bench {
  struct bench_arguments a;
  struct config *config; /* NULL: none given */
  struct comm *comm;
};

struct bench_seconds {
  double median, least, most;
};

/* Measures body(context), which is run as often as lasts 5 ms where `times` is 0
 * (more than one rank must give a number). */
bool bench_measure(const struct bench *b, int times, bool (*body)(void *context, struct error *e), void *context,
                   struct bench_seconds *out, struct error *e);
/* Measures launch(context), which starts operations and waits for nothing, by the device's
 * events (made anew): on a GPU neither launches nor waits count while it has work. */
bool bench_measure_device(const struct bench *b, struct device *d, void (*launch)(void *context), void *context,
                          struct bench_seconds *out, struct error *e);
struct bench_seconds bench_median(double *seconds, int n); /* sorts them */

/* The backend of the configuration, or "cpu", with scratch for each of these n extents.
 * The caller ends it with bench_close. */
struct device *bench_device(const struct bench *b, const struct extent *x, int n, void **scratch, struct error *e);
void bench_close(struct device *d, void *scratch);

/* Device memory of `bytes` bytes; BF16 or FP32 numbers in (-1, 1) where wanted. */
bool bench_random(struct device *d, struct matrix *m, uint64_t seed, struct error *e);

/* A headline; not with --json. */
void bench_title(const struct bench *b, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* One row, on rank 0; takes `row`, which also gets "bench" and the times (s NULL: none). */
void bench_row(const struct bench *b, json_t *row, const struct bench_seconds *s, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

bool bench_gemm(struct bench *b, struct error *e);
bool bench_quantize(struct bench *b, struct error *e);
bool bench_attention(struct bench *b, struct error *e);
bool bench_attention_quality(struct bench *b, struct error *e); /* with --setup, --shape and what else is its own */
bool bench_step(struct bench *b, struct error *e);
bool bench_loader(struct bench *b, struct error *e);
bool bench_checkpoint(struct bench *b, struct error *e);
bool bench_state(struct bench *b, struct error *e); /* of bench_checkpoint, with --ranks */
bool bench_collectives(struct bench *b, struct error *e);
bool bench_tokenizer(struct bench *b, struct error *e);

#endif
