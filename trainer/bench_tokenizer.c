/* bench tokenizer: text to ids and back, by one thread. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/file.h"
#include "data/tokenizer.h"
#include "data/utf8.h"
#include "trainer/bench.h"
#include "trainer/record.h"

enum { TEXT_LIMIT = 1 << 30 };

struct tokenizing {
  const struct tokenizer *t;
  struct tokenizer_scratch *scratch;
  struct tokenizer_ids ids;
  const char *text;
  int64_t bytes;
  char *out; /* bytes */
};

static bool encode(void *context, struct error *e) {
  struct tokenizing *k = context;
  k->ids.n = 0;
  return tokenizer_encode(k->t, k->scratch, k->text, k->bytes, TOKENIZER_PLAIN, &k->ids, e);
}

static bool decode(void *context, struct error *e) {
  struct tokenizing *k = context;
  int64_t used = 0, n;
  for (int64_t i = 0; i < k->ids.n; i++) {
    const char *token = tokenizer_token(k->t, k->ids.id[i], &n);
    memcpy(k->out + used, token, (size_t)n);
    used += n;
  }
  return used == k->bytes || error_set(e, ERROR_INTERNAL, "the ids of %" PRId64 " bytes have %" PRId64, k->bytes, used);
}

/* Of this process: on a machine that others use too, what the work took. */
static double processor_seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static bool row(const struct bench *b, struct tokenizing *k, const char *name, bool (*body)(void *, struct error *), struct error *e) {
  struct bench_seconds s;
  double busy = processor_seconds();
  if (!bench_measure(b, 1, body, k, &s, e)) return false;
  busy = (processor_seconds() - busy) / (double)(b->a.repeat + 1);
  const double rate = (double)k->bytes / s.median, ids = (double)k->ids.n / s.median;
  json_t *o = json_object();
  record_text(o, "operation", name);
  record_integer(o, "bytes", k->bytes);
  record_integer(o, "ids", k->ids.n);
  record_real(o, "bytes_per_second", rate);
  record_real(o, "ids_per_second", ids);
  record_real(o, "processor_seconds", busy);
  bench_row(b, o, &s, "%-8s %10.1f MB/s %12.0f ids/s   (%.1f to %.1f MB/s; %.1f MB a processor second)", name, rate * 1e-6, ids,
            (double)k->bytes / s.most * 1e-6, (double)k->bytes / s.least * 1e-6, (double)k->bytes / busy * 1e-6);
  return true;
}

bool bench_tokenizer(struct bench *b, struct error *e) {
  const char *what = b->a.tokenizer ? b->a.tokenizer : b->config ? b->config->data.tokenizer : "bytes";
  char *read = NULL, *whole = NULL;
  size_t bytes = 0;
  int64_t replacements = 0;
  if (!b->a.text) {
    error_set(e, ERROR_USAGE, "bench tokenizer: --text is missing");
    return error_hint(e, "`fp4d help bench` shows what it takes");
  }
  struct tokenizer *t = tokenizer_open(what, e);
  struct tokenizing k = {.t = t};
  bool good = t && (k.scratch = tokenizer_scratch_open(t, e)) && file_read(b->a.text, TEXT_LIMIT, ERROR_DATA, &read, &bytes, e);
  if (good) {
    k.bytes = utf8_repaired_size(read, (int64_t)bytes, &replacements);
    whole = malloc((size_t)k.bytes + 1);
    k.out = malloc((size_t)k.bytes + 1);
    good = (whole && k.out) || error_set(e, ERROR_SYSTEM, "out of memory for %" PRId64 " bytes", k.bytes);
  }
  if (good) {
    utf8_repair(read, (int64_t)bytes, whole);
    k.text = whole;
    good = encode(&k, e);
  }
  if (good) {
    bench_title(b, "%s with %s, one thread: %" PRId64 " bytes, %" PRId64 " ids, %.3f bytes an id", b->a.text, tokenizer_info(t)->name, k.bytes, k.ids.n,
                k.ids.n ? (double)k.bytes / (double)k.ids.n : 0);
    good = row(b, &k, "encode", encode, e) && row(b, &k, "decode", decode, e);
  }
  tokenizer_ids_free(&k.ids);
  tokenizer_scratch_close(k.scratch);
  tokenizer_close(t);
  free(k.out);
  free(whole);
  free(read);
  return good;
}
