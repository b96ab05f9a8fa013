/* Rotary embedding against tests/golden/rope.txt: tables and rotated heads of
 * Hugging Face transformers in FP32 at positions 0, 1 and 8,191, with and
 * without Llama-3.1 scaling (tests/oracle/rope.py says what a line holds).
 *
 * Their pairs are (i, i + head_dim/2), ours (2i, 2i + 1).  They round frequency
 * and angle to FP32, we round cosine and sine alone (kernels_rope_test.c bounds
 * our own error by 2^-25): so what parts us grows with the angle, a few of its
 * last places, and is theirs. */
#include <math.h>

#include "kernels/rope.h"
#include "tests/cpu_device.h"

enum { POSITIONS = 3, LARGEST_DIM = 128 };

/* Frequency by pow and scaling: at most 8 half-ulps; the product one more. */
#define ANGLE_ERROR (9 * 0x1p-24)

struct golden {
  char name[32];
  int64_t dim;
  double theta;
  struct rope_scaling scaling;
  int64_t position[POSITIONS];
  float cos_sin[POSITIONS][LARGEST_DIM], q[POSITIONS][LARGEST_DIM], rotated[POSITIONS][LARGEST_DIM]; /* our pairs */
};

static float read_float(FILE *f) {
  uint32_t u;
  return fscanf(f, "%" SCNx32, &u) == 1 ? f32_from_bits(u) : NAN;
}

static bool read_golden(FILE *f, struct golden *g) {
  int scaled;
  struct rope_scaling *s = &g->scaling;
  if (fscanf(f, "%31s %" SCNd64 " %lf %d %lf %lf %lf %" SCNd64, g->name, &g->dim, &g->theta, &scaled, &s->factor,
             &s->low_freq_factor, &s->high_freq_factor, &s->original_max_position) != 8)
    return false;
  s->enabled = scaled != 0;
  for (int t = 0; t < POSITIONS; t++)
    for (int64_t i = 0; i < g->dim / 2; i++) {
      int64_t pair;
      if (fscanf(f, "%" SCNd64 " %" SCNd64, &g->position[t], &pair) != 2 || pair != i) return false;
      for (int k = 0; k < 2; k++) g->cos_sin[t][2 * i + k] = read_float(f);
      for (int k = 0; k < 2; k++) g->q[t][2 * i + k] = read_float(f);
      for (int k = 0; k < 2; k++) g->rotated[t][2 * i + k] = read_float(f);
    }
  return true;
}

static void compare(const struct golden *g) {
  const int64_t dim = g->dim, seq_len = g->position[POSITIONS - 1] + 1;
  float *table = test_memory((size_t)(seq_len * dim) * sizeof *table), rows[POSITIONS][LARGEST_DIM];
  rope_table(table, seq_len, dim, g->theta, &g->scaling);

  /* the three positions as a sequence of their own: q, then a key head and a value head of zeros */
  const struct attention_shape s = {1, POSITIONS, 1, 1, dim};
  const struct extent x = {.tokens = POSITIONS, .hidden_size = dim, .ffn_size = dim, .vocab_size = dim, .attention = s,
                           .head_chunk = POSITIONS};
  struct device *d = test_device(1, &x);
  struct matrix qkv = test_matrix(DTYPE_F32, POSITIONS, 3 * dim);
  float *packed = test_memory((size_t)(POSITIONS * dim) * sizeof *packed);
  for (int t = 0; t < POSITIONS; t++) {
    memcpy(rows[t], table + g->position[t] * dim, (size_t)dim * sizeof(float));
    memcpy(packed + t * dim, rows[t], (size_t)dim * sizeof(float));
    memcpy((float *)qkv.data + t * 3 * dim, g->q[t], (size_t)dim * sizeof(float));
  }
  cpu_rope_forward(d, &qkv, NULL, NULL, packed, &s);

  for (int t = 0; t < POSITIONS; t++) {
    double of_table = 0, of_q = 0;
    for (int64_t i = 0; i < dim; i++) {
      const double position = (double)g->position[t];
      /* an upper bound: scaling only lowers frequencies */
      const double angle = position * pow(g->theta, -(double)(i - i % 2) / (double)dim), bound = ANGLE_ERROR * angle + 0x1p-24;
      const double off = fabs((double)rows[t][i] - (double)g->cos_sin[t][i]);
      const double size = fabs((double)g->q[t][i - i % 2]) + fabs((double)g->q[t][i - i % 2 + 1]);
      const double off_q = fabs(test_get(&qkv, t * 3 * dim + i) - (double)g->rotated[t][i]);
      if (!(off <= bound)) FAIL("%s: table at %g, element %d: %g apart, allowed %g", g->name, position, (int)i, off, bound);
      if (!(off_q <= (bound + 0x1p-23) * size))
        FAIL("%s: q at %g, element %d: %g apart, allowed %g", g->name, position, (int)i, off_q, (bound + 0x1p-23) * size);
      of_table = fmax(of_table, off);
      of_q = fmax(of_q, off_q);
    }
    printf("# %s, position %d: largest difference %.2g of a table, %.2g of q\n", g->name, (int)g->position[t], of_table, of_q);
    if (g->position[t] == 0) CHECK(of_table == 0 && of_q == 0);
    if (g->position[t] == 1) CHECK(of_table < 2e-7 && of_q < 1e-6);
    CHECK(of_table < 4e-4 && of_q < 6e-4);
  }
  free(packed);
  free(qkv.data);
  free(table);
  test_device_close(d);
}

/* Rounded where they round, the angle is theirs to the bit: cosine and sine are one place apart at most. */
static void compare_fp32(const struct golden *g) {
  const int64_t dim = g->dim, seq_len = g->position[POSITIONS - 1] + 1;
  float *table = test_memory((size_t)(seq_len * dim) * sizeof *table);
  int apart = 0;
  rope_table_fp32(table, seq_len, dim, g->theta, &g->scaling);
  for (int t = 0; t < POSITIONS; t++)
    for (int64_t i = 0; i < dim; i++) {
      const float ours = table[g->position[t] * dim + i], theirs = g->cos_sin[t][i];
      apart += ours != theirs;
      if (!(fabsf(ours - theirs) <= 0x1p-23f * fabsf(theirs)))
        FAIL("%s: at %d, element %d: %a, transformers has %a", g->name, (int)g->position[t], (int)i, (double)ours, (double)theirs);
    }
  printf("# %s, angles in FP32: %d of %d differ, by one place\n", g->name, apart, (int)(POSITIONS * dim));
  CHECK(apart < POSITIONS * dim / 20);
  free(table);
}

TEST(hugging_face) {
  FILE *f = fopen("tests/golden/rope.txt", "r");
  static struct golden g;
  int cases = 0;
  CHECK(f != NULL);
  if (!f) return;
  while (read_golden(f, &g)) {
    compare(&g);
    compare_fp32(&g);
    cases++;
  }
  CHECK_EQ_I64(cases, 3);
  fclose(f);
}

int main(void) {
  RUN(hugging_face);
  return test_report();
}
