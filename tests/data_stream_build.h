/* A second writer of token streams, made from docs/formats.md alone and not
 * from data/: what the reader is tested against.  All ids are zero but for the
 * planted ones, and zero blocks stay holes in the file, so streams of many
 * GiB take no time and no space. */
#ifndef FP4D_TESTS_DATA_STREAM_BUILD_H
#define FP4D_TESTS_DATA_STREAM_BUILD_H

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/hash.h"

struct plant {
  int64_t token;
  uint32_t id;
};

struct build {
  uint32_t vocab_size;
  uint64_t tokens;
  const struct plant *plants; /* ascending tokens */
  int n_plants;
  const uint64_t *documents; /* first tokens; NULL: one document */
  uint64_t n_documents;
  const unsigned char *source; /* of each document, of two sources "built" and "other"; NULL: all of one, "built" */
};

enum { BUILD_BLOCK = 1048576, BUILD_HEADER = 256, BUILD_TRAILER = 64 };

static inline void build_put(unsigned char *p, uint64_t x, int bytes) {
  for (int i = 0; i < bytes; i++) p[i] = (unsigned char)(x >> (8 * i));
}

static inline void build_put_hash(unsigned char *p, struct hash h) {
  build_put(p, h.high, 8);
  build_put(p + 8, h.low, 8);
}

static inline void build_header(unsigned char h[BUILD_HEADER], const struct build *b) {
  memset(h, 0, BUILD_HEADER);
  memcpy(h, "\x89" "FP4DTK\n", 8);
  build_put(h + 8, 2, 4);
  build_put(h + 12, 256, 4);
  build_put(h + 16, b->vocab_size <= 65536 ? 2 : 4, 4);
  build_put(h + 20, b->vocab_size, 4);
  build_put(h + 24, b->tokens, 8);
  build_put(h + 32, b->documents ? b->n_documents : 1, 8);
  build_put(h + 40, BUILD_BLOCK, 8);
  memcpy(h + 48, "bytes", 5);
  build_put(h + 112, b->vocab_size >= 258 ? 256 : UINT32_MAX, 4);
  build_put(h + 116, b->vocab_size >= 258 ? 257 : UINT32_MAX, 4);
  build_put(h + 120, b->source ? 2 : 1, 4);
}

/* The trailer of a stream whose header and block table are given. */
static inline bool build_trailer(unsigned char t[BUILD_TRAILER], const unsigned char *header,
                                 const unsigned char *table, size_t table_bytes, const char *sources) {
  struct hash_state *s = hash_open();
  if (!s) return false;
  hash_feed(s, header, BUILD_HEADER);
  hash_feed(s, table, table_bytes);
  memset(t, 0, BUILD_TRAILER);
  build_put_hash(t, hash_close(s));
  build_put_hash(t + 16, hash_bytes(sources, strlen(sources)));
  build_put(t + 32, strlen(sources), 8);
  memcpy(t + 56, "FP4DEND\n", 8);
  return true;
}

/* The sources' text. */
static inline void build_sources(char *text, size_t room, const struct build *b, const uint64_t *documents, uint64_t n_documents) {
  uint64_t counts[2][2] = {{0}};
  for (uint64_t d = 0; d < n_documents; d++) {
    const int source = b->source ? b->source[d] & 1 : 0;
    counts[source][0]++;
    counts[source][1] += (d + 1 < n_documents ? documents[d + 1] : b->tokens) - documents[d];
  }
  if (!b->source) counts[0][1] = b->tokens;
  int at = snprintf(text, room, "built\t%llu\t%llu\n", (unsigned long long)counts[0][0], (unsigned long long)counts[0][1]);
  if (b->source)
    snprintf(text + at, room - (size_t)at, "other\t%llu\t%llu\tfrom \xc3\xa4 place\n", (unsigned long long)counts[1][0],
             (unsigned long long)counts[1][1]);
}

static inline bool build_stream(const char *path, const struct build *b) {
  static const uint64_t one_document[1] = {0};
  const uint64_t *documents = b->documents ? b->documents : one_document;
  uint64_t n_documents = b->documents ? b->n_documents : 1;
  uint64_t width = b->vocab_size <= 65536 ? 2 : 4;
  uint64_t offsets_at = (b->tokens * width + 7) / 8 * 8;
  uint64_t sources_at = offsets_at + 8 * (n_documents + 1), payload = sources_at + n_documents;
  uint64_t blocks = (payload + BUILD_BLOCK - 1) / BUILD_BLOCK;
  unsigned char *block = malloc(BUILD_BLOCK), *table = malloc(blocks * 16);
  int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  bool ok = block && table && fd >= 0;
  struct hash zeros = {0, 0};
  if (ok) {
    memset(block, 0, BUILD_BLOCK);
    zeros = hash_bytes(block, BUILD_BLOCK);
  }
  int plant = 0;
  for (uint64_t i = 0; ok && i < blocks; i++) {
    uint64_t begin = i * BUILD_BLOCK, end = begin + BUILD_BLOCK < payload ? begin + BUILD_BLOCK : payload;
    bool planted = plant < b->n_plants && (uint64_t)b->plants[plant].token * width < end;
    if (!planted && end <= offsets_at && end - begin == BUILD_BLOCK) {
      build_put_hash(table + 16 * i, zeros);
      continue;
    }
    memset(block, 0, BUILD_BLOCK);
    for (; plant < b->n_plants && (uint64_t)b->plants[plant].token * width < end; plant++)
      build_put(block + ((uint64_t)b->plants[plant].token * width - begin), b->plants[plant].id, (int)width);
    for (uint64_t at = begin > offsets_at ? begin : offsets_at; at < end && at < sources_at; at += 8) {
      uint64_t d = (at - offsets_at) / 8;
      build_put(block + (at - begin), d < n_documents ? documents[d] : b->tokens, 8);
    }
    for (uint64_t at = begin > sources_at ? begin : sources_at; at < end; at++)
      block[at - begin] = b->source ? b->source[at - sources_at] : 0;
    build_put_hash(table + 16 * i, hash_bytes(block, end - begin));
    ok = pwrite(fd, block, end - begin, (off_t)(BUILD_HEADER + begin)) == (ssize_t)(end - begin);
  }
  if (ok) {
    unsigned char header[BUILD_HEADER], trailer[BUILD_TRAILER];
    char text[256];
    build_sources(text, sizeof text, b, documents, n_documents);
    build_header(header, b);
    const size_t length = strlen(text);
    ok = build_trailer(trailer, header, table, blocks * 16, text) &&
         pwrite(fd, header, sizeof header, 0) == (ssize_t)sizeof header &&
         pwrite(fd, table, blocks * 16, (off_t)(BUILD_HEADER + payload)) == (ssize_t)(blocks * 16) &&
         pwrite(fd, text, length, (off_t)(BUILD_HEADER + payload + blocks * 16)) == (ssize_t)length &&
         pwrite(fd, trailer, sizeof trailer, (off_t)(BUILD_HEADER + payload + blocks * 16 + length)) ==
             (ssize_t)sizeof trailer;
  }
  if (fd >= 0 && close(fd) != 0) ok = false;
  free(block);
  free(table);
  return ok;
}

#endif
