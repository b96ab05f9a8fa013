/* Arenas: one bump allocator that can also only measure. */
#include "base/arena.h"

struct arena arena_measure(void) { return (struct arena){0}; }

struct arena arena_over(void *base, size_t capacity) {
  return (struct arena){.base = base, .capacity = capacity};
}

void *arena_take(struct arena *arena, enum arena_category category, int64_t count, size_t size) {
  if (count == 0 || size == 0) return NULL;
  size_t bytes, padded, end;
  if (count < 0 || __builtin_mul_overflow((size_t)count, size, &bytes) ||
      __builtin_add_overflow(bytes, (size_t)ARENA_ALIGNMENT - 1, &padded) ||
      __builtin_add_overflow(arena->used, padded / ARENA_ALIGNMENT * ARENA_ALIGNMENT, &end) ||
      (arena->base && end > arena->capacity)) {
    arena->exhausted = true;
    return NULL;
  }
  char *block = arena->base ? arena->base + arena->used : NULL;
  arena->by_category[category] += end - arena->used;
  arena->used = end;
  return block;
}

const char *arena_category_name(enum arena_category category) {
  switch (category) {
    case ARENA_PARAMETERS: return "parameters";
    case ARENA_MASTER: return "master";
    case ARENA_ADAM_M: return "adam_m";
    case ARENA_ADAM_V: return "adam_v";
    case ARENA_GRADIENTS: return "gradients";
    case ARENA_WEIGHT_OPERANDS: return "weight_operands";
    case ARENA_ACTIVATIONS: return "activations";
    case ARENA_TRANSIENT: return "transient";
    case ARENA_HEAD: return "head";
    case ARENA_SCRATCH: return "scratch";
    case ARENA_COMMUNICATION: return "communication";
    case ARENA_CATEGORY_COUNT: break;
  }
  return "unknown";
}
