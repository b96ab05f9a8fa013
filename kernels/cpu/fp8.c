/* E4M3 and E5M2 with one factor a view or one a row of it.
 *
 *   A = largest magnitude of the view, or of the row
 *   S = min(M / A, FLT_MAX),  1 where A = 0           M = 448, 57344
 *   code = x S to nearest, saturating;  outer = 1 / S
 *
 * Where A is infinite or NaN, S is 1 and outer is A (the NaN 7fc00000):
 * everything decodes to what is not finite.
 */
#include <float.h>
#include <string.h>

#include "base/checked.h"
#include "kernels/cpu/codes.h"
#include "kernels/cpu/whole.h"
#include "kernels/formats.h"

#define INLINE static inline __attribute__((always_inline))

#define LARGEST_E4M3 448.0f
#define LARGEST_E5M2 57344.0f

enum { BITS_INFINITE = 0x7F80, BITS_NAN = 0x7FC0, PAIRS = PANEL_ROWS / 2, CODE_NAN = 0x7F, CODE_SIGN = 0x80 };

static int64_t at_most(int64_t n, int64_t most) { return n < most ? n : most; }

/* ---- codes ----------------------------------------------------------------------- */

struct factor {
  float scale, outer;
};

static float largest_code(const struct operand *o) { return o->encoding.format == FORMAT_E4M3 ? LARGEST_E4M3 : LARGEST_E5M2; }

static struct factor factor_of(uint16_t amax, float largest) {
  if (amax == 0) return (struct factor){1.0f, 1.0f};
  if (amax >= BITS_INFINITE) return (struct factor){1.0f, bf16_decode(amax > BITS_INFINITE ? BITS_NAN : BITS_INFINITE)};
  const float s = largest / bf16_decode(amax), scale = s < FLT_MAX ? s : FLT_MAX;
  return (struct factor){scale, 1.0f / scale};
}

/* A panel's counts: at most 256 a pair; those that underflow by the bit that shows it, 128 a half. */
struct lanes {
  uint32_t saturated[PAIRS], underflowed[PAIRS];
};

/* Of a magnitude, nearest even, saturating (a NaN also): the code in the low half, anything above
 * it.  As codes_nearest: with M the octave (of the smallest normal number below that), the
 * last bits of t + 2^21 M or 2^20 M are t in the octave's steps, 4 or 8. */
INLINE uint32_t code_of(float t, bool e4m3) {
  const uint32_t most = e4m3 ? 0x43E00000u : 0x47600000u, least = e4m3 ? 0x3C800000u : 0x38800000u;
  const int bits = e4m3 ? 3 : 2, steps = 1 << bits;
  const float more = (float)(1 << (23 - bits)) + (float)(0x10000 - steps * (int)(least >> 23)) / (float)steps;
  const uint32_t a = f32_bits(t), u = a < most ? a : most, octave = (u > least ? u : least) & 0x7F800000u;
  return f32_bits(f32_fma(f32_from_bits(octave), more, f32_from_bits(u))) + (octave >> (23 - bits));
}

/* Codes of a pair of rows; magnitudes `a`. */
INLINE uint32_t encode_pair(uint32_t a, float even, float odd, bool e4m3, uint32_t *saturated, uint32_t *underflowed) {
  const uint32_t largest = f32_bits(e4m3 ? LARGEST_E4M3 : LARGEST_E5M2);
  const float t = codes_first(a) * even, u = codes_second(a) * odd;
  const uint32_t codes = (code_of(t, e4m3) & 0xFFFFu) | code_of(u, e4m3) << 16;
  *saturated = f32_bits(t) > largest ? *saturated + 1 : *saturated;
  *saturated = f32_bits(u) > largest ? *saturated + 1 : *saturated;
  *underflowed += (a + CODES_BOTH(0x7FFF)) >> 8 & ~(codes + CODES_BOTH(0x7F)) & CODES_BOTH(CODE_SIGN);
  return codes;
}

/* Words of two codes; scale: of each row.  NaNs get the largest code. */
INLINE void encode_words(uint16_t *restrict word, const uint16_t *restrict z, int64_t words, const float *restrict scale,
                         bool e4m3, struct lanes *restrict lanes) {
  float even[PAIRS], odd[PAIRS];
  for (int r = 0; r < PAIRS; r++) even[r] = scale[2 * r], odd[r] = scale[2 * r + 1];
  for (int64_t q = 0; q < words; q++)
    for (int r = 0; r < PAIRS; r++) {
      const uint32_t x = codes_pair(z, 2 * q * PAIRS + r), y = codes_pair(z, (2 * q + 1) * PAIRS + r);
      uint32_t saturated = 0, underflowed = 0;
      const uint32_t first = encode_pair(x & CODES_BOTH(0x7FFF), even[r], odd[r], e4m3, &saturated, &underflowed);
      const uint32_t second = encode_pair(y & CODES_BOTH(0x7FFF), even[r], odd[r], e4m3, &saturated, &underflowed);
      const uint32_t codes = first | second << 8 | (x >> 8 & CODES_BOTH(CODE_SIGN)) | (y & CODES_BOTH(0x8000));
      memcpy(word + q * PANEL_ROWS + 2 * r, &codes, sizeof codes);
      lanes->saturated[r] += saturated;
      lanes->underflowed[r] += underflowed;
    }
}

CPU_CLONES static void encode_e4m3(uint16_t *word, const uint16_t *z, int64_t words, const float *scale,
                                   struct lanes *lanes) {
  encode_words(word, z, words, scale, true, lanes);
}

CPU_CLONES static void encode_e5m2(uint16_t *word, const uint16_t *z, int64_t words, const float *scale,
                                   struct lanes *lanes) {
  encode_words(word, z, words, scale, false, lanes);
}

static void encode_nans(uint16_t *word, const uint16_t *z, int64_t words) {
  for (int64_t i = 0; i < words * PANEL_ROWS; i++) {
    const uint16_t *x = z + i / PANEL_ROWS * 2 * PANEL_ROWS + i % PANEL_ROWS;
    if ((x[0] & 0x7FFF) > BITS_INFINITE) word[i] = (uint16_t)((word[i] & 0xFF00) | CODE_NAN);
    if ((x[PANEL_ROWS] & 0x7FFF) > BITS_INFINITE) word[i] = (uint16_t)((word[i] & 0xFF) | CODE_NAN << 8);
  }
}

static void encode_panel(const struct operand *o, const uint16_t *bits, const struct panel *p, const float *scale,
                         struct quantise_counts *counts, struct ahead *ahead) {
  struct lanes lanes = {{0}, {0}};
  uint16_t word[PANEL_ELEMENTS / 2];
  uint8_t *codes = o->codes + p->first_row * o->cols + p->first_col;
  const bool stream = panel_streams(o);
  const uint16_t amax = panel_amax(bits, p);
  const int64_t most = PANEL_COLS / AHEAD_PANEL / 2;
  for (int64_t r = 0; !stream && r < p->rows; r++) { /* lines far apart */
    __builtin_prefetch(codes + r * o->cols, 1);
    __builtin_prefetch(codes + r * o->cols + 64, 1);
  }
  for (int64_t q = 0; q < p->cols / 2; q += most) {
    const int64_t words = at_most(p->cols / 2 - q, most);
    ahead_ask(ahead);
    (o->encoding.format == FORMAT_E4M3 ? encode_e4m3 : encode_e5m2)(word + q * PANEL_ROWS, bits + 2 * q * PANEL_ROWS, words,
                                                                    scale, &lanes);
  }
  if (amax > BITS_INFINITE) encode_nans(word, bits, p->cols / 2);
  panel_store(codes, o->cols, p->rows, word, p->cols / 2, stream);
  for (int r = 0; r < PAIRS; r++) {
    counts->saturated += lanes.saturated[r];
    counts->underflowed += (lanes.underflowed[r] >> 16) / CODE_SIGN + (lanes.underflowed[r] & 0xFFFF) / CODE_SIGN;
  }
  counts->elements += p->rows * p->cols;
  panel_count_amax(counts, amax, bits, p);
}

static void visit(const struct panel_rule *rule, const uint16_t *bits, const struct panel *p,
                  struct quantise_counts *counts, struct ahead *ahead) {
  float scale[PANEL_ROWS];
  for (int r = 0; r < PANEL_ROWS; r++) scale[r] = rule->factor.encode;
  encode_panel(rule->o, bits, p, scale, counts, ahead);
}

static void count_factor(struct quantise_counts *counts, uint16_t amax) {
  counts->blocks++;
  counts->zero_blocks += amax == 0;
}

/* ---- a factor a row ------------------------------------------------------------------ */

/* Until its codes are made a row's amax stands in its outer factor. */
static uint16_t kept_amax(const struct operand *o, int64_t row) { return (uint16_t)f32_bits(o->outer[row]); }

static void visit_rows(const struct panel_rule *rule, const uint16_t *bits, const struct panel *p,
                       struct quantise_counts *counts, struct ahead *ahead) {
  const float largest = largest_code(rule->o);
  float scale[PANEL_ROWS] = {0};
  for (int64_t r = 0; r < p->rows; r++) scale[r] = factor_of(kept_amax(rule->o, p->first_row + r), largest).scale;
  encode_panel(rule->o, bits, p, scale, counts, ahead);
}

static void finish_rows(const struct panel_rule *rule) {
  struct quantise_counts counts = {0};
  for (int64_t r = 0; r < rule->o->rows; r++) {
    const uint16_t amax = kept_amax(rule->o, r);
    rule->o->outer[r] = factor_of(amax, largest_code(rule->o)).outer;
    count_factor(&counts, amax);
  }
  cpu_counts_add(rule->counts, &counts);
}

void fp8_quantise(struct cpu_device *d, struct panel_rule *rule, const struct matrix *source) {
  (void)d, (void)source;
  const struct operand *o = rule->o;
  CPU_REQUIRE(!rule->done && !rule->draw, "FP8 has no tiles and draws nothing");
  if (o->encoding.scale == SCALE_ROW) {
    CPU_REQUIRE(o->strip == 1 && o->segment == 0, "a factor a row is a strip of 1");
    rule->visit = visit_rows;
    rule->finish = finish_rows;
    return;
  }
  CPU_REQUIRE(operand_outer_count(o) == 1, "one factor a view");
  const struct factor f = factor_of(rule->amax, largest_code(o));
  o->outer[0] = f.outer;
  rule->factor.encode = f.scale;
  rule->visit = visit;
  cpu_counts_add(rule->counts, &(struct quantise_counts){.blocks = 1, .zero_blocks = rule->amax == 0});
}
