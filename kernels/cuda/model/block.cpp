/* Barriers, and the exchanges of a warp's lanes. */
#include "kernels/cuda/model/block.h"

#include "kernels/cuda/model/fibers.h"

namespace {

struct barrier {
  int arrived, threads;
  uint64_t phase;
} barriers[CUDA_MODEL_BARRIERS];

/* A lane inside an exchange: the last one to come does it for all. */
struct lane {
  bool inside;
  enum cuda_model_exchange kind;
  unsigned mask;
  int source;
  uint64_t value, result;
  const char *file;
  int line;
} lanes[CUDA_MODEL_BLOCK_MAX];

void exchange(lane *warp, unsigned mask) {
  unsigned votes = 0;
  for (int i = 0; i < 32; i++)
    if (mask >> i & 1 && warp[i].value) votes |= 1u << i;
  for (int i = 0; i < 32; i++) {
    if (!(mask >> i & 1)) continue;
    lane *l = &warp[i];
    l->result = l->kind == CUDA_MODEL_BALLOT ? votes : l->value;
    if (l->kind != CUDA_MODEL_SHUFFLE) continue;
    if (!(mask >> l->source & 1)) cuda_model_fail("lane %d reads lane %d, which takes no part (%s:%d)", i, l->source, l->file, l->line);
    l->result = warp[l->source].value;
  }
  for (int i = 0; i < 32; i++)
    if (mask >> i & 1) warp[i].inside = false;
}

}  // namespace

void cuda_model_block_begin(int threads) {
  (void)threads;
  memset(barriers, 0, sizeof barriers);
  for (lane &l : lanes) l.inside = false;
}

void cuda_model_block_end() {
  for (int i = 0; i < CUDA_MODEL_BARRIERS; i++)
    if (barriers[i].arrived) cuda_model_fail("ended with barrier %d waiting: %d of %d threads came", i, barriers[i].arrived, barriers[i].threads);
}

void cuda_model_barrier(int id, int threads, bool wait, const char *file, int line) {
  if (id < 0 || id >= CUDA_MODEL_BARRIERS) cuda_model_fail("barrier %d: there are %d", id, CUDA_MODEL_BARRIERS);
  if (threads <= 0 || threads > (cuda_model_threads() + 31) / 32 * 32 || (threads % 32 && threads != cuda_model_threads()))
    cuda_model_fail("barrier %d of %d threads: it takes whole warps of the block", id, threads);
  barrier *b = &barriers[id];
  if (b->arrived && b->threads != threads) cuda_model_fail("barrier %d of %d threads and of %d (%s:%d)", id, b->threads, threads, file, line);
  b->threads = threads;
  const uint64_t phase = b->phase;
  if (++b->arrived == threads) {
    b->arrived = 0;
    b->phase++;
    if (wait) cuda_model_yield();
  } else if (wait) {
    cuda_model_wait_for([b, phase] { return b->phase != phase; }, id ? "a named barrier" : "__syncthreads", file, line);
  }
}

uint64_t cuda_model_warp(enum cuda_model_exchange kind, unsigned mask, uint64_t value, int source, const char *file, int line) {
  const int thread = cuda_model_thread(), own = thread % 32;
  lane *warp = &lanes[thread - own];
  if (!(mask >> own & 1)) cuda_model_fail("a lane outside its own mask %08x (%s:%d)", mask, file, line);
  lane *l = &warp[own];
  *l = lane{true, kind, mask, source & 31, value, 0, file, line};
  bool all = true;
  for (int i = 0; i < 32; i++) {
    if (!(mask >> i & 1)) continue;
    const lane *o = &warp[i];
    if (thread - own + i >= cuda_model_threads()) cuda_model_fail("the mask %08x has lane %d, which does not exist (%s:%d)", mask, i, file, line);
    if (!o->inside) {
      all = false;
    } else if (o->mask & 1u << own && (o->mask != mask || o->kind != kind || o->line != line || strcmp(o->file, file) != 0)) {
      cuda_model_fail("lane %d is at %s:%d, lane %d at %s:%d of one exchange", own, file, line, i, o->file, o->line);
    }
  }
  if (all) exchange(warp, mask);
  else cuda_model_wait_for([l] { return !l->inside; }, "the other lanes of its warp", file, line);
  return l->result;
}
