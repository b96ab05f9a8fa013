/* Writers of token files as Megatron-LM, llm.c, NumPy and others write them, made
 * from the layouts alone and not from data/: what the readers are tested against. */
#ifndef FP4D_TESTS_DATA_TOKENS_BUILD_H
#define FP4D_TESTS_DATA_TOKENS_BUILD_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct docs {
  int64_t count, tokens;
  int64_t *length;
  int32_t *ids; /* one after the other */
};

static inline uint64_t docs_step(uint64_t *state) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return *state >> 33;
}

/* The documents of tests/oracle/data_index.py: 256, up to 97 ids below 250, 257. */
static inline struct docs docs_make(int source, int64_t count) {
  struct docs d = {.count = count, .length = malloc((size_t)count * 8), .ids = malloc((size_t)count * 99 * 4)};
  uint64_t state = 0x9E3779B97F4A7C15u * (uint64_t)(source + 1);
  for (int64_t k = 0; k < count; k++) {
    const int64_t n = 1 + (int64_t)(docs_step(&state) % 97);
    d.ids[d.tokens++] = 256;
    for (int64_t i = 0; i < n; i++) d.ids[d.tokens++] = (int32_t)(docs_step(&state) % 250);
    d.ids[d.tokens++] = 257;
    d.length[k] = n + 2;
  }
  return d;
}

static inline void docs_free(struct docs *d) {
  free(d->length);
  free(d->ids);
}

static inline void put_number(FILE *f, uint64_t x, int bytes) {
  for (int i = 0; i < bytes; i++) fputc((int)(x >> (8 * i) & 255), f);
}

static inline void put_ids(FILE *f, const int32_t *ids, int64_t n, int width) {
  for (int64_t i = 0; i < n; i++) put_number(f, (uint64_t)ids[i], width);
}

/* NAME.bin and NAME.idx of documents [first, end); each one sequence, or two where it has more than 5 ids and `split`. */
static inline void put_megatron(const char *name, const struct docs *d, int64_t first, int64_t end, int code, int width, int split) {
  char path[512];
  snprintf(path, sizeof path, "%s.bin", name);
  FILE *bin = fopen(path, "wb");
  snprintf(path, sizeof path, "%s.idx", name);
  FILE *idx = fopen(path, "wb");
  int64_t at = 0, n = 0, s = 0;
  for (int64_t k = 0; k < first; k++) at += d->length[k];
  int64_t *sequence = malloc((size_t)(2 * (end - first) + 1) * 8), *document = malloc((size_t)(end - first + 1) * 8);
  for (int64_t k = first; k < end; k++) {
    document[k - first] = s;
    const int64_t a = split && d->length[k] > 5 ? 3 : 0;
    if (a) sequence[s++] = a;
    sequence[s++] = d->length[k] - a;
    n += d->length[k];
  }
  document[end - first] = s;
  put_ids(bin, d->ids + at, n, width);
  fwrite("MMIDIDX\0\0", 1, 9, idx);
  put_number(idx, 1, 8);
  put_number(idx, (uint64_t)code, 1);
  put_number(idx, (uint64_t)s, 8);
  put_number(idx, (uint64_t)(end - first + 1), 8);
  for (int64_t i = 0; i < s; i++) put_number(idx, (uint64_t)sequence[i], 4);
  for (int64_t i = 0, offset = 0; i < s; offset += sequence[i++] * width) put_number(idx, (uint64_t)offset, 8);
  for (int64_t i = 0; i <= end - first; i++) put_number(idx, (uint64_t)document[i], 8);
  free(sequence);
  free(document);
  fclose(bin);
  fclose(idx);
}

static inline void put_llmc(const char *path, const struct docs *d, int magic, int version, int width) {
  FILE *f = fopen(path, "wb");
  put_number(f, (uint64_t)magic, 4);
  put_number(f, (uint64_t)version, 4);
  put_number(f, (uint64_t)d->tokens, 4);
  for (int i = 3; i < 256; i++) put_number(f, 0, 4);
  put_ids(f, d->ids, d->tokens, width);
  fclose(f);
}

static inline void put_raw(const char *path, const struct docs *d, int width) {
  FILE *f = fopen(path, "wb");
  put_ids(f, d->ids, d->tokens, width);
  fclose(f);
}

static inline void put_npy_header(FILE *f, const char *descr, int64_t count) {
  char text[256];
  int n = snprintf(text, sizeof text, "{'descr': '%s', 'fortran_order': False, 'shape': (%lld,), }", descr, (long long)count);
  while ((10 + n) % 64 != 63) text[n++] = ' ';
  text[n++] = '\n';
  fwrite("\x93NUMPY\1\0", 1, 8, f);
  put_number(f, (uint64_t)n, 2);
  fwrite(text, 1, (size_t)n, f);
}

static inline void put_npy(const char *path, const struct docs *d, const char *descr, int width) {
  FILE *f = fopen(path, "wb");
  put_npy_header(f, descr, d->tokens);
  put_ids(f, d->ids, d->tokens, width);
  fclose(f);
}

static inline void put_offsets(const char *path, const struct docs *d, const char *descr, int width) {
  FILE *f = fopen(path, "wb");
  int64_t at = 0;
  put_npy_header(f, descr, d->count + 1);
  for (int64_t k = 0; k <= d->count; at += k < d->count ? d->length[k] : 0, k++) put_number(f, (uint64_t)at, width);
  fclose(f);
}

#endif
