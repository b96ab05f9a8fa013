/* Arenas: all memory of a rank in one block, laid out before it exists.
 *
 * The code that lays out memory runs twice: once over a *measuring* arena
 * (no block; it only adds up, per category) and once over a real one.  So
 * `fp4d plan` and a training run cannot disagree, and nothing is allocated
 * after start-up.
 */
#ifndef FP4D_BASE_ARENA_H
#define FP4D_BASE_ARENA_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

#define ARENA_ALIGNMENT 256

enum arena_category {
  ARENA_PARAMETERS,
  ARENA_MASTER,
  ARENA_ADAM_M,
  ARENA_ADAM_V,
  ARENA_GRADIENTS,
  ARENA_WEIGHT_OPERANDS, /* quantised weights, refreshed once an update */
  ARENA_ACTIVATIONS,     /* what backward needs, kept per block */
  ARENA_TRANSIENT,       /* live only inside a block's forward or backward */
  ARENA_HEAD,            /* logits chunk and its gradient */
  ARENA_SCRATCH,         /* a backend's own working memory */
  ARENA_COMMUNICATION,
  ARENA_CATEGORY_COUNT
};

struct arena {
  char *base;       /* NULL: measuring only */
  size_t capacity;  /* bytes at base; ignored while measuring */
  size_t used;      /* bytes laid out so far, alignment included */
  size_t by_category[ARENA_CATEGORY_COUNT];
  bool exhausted;   /* a request did not fit (or overflowed size_t) */
};

/* A measuring arena. */
struct arena arena_measure(void);

/* An arena over `capacity` bytes at `base` (aligned to ARENA_ALIGNMENT). */
struct arena arena_over(void *base, size_t capacity);

/* Lays out count elements of `size` bytes, aligned to ARENA_ALIGNMENT.
 * Returns NULL while measuring, and when the request does not fit (then
 * arena->exhausted is set).  count 0 gives NULL and uses nothing. */
void *arena_take(struct arena *arena, enum arena_category category, int64_t count, size_t size);

/* "parameters", "adam_m", … as `plan` prints them. */
const char *arena_category_name(enum arena_category category);

#endif
