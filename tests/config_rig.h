/* Configurations from text, for tests. */
#ifndef FP4D_TESTS_CONFIG_RIG_H
#define FP4D_TESTS_CONFIG_RIG_H

#include <stdlib.h>

#include "base/file.h"
#include "tests/random.h"
#include "tests/test.h"
#include "trainer/config.h"
#include "trainer/options.h"

#define GOOD "model: {preset: tiny}\ndata: {train: t.tokens}\n" /* two lines */
#define SPAN(layers) "    - {layers: " layers ", fprop: {x: mxfp4, w: mxfp4/2d32}, dgrad: {dy: mxfp4/sr}, wgrad: {x: mxfp4, dy: mxfp4}}\n"

static struct config config;
static struct error failure;

static inline bool parse(const char *text, const char *const *sets, int n) {
  failure = (struct error){0};
  return config_parse(&config, text, "cfg.yaml", sets, n, &failure);
}

static inline bool parse_set(const char *set) { return parse(GOOD, &set, 1); }

static inline int lines(const char *text) {
  int n = text[0] != 0;
  for (; *text; text++) n += *text == '\n';
  return n;
}

static inline bool same_linear(const struct linear_route *a, const struct linear_route *b) {
  for (int role = 0; role < OPERAND_ROLE_COUNT; role++)
    if (!encoding_equal(&a->operand[role], &b->operand[role])) return false;
  return true;
}

/* A random number below n. */
static inline uint64_t draw(uint64_t n) { return next() % n; }

#endif
