/* The order of samples: position of sample i as a function of (seed, i).
 *
 * Epoch 0 is the stream's own order, unless it is to be shuffled.  Other epochs go through a keyed
 * permutation of 0..n-1: an alternating Feistel network on the smallest power
 * of two >= n (Luby and Rackoff 1988; rounds from Philox), walked along its
 * cycle until it lands below n (Black and Rogaway 2002).  Nothing is stored,
 * so sample 10^9 costs what sample 0 costs.
 */
#include <inttypes.h>

#include "base/checked.h"
#include "base/philox.h"
#include "data/data.h"

#define ROUNDS 8
#define ORDER_KEY UINT64_C(0x6f72646572) /* keeps these draws apart from others of the seed */

bool data_order_make(struct data_order *o, const struct stream *s, int64_t seq_len, uint64_t seed, struct error *e) {
  const struct stream_info *info = stream_info(s);
  if (seq_len < 1) return error_set(e, ERROR_INTERNAL, "samples of %" PRId64 " tokens", seq_len);
  if (info->tokens - 1 < seq_len) {
    error_set(e, ERROR_DATA, "%s: a sample needs %" PRId64 " tokens (seq_len + 1), the stream has %" PRId64,
              stream_path(s), seq_len == INT64_MAX ? seq_len : seq_len + 1, info->tokens);
    return error_hint(e, "give more text or a smaller seq_len");
  }
  *o = (struct data_order){.stream = s, .seq_len = seq_len, .seed = seed};
  return true;
}

int64_t data_order_epoch_samples(const struct data_order *o) {
  return (stream_info(o->stream)->tokens - 1) / o->seq_len;
}

int64_t data_order_dropped_tokens(const struct data_order *o) {
  return stream_info(o->stream)->tokens - (data_order_epoch_samples(o) * o->seq_len + 1);
}

/* A permutation of 0..2^bits-1. The two halves change places each round; after
 * an even number of rounds their widths are back where they were. */
static uint64_t feistel(uint64_t x, int bits, uint64_t key, uint64_t epoch) {
  int left_bits = bits / 2, right_bits = bits - left_bits;
  uint32_t left = (uint32_t)(x >> right_bits);
  uint32_t right = (uint32_t)(x & ((UINT64_C(1) << right_bits) - 1));
  for (uint32_t round = 0; round < ROUNDS; round++) {
    struct philox_block counter = {{right, round, (uint32_t)epoch, (uint32_t)(epoch >> 32)}};
    uint32_t mixed = philox4x32_10(key, counter).word[0];
    uint32_t next = (left ^ mixed) & (uint32_t)((UINT64_C(1) << left_bits) - 1);
    left = right;
    right = next;
    int swap = left_bits;
    left_bits = right_bits;
    right_bits = swap;
  }
  return (uint64_t)left << right_bits | right;
}

int64_t data_order_index(const struct data_order *o, int64_t sample) {
  int64_t index = sample;
  for (int i = 0; i < o->n_skips && index >= o->skip[i].range[0]; i++)
    if (!checked_add(index, o->skip[i].range[1] - o->skip[i].range[0], &index) || !checked_add(index, 1, &index)) return -1;
  return index;
}

int64_t data_order_samples_before(const struct data_order *o, int64_t index) {
  int64_t samples = index;
  for (int i = 0; i < o->n_skips && index > o->skip[i].range[0]; i++) {
    const int64_t end = index - 1 < o->skip[i].range[1] ? index - 1 : o->skip[i].range[1];
    samples -= end - o->skip[i].range[0] + 1;
  }
  return samples;
}

int64_t data_order_position(const struct data_order *o, int64_t sample) {
  const int64_t n = data_order_epoch_samples(o), index = data_order_index(o, sample);
  if (index < 0) return -1;
  uint64_t epoch = (uint64_t)(index / n), x = (uint64_t)(index % n);
  if ((epoch == 0 && !o->shuffle_samples) || n == 1) return (int64_t)x;
  int bits = 64 - __builtin_clzll((uint64_t)n - 1);
  do {
    x = feistel(x, bits, o->seed ^ ORDER_KEY, epoch);
  } while (x >= (uint64_t)n);
  return (int64_t)x;
}
