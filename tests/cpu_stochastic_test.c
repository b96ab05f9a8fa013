/* Stochastic rounding cell by cell: what our quantiser draws over many seeds,
 * against tests/golden/stochastic.txt, whose codes and probabilities are found
 * without random numbers and were held against two independent simulations
 * (tests/oracle/stochastic.py says what a line holds).
 *
 * A cell's mean is bounded by 4 sigma and its variance is that of two values,
 * (high - x)(x - low); both are linear in how often the upper code comes. */
#include <math.h>

#include "tests/cpu_quantise.h"

#define GOLDEN "tests/golden/stochastic.txt"

enum { BLOCKS = 15, COLS = 32, RULES = 3, SEEDS = 4096 };

struct cell {
  uint32_t byte, low, high;
  double up, others_up; /* the probability of `high`, and how often microxcaling took it */
};

static struct cell cells[RULES][BLOCKS][COLS];
static uint16_t words[BLOCKS * COLS];
static double others_draws;

static const struct {
  const char *name;
  enum scale_rule scale;
} rules[RULES] = {{"encode", SCALE_MX_ENCODE}, {"decode", SCALE_MX_DECODE}, {"floor", SCALE_MX_FLOOR}};

static int read_cells(void) {
  FILE *f = fopen(GOLDEN, "r");
  char rule[16];
  unsigned block, element, x, byte, low, high;
  double up, count;
  int lines = 0;
  if (!f || fscanf(f, "%lf", &others_draws) != 1) {
    FAIL("%s: cannot be read (run from the top folder)", GOLDEN);
    if (f) fclose(f);
    return 0;
  }
  while (fscanf(f, "%15s %u %u %x %u %u %u %lf %lf", rule, &block, &element, &x, &byte, &low, &high, &up, &count) == 9) {
    int r = 0;
    while (r < RULES && strcmp(rules[r].name, rule) != 0) r++;
    if (r == RULES || block >= BLOCKS || element >= COLS) break;
    cells[r][block][element] = (struct cell){byte, low, high, up, count / others_draws};
    words[block * COLS + element] = (uint16_t)x;
    lines++;
  }
  fclose(f);
  return lines;
}

static double magnitude(uint32_t code) { return (double)e2m1_decode(code & 7u); }

static void compare_rule(int r) {
  struct matrix source = {.data = words, .dtype = DTYPE_BF16, .rows = BLOCKS, .cols = COLS};
  struct extent x = {.tokens = BLOCKS, .hidden_size = COLS, .ffn_size = COLS, .vocab_size = COLS, .head_chunk = BLOCKS,
                     .attention = {.batch = 1, .seq_len = BLOCKS, .n_heads = 1, .n_kv_heads = 1, .head_dim = COLS}};
  struct encoding e = {FORMAT_MXFP4, BLOCK_1X32, rules[r].scale, ROUND_STOCHASTIC, HADAMARD_NONE, 0};
  struct operand o = quantise_operand(e, VIEW_ROW, BLOCKS, COLS);
  struct device *d = test_device(1, &x);
  static int64_t ups[BLOCKS][COLS];
  memset(ups, 0, sizeof ups);
  for (uint64_t seed = 0; seed < SEEDS; seed++) {
    struct emission out = {.row = &o, .draw = {.seed = 0x5EED0000u + seed, .update = 3, .seq_len = BLOCKS, .layer = 2}};
    cpu_quantise(d, &out, &source);
    for (int b = 0; b < BLOCKS; b++)
      for (int i = 0; i < COLS; i++) {
        const struct cell *c = &cells[r][b][i];
        uint32_t code = quantise_code(&o, b, i);
        bool negative = words[b * COLS + i] >> 15 && c->byte > 0;
        if ((code & 7u) != c->low && (code & 7u) != c->high)
          FAIL("%s, block %d, element %d: code %u is no neighbour", rules[r].name, b, i, (unsigned)code);
        if (c->byte > 0 && (code >> 3 != 0) != negative)
          FAIL("%s, block %d, element %d: the sign of code %u", rules[r].name, b, i, (unsigned)code);
        ups[b][i] += c->high != c->low && (code & 7u) == c->high;
      }
  }

  double squares = 0, error = 0, size = 0, variance_error = 0, variance = 0;
  int drawn = 0;
  for (int b = 0; b < BLOCKS; b++)
    for (int i = 0; i < COLS; i++) {
      const struct cell *c = &cells[r][b][i];
      double p = (double)ups[b][i] / SEEDS, step = magnitude(c->high) - magnitude(c->low);
      CHECK_EQ_I64(quantise_scale(&o, b, 0, 32), c->byte);
      if (c->high == c->low) continue;
      /* fields have 16 bits: the probability is rounded down to a multiple of 2^-16 */
      double sigma = sqrt(c->up * (1 - c->up) / SEEDS), off = fabs(p - c->up);
      if (!(off <= 4 * sigma + 0x1p-16))
        FAIL("%s, block %d, element %d: up %.4f of the draws, probability %.4f +- %.4f", rules[r].name, b, i, p, c->up, sigma);
      double both = sqrt(c->up * (1 - c->up) * (1.0 / SEEDS + 1.0 / others_draws));
      if (!(fabs(p - c->others_up) <= 5 * both + 0x1p-16))
        FAIL("%s, block %d, element %d: up %.4f of the draws, microxcaling %.4f", rules[r].name, b, i, p, c->others_up);
      /* in units of the step, x = low + up: E(q - x)^2 = (1 - up) up, whichever way it is summed */
      double second = (1 - p) * c->up * c->up + p * (1 - c->up) * (1 - c->up);
      if (!(fabs(second - c->up * (1 - c->up)) <= 4 * sigma * fabs(1 - 2 * c->up) + 0x1p-15))
        FAIL("%s, block %d, element %d: variance %.5f, expected %.5f", rules[r].name, b, i, second, c->up * (1 - c->up));
      if (c->up > 0x1p-6 && c->up < 1 - 0x1p-6) {
        squares += (p - c->up) * (p - c->up) / (sigma * sigma);
        drawn++;
      }
      double sign = words[b * COLS + i] >> 15 ? -1 : 1;
      error += sign * (p - c->up) * step;
      size += magnitude(c->low) + c->up * step;
      variance_error += (second - c->up * (1 - c->up)) * step * step;
      variance += c->up * (1 - c->up) * step * step;
    }
  printf("# %s: %d cells of %d draws: chi-square / cells %.3f, mean error %.2g, variance %.2g\n", rules[r].name, drawn,
         SEEDS, squares / drawn, error / size, variance_error / variance);
  CHECK(drawn > 300);
  CHECK_CLOSE(squares / drawn, 1, 4 * sqrt(2.0 / drawn)); /* neither too far nor too near: these are draws */
  CHECK_CLOSE(error / size, 0, 1e-3);
  CHECK_CLOSE(variance_error / variance, 0, 1e-2);
  quantise_drop(&o);
  test_device_close(d);
}

TEST(encode) { compare_rule(0); }
TEST(decode) { compare_rule(1); }
TEST(ocp_floor) { compare_rule(2); }

int main(void) {
  int lines = read_cells();
  if (lines != RULES * BLOCKS * COLS) {
    printf("not ok golden: %d lines\n", lines);
    return 1;
  }
  RUN(encode);
  RUN(decode);
  RUN(ocp_floor);
  return test_report();
}
