/* What the definition of CTA-local NVFP4 promises, on the CPU. */
#include "tests/cpu_nvfp4_local.h"

/* ---- strips, scales, folding --------------------------------------------------------------- */

/* Outer factors: as many as strips, zero or powers of two; scales: no NaN, no
 * sign, a strip's largest between 224 and 448; errors: half a step, clipping
 * only by a sixteenth where scales are normal. */
TEST(outer_factors_scales_and_errors) {
  struct cpu_device d = device_of(2);
  for (int f = 0; f < 2; f++) {
    struct matrix m = chunky(384, 512, 8);
    struct operand o = quantised(&d, &m, plain_local(RULES[f]), VIEW_ROW, 128, 0, NULL, NULL);
    CHECK_EQ_I64(operand_outer_count(&o), 3);
    for (int64_t strip = 0; strip < 3; strip++) {
      double largest = 0;
      int unused;
      for (int64_t r = strip * 128; r < strip * 128 + 128; r++)
        for (int64_t c = 0; c < 32; c++) {
          CHECK(scale_at(&o, r, c) <= 0x7E);
          largest = fmax(largest, (double)e4m3_decode(scale_at(&o, r, c)));
        }
      if (RULES[f] == P2) {
        CHECK(frexp((double)o.outer[strip], &unused) == .5);
        CHECK(largest >= 224 && largest <= 448);
      } else {
        CHECK(largest == 72 || largest == 80); /* 448/6 = 74.67 rounded */
      }
    }
    for (int64_t r = 0; r < 384; r++)
      for (int64_t c = 0; c < 512; c++) {
        const double z = test_get(&m, r * 512 + c), unit = (double)e4m3_decode(scale_at(&o, r, c / 16)) * (double)outer_at(&o, r, c);
        const double got = decoded(&o, r, c), q = fabs(z) / unit, step = q < 2 ? .5 : q < 4 ? 1 : 2;
        CHECK(fabs(got) <= 6 * 448 * (double)outer_at(&o, r, c));
        if (RULES[f] == P2) { /* scales are rounded once: what is encoded is what is decoded */
          if (fabs(z) < 6 * unit) CHECK(fabs(got - z) <= step / 2 * unit * (1 + 0x1p-20));
          else CHECK(fabs(z) <= 6 * unit * 1.0626 && fabs(got) == 6 * unit);
        } else {
          CHECK(fabs(got - z) <= (step / 2 + q / 8) * unit);
        }
      }
    operand_end(&o);
    free(m.data);
  }
  device_end(&d);
}

/* Multiplying by a power of two multiplies the outer factors and nothing else,
 * from the smallest subnormals to the largest numbers (LC-P2). */
TEST(homogeneous) {
  struct cpu_device d = device_of(1);
  struct matrix m = source_new(64, 272);
  for (int64_t i = 0; i < 64 * 272; i++) /* 3 significant bits, so that subnormals hold them */
    test_set(&m, i, ldexp(4 + next() % 4, (int)(next() % 12)) * (next() % 2 ? 1 : -1));
  const struct draw draw = {.seed = 9, .seq_len = 32};
  for (int rounding = 0; rounding < 2; rounding++) {
    const struct encoding e = local(P2, BLOCK_1X16, (enum rounding)rounding, HADAMARD_NONE);
    struct operand base = quantised(&d, &m, e, VIEW_ROW, 0, 0, &draw, NULL);
    static const int powers[] = {-133, -130, -125, -120, -118, -100, -80, -1, 3, 50, 113};
    for (size_t k = 0; k < sizeof powers / sizeof powers[0]; k++) {
      struct matrix scaled = source_new(64, 272);
      for (int64_t i = 0; i < 64 * 272; i++) {
        test_set(&scaled, i, ldexp(test_get(&m, i), powers[k]));
        CHECK(test_get(&scaled, i) == ldexp(test_get(&m, i), powers[k]));
      }
      struct operand o = quantised(&d, &scaled, e, VIEW_ROW, 0, 0, &draw, NULL);
      CHECK((double)o.outer[0] == ldexp((double)base.outer[0], powers[k]));
      o.outer[0] = base.outer[0];
      CHECK(same_operand(&o, &base));
      operand_end(&o);
      free(scaled.data);
    }
    operand_end(&base);
  }
  free(m.data);
  device_end(&d);
}

/* What is outside a strip does not matter to it. */
TEST(strips_are_independent) {
  struct cpu_device d = device_of(2);
  for (int f = 0; f < 2; f++)
    for (int view = VIEW_ROW; view <= VIEW_COLUMN; view++) {
      struct matrix m = gaussian(384, 384, 1), other = test_copy(&m);
      for (int64_t r = 0; r < 384; r++)
        for (int64_t c = 0; c < 384; c++)
          if ((view == VIEW_ROW ? r : c) / 128 != 1) test_set(&other, r * 384 + c, r % 7 == 0 ? 0 : 1e20 * normal());
      struct operand a = quantised(&d, &m, plain_local(RULES[f]), (enum view)view, 128, 0, NULL, NULL);
      struct operand b = quantised(&d, &other, plain_local(RULES[f]), (enum view)view, 128, 0, NULL, NULL);
      CHECK(memcmp(a.codes + 128 * 192, b.codes + 128 * 192, 128 * 192) == 0);
      CHECK(memcmp(a.codes, b.codes, 128 * 192) != 0);
      for (int64_t r = 128; r < 256; r++)
        for (int64_t c = 0; c < 24; c++) CHECK(scale_at(&a, r, c) == scale_at(&b, r, c));
      CHECK(a.outer[1] == b.outer[1] && a.outer[0] != b.outer[0]);
      operand_end(&a);
      operand_end(&b);
      free(m.data);
      free(other.data);
    }
  device_end(&d);
}

/* An arm is quantised as it would be alone. */
TEST(arms) {
  struct cpu_device d = device_of(2);
  enum { ROWS = 160, ARM = 208 };
  for (int f = 0; f < 2; f++) {
    struct matrix m = gaussian(ROWS, 2 * ARM, 1);
    for (int64_t r = 0; r < ROWS; r++)
      for (int64_t c = ARM; c < 2 * ARM; c++) test_set(&m, r * 2 * ARM + c, test_get(&m, r * 2 * ARM + c) * 0x1p-20);
    struct operand both = quantised(&d, &m, plain_local(RULES[f]), VIEW_ROW, 128, ARM, NULL, NULL);
    CHECK_EQ_I64(operand_outer_count(&both), 4);
    for (int arm = 0; arm < 2; arm++) {
      struct matrix half = source_new(ROWS, ARM);
      for (int64_t i = 0; i < ROWS * ARM; i++) test_set(&half, i, test_get(&m, i / ARM * 2 * ARM + arm * ARM + i % ARM));
      struct operand alone = quantised(&d, &half, plain_local(RULES[f]), VIEW_ROW, 128, 0, NULL, NULL);
      int64_t different = 0;
      for (int64_t r = 0; r < ROWS; r++)
        for (int64_t c = 0; c < ARM; c++)
          different += code_at(&both, r, arm * ARM + c) != code_at(&alone, r, c) ||
                       scale_at(&both, r, (arm * ARM + c) / 16) != scale_at(&alone, r, c / 16) ||
                       outer_at(&both, r, arm * ARM + c) != outer_at(&alone, r, c);
      CHECK_EQ_I64(different, 0);
      operand_end(&alone);
      free(half.data);
    }
    operand_end(&both);
    free(m.data);
  }
  device_end(&d);
}

TEST(any_number_of_threads) {
  struct matrix m = chunky(400, 416, 8);
  struct cpu_device one = device_of(1), five = device_of(5);
  const struct draw draw = {.seed = 4, .seq_len = 100};
  for (int f = 0; f < 2; f++)
    for (int view = VIEW_ROW; view <= VIEW_COLUMN; view++) {
      const struct encoding e = view == VIEW_ROW ? local(RULES[f], BLOCK_1X16, ROUND_STOCHASTIC, HADAMARD_NONE)
                                                 : local(RULES[f], BLOCK_1X16, ROUND_NEAREST, HADAMARD_SIGNED_16);
      struct operand a = quantised(&one, &m, e, (enum view)view, 128, 0, &draw, NULL);
      struct operand b = quantised(&five, &m, e, (enum view)view, 128, 0, &draw, NULL);
      CHECK(same_operand(&a, &b));
      operand_end(&a);
      operand_end(&b);
    }
  device_end(&one);
  device_end(&five);
  free(m.data);
}

/* Folding after the codes gives what a quantiser would that knew the strip's
 * exponent from the beginning, where no folded scale is subnormal (LC-P2). */
TEST(streaming_is_two_pass) {
  struct cpu_device d = device_of(2);
  for (int spread = 8; spread <= 16; spread += 8) {
    struct matrix m = chunky(512, 512, spread);
    struct operand o = quantised(&d, &m, plain_local(P2), VIEW_ROW, 256, 0, NULL, NULL);
    int64_t different = 0, normal_blocks = 0, blocks = 0;
    for (int64_t r = 0; r < 512; r++)
      for (int64_t c = 0; c < 512; c += 16) {
        const uint16_t *z = (const uint16_t *)m.data + r * 512 + c;
        const float a = outer_at(&o, r, c), amax = bf16_decode((uint16_t)amax_of(z, 0, 1, 16));
        const float ideal = amax * (1.0f / 6.0f) / a;
        const int scale = model_scale((double)ideal);
        blocks++;
        if (ideal < 0x1p-6f) continue;
        normal_blocks++;
        different += scale_at(&o, r, c / 16) != (uint32_t)scale;
        for (int i = 0; i < 16; i++)
          different += code_at(&o, r, c + i) !=
                       model_code((double)(fabsf(bf16_decode(z[i])) * (1.0f / ((float)e4m3_value(scale) * a))), z[i] >> 15, -1);
      }
    CHECK_EQ_I64(different, 0);
    if (spread == 8) CHECK_EQ_I64(normal_blocks, blocks);
    else CHECK(normal_blocks < blocks && normal_blocks > blocks / 2);
    operand_end(&o);
    free(m.data);
  }
  device_end(&d);
}

TEST(zeros) {
  struct cpu_device d = device_of(1);
  for (int f = 0; f < 2; f++) {
    struct matrix m = gaussian(300, 160, 1);
    for (int64_t i = 128 * 160; i < 256 * 160; i++) ((uint16_t *)m.data)[i] = next() & 0x8000; /* strip 1 */
    for (int64_t r = 0; r < 128; r++)
      for (int64_t c = 128; c < 160; c++) ((uint16_t *)m.data)[r * 160 + c] = 0x8000; /* a chunk of strip 0 */
    struct quantise_counts counts = {0};
    struct operand o = quantised(&d, &m, plain_local(RULES[f]), VIEW_ROW, 128, 0, NULL, &counts);
    CHECK(f32_bits(o.outer[1]) == 0 && o.outer[0] > 0 && o.outer[2] > 0);
    for (int64_t r = 0; r < 256; r++)
      for (int64_t c = r < 128 ? 128 : 0; c < 160; c++) CHECK(code_at(&o, r, c) == 0 && scale_at(&o, r, c / 16) == 0);
    CHECK_EQ_I64(counts.zero_blocks, 128 * 10 + 128 * 2);
    operand_end(&o);
    free(m.data);
  }
  device_end(&d);
}

/* A strip that holds a NaN or an infinity decodes to NaN, others do not. */
TEST(not_finite) {
  struct cpu_device d = device_of(1);
  static const uint16_t bad[] = {0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81};
  for (size_t k = 0; k < sizeof bad / sizeof bad[0]; k++)
    for (int f = 0; f < 2; f++) {
      struct matrix m = gaussian(384, 160, 1);
      ((uint16_t *)m.data)[200 * 160 + 140] = bad[k];
      struct quantise_counts counts = {0};
      struct operand o = quantised(&d, &m, plain_local(RULES[f]), VIEW_ROW, 128, 0, NULL, &counts);
      CHECK(isfinite(o.outer[0]) && isnan(o.outer[1]) && isfinite(o.outer[2]));
      CHECK_EQ_I64(code_at(&o, 200, 140), bad[k] == 0xFF80 ? 15 : 7);
      for (int64_t r = 0; r < 384; r++)
        for (int64_t c = 0; c < 10; c++) CHECK(scale_at(&o, r, c) <= 0x7E);
      CHECK(counts.amax > 1 && counts.amax < 10);
      operand_end(&o);
      free(m.data);
    }
  device_end(&d);
}

/* ---- stochastic rounding ------------------------------------------------------------------------ */

TEST(stochastic_is_unbiased) {
  enum { ROWS = 16, COLS = 256, DRAWS = 200 };
  struct cpu_device d = device_of(1);
  for (int f = 0; f < 2; f++) {
    struct matrix m = gaussian(ROWS, COLS, 1);
    static double sum[ROWS * COLS];
    memset(sum, 0, sizeof sum);
    struct operand nearest = quantised(&d, &m, plain_local(RULES[f]), VIEW_ROW, 0, 0, NULL, NULL);
    for (uint32_t update = 0; update < DRAWS; update++) {
      const struct draw draw = {.seed = 77, .update = update, .seq_len = ROWS};
      struct operand o = quantised(&d, &m, local(RULES[f], BLOCK_1X16, ROUND_STOCHASTIC, HADAMARD_NONE), VIEW_ROW, 0, 0, &draw, NULL);
      CHECK(update || memcmp(o.codes, nearest.codes, ROWS * COLS / 2) != 0);
      CHECK(memcmp(o.scales, nearest.scales, (size_t)operand_scale_bytes(&o.encoding, ROWS, COLS)) == 0);
      for (int64_t i = 0; i < ROWS * COLS; i++) sum[i] += (double)e2m1_decode(code_at(&o, i / COLS, i % COLS));
      operand_end(&o);
    }
    double worst = 0, total = 0;
    for (int64_t i = 0; i < ROWS * COLS; i++) {
      const int chunk_amax = amax_of((uint16_t *)m.data + i % COLS / 128 * 128, COLS, ROWS, 128);
      const struct model_chunk chunk = model_chunk(RULES[f], chunk_amax);
      const int amax = amax_of((uint16_t *)m.data + i / 16 * 16, 0, 1, 16);
      const double z = test_get(&m, i), t = (double)model_scaled(&chunk, (float)z, model_block_scale(&chunk, amax));
      const double expected = t > 6 ? 6 : t < -6 ? -6 : t, step = fabs(expected) < 2 ? .5 : fabs(expected) < 4 ? 1 : 2;
      const double error = (sum[i] / DRAWS - expected) / step; /* deviation of a mean: at most .5 / sqrt(DRAWS) */
      worst = fmax(worst, fabs(error));
      total += error;
    }
    CHECK(worst < 5 * .5 / sqrt(DRAWS));
    CHECK_CLOSE(total / (ROWS * COLS), 0, 5 * .5 / sqrt((double)DRAWS * ROWS * COLS));
    operand_end(&nearest);
    free(m.data);
  }
  device_end(&d);
}

/* A draw is a function of seed and place: samples quantised alone get the
 * codes that they get together, and an update repeated is the same. */
TEST(draws_belong_to_places) {
  enum { SAMPLES = 4, LENGTH = 64, COLS = 160 };
  struct cpu_device d = device_of(2);
  const struct encoding e = local(P2, BLOCK_1X16, ROUND_STOCHASTIC, HADAMARD_NONE);
  struct matrix m = gaussian(SAMPLES * LENGTH, COLS, 1);
  for (int64_t i = 0; i < m.rows; i += LENGTH) /* equal chunk amaxes wherever a chunk begins */
    for (int64_t c = 0; c < COLS; c += 128) test_set(&m, i * COLS + c, 8);
  struct draw draw = {.seed = 5, .update = 3, .first_sample = 11, .seq_len = LENGTH, .layer = 2, .operand = DRAW_DY_OUT};
  struct operand all = quantised(&d, &m, e, VIEW_ROW, 128, 0, &draw, NULL);
  struct operand again = quantised(&d, &m, e, VIEW_ROW, 128, 0, &draw, NULL);
  CHECK(same_operand(&all, &again));
  for (int64_t s = 0; s < SAMPLES; s++) {
    struct matrix one = {(uint16_t *)m.data + s * LENGTH * COLS, DTYPE_BF16, LENGTH, COLS};
    struct draw own = draw;
    own.first_sample += (uint64_t)s;
    struct operand o = quantised(&d, &one, e, VIEW_ROW, 128, 0, &own, NULL);
    CHECK(memcmp(o.codes, all.codes + s * LENGTH * COLS / 2, LENGTH * COLS / 2) == 0);
    operand_end(&o);
    own.seed++;
    o = quantised(&d, &one, e, VIEW_ROW, 128, 0, &own, NULL);
    CHECK(memcmp(o.codes, all.codes + s * LENGTH * COLS / 2, LENGTH * COLS / 2) != 0);
    operand_end(&o);
  }
  operand_end(&all);
  operand_end(&again);
  free(m.data);
  device_end(&d);
}

/* ---- figures ---------------------------------------------------------------------------------------- */

struct quality {
  double relative, gain, cosine;
};
static struct quality quality_of(const struct operand *o, const struct matrix *m) {
  double error = 0, norm = 0, product = 0, square = 0;
  for (int64_t r = 0; r < o->rows; r++)
    for (int64_t c = 0; c < o->cols; c++) {
      const double z = test_get(m, r * m->cols + c), q = decoded(o, r, c);
      error += (q - z) * (q - z);
      norm += z * z;
      product += q * z;
      square += q * q;
    }
  return (struct quality){sqrt(error / norm), product / norm, product / sqrt(norm * square)};
}

/* Relative errors of whole tensors: means over eight sequences of random numbers, from which one
 * strays by .0005 at most (an independent quantiser on numpy's default_rng(0): .0952 and .0995). */
TEST(regression_numbers) {
  struct cpu_device d = device_of(2);
  struct matrix sources[3] = {gaussian(512, 1024, 1), source_new(512, 1024), chunky(512, 1024, 8)};
  for (int64_t i = 0; i < 512 * 1024; i++) { /* Student's t, 3 degrees of freedom */
    const double a = normal(), b = normal(), c = normal();
    test_set(&sources[1], i, normal() / sqrt((a * a + b * b + c * c) / 3));
  }
  static const struct {
    int rule, source;
    double relative;
  } expected[] = {{P2, 0, .0952}, {P2, 2, .0952}, {F, 0, .0988}, {F, 1, .0942}, {F, 2, .0969}};
  for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
    struct operand o = quantised(&d, &sources[expected[i].source], plain_local(expected[i].rule), VIEW_ROW, expected[i].rule == F ? 256 : 128, 0, NULL, NULL);
    const struct quality q = quality_of(&o, &sources[expected[i].source]);
    CHECK_CLOSE(q.relative, expected[i].relative, .001);
    CHECK_CLOSE(q.gain, .995, .006);
    operand_end(&o);
  }
  for (int i = 0; i < 3; i++) free(sources[i].data);
  device_end(&d);
}

TEST(tiny_numbers) {
  struct cpu_device d = device_of(1);
  for (int f = 0; f < 2; f++) {
    for (double value = 1e-12; value < 2e-8; value *= 10) {
      struct matrix m = source_new(64, 128);
      for (int64_t i = 0; i < 64 * 128; i++) test_set(&m, i, value);
      struct operand o = quantised(&d, &m, plain_local(RULES[f]), VIEW_ROW, 128, 0, NULL, NULL);
      const struct quality q = quality_of(&o, &m);
      CHECK(q.gain >= .9 && q.gain <= 1.1);
      operand_end(&o);
      free(m.data);
    }
    struct matrix m = gaussian(256, 256, 1e-10);
    struct operand o = quantised(&d, &m, plain_local(RULES[f]), VIEW_ROW, 128, 0, NULL, NULL);
    const struct quality q = quality_of(&o, &m);
    CHECK(q.relative <= .15 && q.cosine >= .99);
    operand_end(&o);
    free(m.data);
  }
  device_end(&d);
}

int main(void) {
  RUN(outer_factors_scales_and_errors);
  RUN(homogeneous);
  RUN(strips_are_independent);
  RUN(arms);
  RUN(any_number_of_threads);
  RUN(streaming_is_two_pass);
  RUN(zeros);
  RUN(not_finite);
  RUN(stochastic_is_unbiased);
  RUN(draws_belong_to_places);
  RUN(regression_numbers);
  RUN(tiny_numbers);
  return test_report();
}
