/* What tests with a literal model of an E2M1 quantiser share: random numbers
 * and values of every kind, a device, the packed layout, rounding to E2M1 and
 * the random fields, all in other words than the library's. */
#ifndef FP4D_TESTS_CPU_LITERAL_H
#define FP4D_TESTS_CPU_LITERAL_H

#include "base/checked.h"
#include "tests/cpu_device.h"
#include "tests/random.h"

/* ---- values ------------------------------------------------------------------------- */

enum { KINDS = 11 };

/* A BF16 of one of several kinds; of kind 9 one in `rare` is not finite. */
static inline uint16_t value_of_kind(int kind, uint32_t rare) {
  const double g = normal();
  switch (kind) {
    case 0: return bf16_encode((float)g);
    case 1: return bf16_encode((float)(g * 1e-12));
    case 2: return bf16_encode((float)(g * 1e38));
    case 3: return (uint16_t)((next() & 0x8000) | (next() & 0xFF)); /* subnormals, smallest normals */
    case 4: return (uint16_t)(next() % 4 ? next() & 0x8000 : next() & 0x8FFF); /* zeros; about 2^-100 */
    case 5: return (uint16_t)(next() & 0x8000 ? 0xFF7F : 0x7F7F);
    case 6: return (uint16_t)next(); /* anything, infinities and NaN too */
    case 7: return (uint16_t)(next() & 0x8000);
    case 8: return bf16_encode((float)ldexp(1, (int)(next() % 40) - 20));
    case 9: return (uint16_t)(next() % rare ? bf16_encode((float)g) : 0x7F80 | (next() & 0x8040));
    default: return bf16_encode((float)(g * exp(3 * normal())));
  }
}

/* ---- a device -------------------------------------------------------------------- */

static inline struct cpu_device device_of(int threads) {
  struct error e;
  struct cpu_device d = {.threads = threads_create(threads, &e)};
  if (!d.threads) {
    printf("not ok threads: %s\n", e.message);
    exit(1);
  }
  d.scratch_bytes = (1 << 20) + threads * round_up(cpu_emit_scratch_bytes(4096), 64);
  d.scratch = test_memory((size_t)d.scratch_bytes);
  return d;
}
static inline void device_end(struct cpu_device *d) {
  threads_destroy(d->threads);
  free(d->scratch);
}

/* ---- packed operands --------------------------------------------------------------- */

static inline uint32_t code_at(const struct operand *o, int64_t r, int64_t c) {
  return (uint32_t)o->codes[r * (o->cols / 2) + c / 2] >> (c % 2 ? 4 : 0) & 15u;
}

/* The layout in other words: 32x16-byte tiles of 128 rows by 4 scale columns. */
static inline uint32_t scale_at(const struct operand *o, int64_t r, int64_t c) {
  const int64_t block = o->encoding.format == FORMAT_MXFP4 ? 32 : 16, tiles_across = (o->cols / block + 3) / 4;
  const uint8_t *tile = o->scales + 512 * (r / 128 * tiles_across + c / 4);
  return tile[16 * (r % 32) + 4 * (r / 32 % 4) + c % 4];
}

/* ---- the model ------------------------------------------------------------------------ */

static const double LEVEL[8] = {0, .5, 1, 1.5, 2, 3, 4, 6};

/* E2M1 of t >= 0: to nearest, or by a 16-bit field. */
static inline uint32_t model_code(double t, bool negative, int field) {
  const uint32_t sign = negative ? 8 : 0;
  uint32_t low = 0;
  if (isnan(t)) return 7;
  if (t >= 6) return 7 | sign;
  while (LEVEL[low + 1] <= t) low++;
  const double place = (t - LEVEL[low]) / (LEVEL[low + 1] - LEVEL[low]);
  const bool up = field >= 0 ? floor(place * 65536) + field >= 65536 : place > .5 || (place == .5 && low % 2);
  return (low + up) | sign;
}

/* The field of element (r, c) of a row view of `cols` columns. */
static inline int field_of(const struct draw *d, int64_t r, int64_t c, int64_t cols) {
  const struct philox_block counter =
      philox_counter(d->update, d->first_sample + (uint64_t)(r / d->seq_len), d->layer, d->operand,
                     (uint32_t)((r % d->seq_len * cols + c) / 16));
  const uint32_t word = philox4x32_10(d->seed, counter).word[c % 16 / 4];
  const uint32_t half = c % 4 < 2 ? (word >> 8 & 0xFF00) | (word & 0xFF) : (word >> 16 & 0xFF00) | (word >> 8 & 0xFF);
  uint32_t reversed = 0;
  for (int i = 0; i < 16; i++) reversed |= (half >> i & 1) << (15 - i);
  return (int)(c % 2 ? reversed : half);
}

static inline void check_counts(const struct quantise_counts *got, const struct quantise_counts *want) {
  CHECK_EQ_I64(got->elements, want->elements);
  CHECK_EQ_I64(got->saturated, want->saturated);
  CHECK_EQ_I64(got->underflowed, want->underflowed);
  CHECK_EQ_I64(got->blocks, want->blocks);
  CHECK_EQ_I64(got->zero_blocks, want->zero_blocks);
  CHECK(got->amax == want->amax);
}

#endif
