/* Direct-P: against tests/golden/direct_p.txt, a float64 model; against its definition
 * one number at a time; and where exponents end. */
#include <float.h>
#include <math.h>

#include "kernels/cpu/direct_p.h"
#include "tests/cpu_device.h"

/* ---- a head --------------------------------------------------------------------- */

struct head {
  struct direct_p_head h;
  float *q, *k, *v, *out, *lse;
  struct direct_p_publication p;
  void *scratch;
};

static struct head head_new(int64_t queries, int64_t keys, int64_t dim, int threads) {
  const int64_t cols = round_up(dim, 32), ld = cols + 16;
  struct head x = {.h = {queries, keys, dim, cols, ld, NULL, NULL, NULL}};
  x.h.q = x.q = test_memory((size_t)(queries * ld) * sizeof(float));
  x.h.k = x.k = test_memory((size_t)(keys * ld) * sizeof(float));
  x.h.v = x.v = test_memory((size_t)(keys * ld) * sizeof(float));
  x.out = test_memory((size_t)(queries * dim) * sizeof(float));
  x.lse = test_memory((size_t)queries * sizeof(float));
  x.p.codes = test_memory((size_t)(queries * keys));
  x.p.scales = test_memory((size_t)(queries * ceil_div(keys, 32)));
  const int64_t bytes = round_up(direct_p_head_bytes(&x.h, threads), 64);
  x.scratch = aligned_alloc(64, (size_t)bytes);
  if (!x.scratch) exit(1);
  memset(x.scratch, 0xA5, (size_t)bytes);
  return x;
}

static void head_free(struct head *x) {
  free(x->q), free(x->k), free(x->v), free(x->out), free(x->lse), free(x->p.codes), free(x->p.scales), free(x->scratch);
}

static void head_run(struct head *x, const struct direct_p *rule, struct device *d) {
  direct_p_head(cpu_of(d)->threads, x->out, x->lse, &x->p, &x->h, rule, x->scratch);
}

/* Numbers with all their bits, so that the order of every sum shows. */
static void fill(float *rows, const struct direct_p_head *h, int64_t n, uint64_t key, double scale) {
  struct matrix m = test_random(DTYPE_F32, n, h->head_dim, key, scale);
  for (int64_t r = 0; r < n; r++) memcpy(rows + r * h->ld, (float *)m.data + r * h->head_dim, (size_t)h->head_dim * sizeof(float));
  free(m.data);
}

static struct device *device_new(int threads) {
  const struct extent x = {.tokens = 128, .head_chunk = 128, .attention = {1, 128, 1, 1, 16}, .hidden_size = 32, .ffn_size = 32, .vocab_size = 32};
  return test_device(threads, &x);
}

/* ---- the definition, one number at a time -------------------------------------------- */

static float larger(float a, float b) { return isnan(a) ? a : isnan(b) ? b : a > b ? a : b; }

static void literal(const struct head *x, const struct direct_p *rule, float *out, float *lse) {
  const struct direct_p_head *h = &x->h;
  const int64_t n = rule->anchor < h->keys ? rule->anchor : h->keys;
  const float kappa = 1.0f / sqrtf((float)h->head_dim) * ATTENTION_LOG2_E;
  float *s = test_memory((size_t)h->keys * sizeof(float)), *o = test_memory((size_t)h->head_dim * sizeof(float));
  for (int64_t i = 0; i < h->queries; i++) {
    float a = n > 0 ? -INFINITY : 0, total = 0;
    for (int64_t j = 0; j < h->keys; j++) {
      s[j] = 0;
      for (int64_t d = 0; d < h->head_dim; d++) s[j] = fmaf(x->q[i * h->ld + d], x->k[j * h->ld + d], s[j]);
    }
    for (int64_t r = 0; r < n; r++) a = larger(a, s[r * h->keys / n]);
    for (int64_t d = 0; d < h->head_dim; d++) o[d] = 0;
    for (int64_t group = 0; group < h->keys; group += 64) {
      float weight[64];
      const int64_t end = group + 64 < h->keys ? group + 64 : h->keys;
      for (int64_t b = group; b < end; b += 32) {
        const int64_t last = b + 32 < end ? b + 32 : end;
        float top = -INFINITY, codes = 0;
        for (int64_t j = b; j < last; j++) top = larger(top, fmaf(s[j] - a, kappa, (float)-rule->margin));
        float e = rule->exponent == DIRECT_P_FLOOR ? floorf(top) : rule->exponent == DIRECT_P_CEIL ? ceilf(top) : rintf(top);
        if (rule->margin + rule->lift > 0 && e < (float)rule->lift + 1 - 127) e = (float)rule->lift + 1 - 127;
        float scale = isnan(top) || e > 127 ? NAN : e < -126 ? 0 : ldexpf(1, (int)e - rule->lift);
        for (int64_t j = b; j < last; j++) {
          const float t = fmaf(s[j] - a, kappa, (float)-rule->margin) - e + ATTENTION_LOG2_6;
          const bool native = rule->native >> ((j - b) / 2) & 1;
          float q = isnan(scale) ? 6 : scale == 0 ? 0 : e2m1_decode(e2m1_encode(native ? f32_exp2(t) : fmaxf(0, fmaf(rule->slope, t, rule->offset))));
          CHECK(isnan(scale) || e2m1_decode(x->p.codes[i * h->keys + j]) == q);
          codes += q;
          weight[j - group] = q * scale;
        }
        total = total + scale * (codes / 6);
      }
      for (int64_t d = 0; d < h->head_dim; d++) {
        float g = 0;
        for (int64_t j = group; j < end; j++) g = fmaf(weight[j - group], x->v[j * h->ld + d], g);
        o[d] += g;
      }
    }
    if (isinf(total)) total = NAN;
    for (int64_t d = 0; d < h->head_dim; d++) out[i * h->head_dim + d] = o[d] / total * (1.0f / 36.0f);
    lse[i] = (fmaf(a, kappa, (float)rule->margin) + f32_log2(total) + (float)rule->lift) * ATTENTION_LN_2;
  }
  free(s), free(o);
}

static bool same(const float *a, const float *b, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    if (f32_bits(a[i]) != f32_bits(b[i]) && !(isnan(a[i]) && isnan(b[i]))) return false;
  return true;
}

TEST(literal) {
  static const int64_t shape[][3] = {{1, 1, 1}, {3, 2, 16}, {33, 31, 8}, {5, 33, 40}, {40, 64, 32}, {2, 65, 64}, {37, 131, 24}, {1, 200, 128}};
  static const enum direct_p_exponent exponent[] = {DIRECT_P_FLOOR, DIRECT_P_CEIL, DIRECT_P_ROUND};
  struct device *one = device_new(1), *three = device_new(3);
  for (int i = 0; i < 8; i++)
    for (int c = 0; c < 6; c++) {
      struct head x = head_new(shape[i][0], shape[i][1], shape[i][2], 3);
      const struct direct_p rule = {1.25f + 0.25f * (float)(c % 3), 1.2f - 0.1f * (float)c, exponent[(i + c) % 3],
                                    c == 3 ? 0xFFFFu : c == 4 ? 0u : 0x1234u * (uint32_t)c, c % 2 ? 7 * c : c == 4 ? 1000 : 0,
                                    c == 5 ? 100 : 0, c == 5 ? 26 : 0};
      fill(x.q, &x.h, x.h.queries, (uint64_t)(100 * i + c), c == 5 ? 4 : 2);
      fill(x.k, &x.h, x.h.keys, (uint64_t)(100 * i + c + 10), 2);
      fill(x.v, &x.h, x.h.keys, (uint64_t)(100 * i + c + 20), 2);
      float *out = test_memory((size_t)(x.h.queries * x.h.head_dim) * sizeof *out), *lse = test_memory((size_t)x.h.queries * sizeof *lse);
      head_run(&x, &rule, i % 2 ? three : one);
      literal(&x, &rule, out, lse);
      if (!same(out, x.out, x.h.queries * x.h.head_dim) || !same(lse, x.lse, x.h.queries)) FAIL("shape %d, rule %d", i, c);
      free(out), free(lse);
      head_free(&x);
    }
  test_device_close(one);
  test_device_close(three);
}

/* ---- the golden file ------------------------------------------------------------------ */

static struct matrix read_bf16(FILE *f, int64_t rows, int64_t cols) {
  struct matrix m = test_matrix(DTYPE_BF16, rows, cols);
  for (int64_t i = 0; i < rows * cols; i++) {
    unsigned bits;
    if (fscanf(f, "%4x", &bits) != 1) FAIL("the golden file ends early");
    ((uint16_t *)m.data)[i] = (uint16_t)bits;
  }
  return m;
}

struct golden {
  struct attention_shape s;
  struct attention_payload payload;
  struct attention_layout a;
};

static void golden_free(struct golden *g) {
  for (int i = 0; i < ATTENTION_VIEWS; i++) free(g->payload.view[i]), g->payload.view[i] = NULL;
}

static void golden_input(struct golden *g, FILE *f, struct device *d) {
  struct attention_shape *s = &g->s;
  char name[16];
  golden_free(g);
  s->batch = 1;
  if (fscanf(f, "%15s %" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64, name, &s->seq_len, &s->n_heads, &s->n_kv_heads, &s->head_dim) != 5)
    FAIL("an input line");
  const int64_t cols[] = {s->n_heads * s->head_dim, s->n_kv_heads * s->head_dim, s->n_kv_heads * s->head_dim};
  struct matrix qkv = test_matrix(DTYPE_BF16, s->seq_len, cols[0] + cols[1] + cols[2]);
  for (int64_t i = 0, at = 0; i < 3; at += cols[i++]) {
    struct matrix part = read_bf16(f, s->seq_len, cols[i]);
    for (int64_t t = 0; t < s->seq_len; t++)
      memcpy((uint16_t *)qkv.data + t * qkv.cols + at, (uint16_t *)part.data + t * cols[i], (size_t)cols[i] * 2);
    free(part.data);
  }
  g->payload.formats = (struct attention_formats){.qk = FORMAT_NVFP4, .pv = FORMAT_MXFP4};
  for (int i = 0; i < ATTENTION_VIEWS; i++) {
    const int64_t bytes = attention_view_bytes(&g->payload.formats, s, false, (enum attention_view)i);
    g->payload.view[i] = bytes > 0 ? test_memory((size_t)bytes) : NULL;
  }
  attention_publish(d, &g->payload, NULL, &qkv, s);
  g->a = attention_layout(s);
  free(qkv.data);
}

static void check_list(FILE *f, const float *values, int64_t n, double tolerance, const char *what) {
  for (int64_t i = 0; i < n; i++) {
    double expected;
    if (fscanf(f, "%lf", &expected) != 1) FAIL("the golden file ends early");
    if (!(fabs((double)values[i] - expected) <= tolerance * (1 + fabs(expected)))) FAIL("%s %" PRId64 ": %.9g, expected %.9g", what, i, (double)values[i], expected);
  }
}

static void golden_case(const struct golden *g, FILE *f, struct device *d) {
  const struct attention_shape *s = &g->s;
  const int64_t blocks = ceil_div(s->seq_len, 32);
  const struct attention_sources from = attention_sources(&g->a, NULL, &g->payload);
  struct direct_p rule;
  char name[16];
  int exponent;
  if (fscanf(f, "%15s %f %f %d %" SCNu32 " %" SCNd64 " %" SCNd32 " %" SCNd32, name, &rule.slope, &rule.offset, &exponent, &rule.native,
             &rule.anchor, &rule.margin, &rule.lift) != 8)
    FAIL("a case line");
  rule.exponent = (enum direct_p_exponent)exponent;
  CHECK(direct_p_refuse(&rule) == NULL);
  struct head x[8];
  for (int64_t i = 0; i < s->n_heads; i++) {
    x[i] = head_new(s->seq_len, s->seq_len, s->head_dim, 2);
    attention_load(x[i].q, &g->a, &from.q, 0, s->seq_len, s->seq_len, i);
    attention_load(x[i].k, &g->a, &from.k, 0, s->seq_len, s->seq_len, i / g->a.group);
    attention_load(x[i].v, &g->a, &from.v, 0, s->seq_len, s->seq_len, i / g->a.group);
    head_run(&x[i], &rule, d);
  }
  int64_t wrong = 0;
  unsigned byte;
  char digit;
  for (int64_t i = 0; i < s->n_heads * s->seq_len * blocks; i++)
    wrong += fscanf(f, "%2x", &byte) != 1 || byte != x[i / (s->seq_len * blocks)].p.scales[i % (s->seq_len * blocks)];
  CHECK_EQ_I64(wrong, 0);
  for (int64_t i = 0; i < s->n_heads * s->seq_len * s->seq_len; i++)
    wrong += fscanf(f, " %c", &digit) != 1 || digit - '0' != x[i / (s->seq_len * s->seq_len)].p.codes[i % (s->seq_len * s->seq_len)];
  CHECK_EQ_I64(wrong, 0);
  for (int64_t i = 0; i < s->n_heads; i++)
    for (int64_t t = 0; t < s->seq_len; t += 7) check_list(f, x[i].out + t * s->head_dim, s->head_dim, 2e-6, "out");
  /* With a guard log2 L is near -126 and cancels. */
  for (int64_t i = 0; i < s->n_heads; i++) check_list(f, x[i].lse, s->seq_len, rule.lift > 0 ? 2e-6 : 2e-7, "lse");

  /* The whole payload gives the same bits. */
  struct matrix out = test_matrix(DTYPE_F32, s->seq_len, s->n_heads * s->head_dim);
  float *lse = test_memory((size_t)(s->n_heads * s->seq_len) * sizeof *lse);
  void *scratch = aligned_alloc(64, (size_t)round_up(direct_p_bytes(s, 2), 64));
  if (!scratch) exit(1);
  cpu_direct_p(d, &out, lse, &g->payload, &rule, s, scratch);
  for (int64_t i = 0; i < s->n_heads; i++) {
    CHECK(same(lse + i * s->seq_len, x[i].lse, s->seq_len));
    for (int64_t t = 0; t < s->seq_len; t++)
      CHECK(same((const float *)out.data + t * out.cols + i * s->head_dim, x[i].out + t * s->head_dim, s->head_dim));
    head_free(&x[i]);
  }
  free(out.data), free(lse), free(scratch);
}

TEST(golden) {
  FILE *f = fopen("tests/golden/direct_p.txt", "r");
  CHECK(f != NULL);
  if (!f) return;
  struct device *d = device_new(2);
  struct golden g = {0};
  char word[8];
  int inputs = 0, cases = 0;
  while (fscanf(f, "%7s", word) == 1) {
    if (strcmp(word, "input") == 0) golden_input(&g, f, d), inputs++;
    else if (strcmp(word, "case") == 0) golden_case(&g, f, d), cases++;
    else break;
    if (test_failures_in_group > 8) break;
  }
  CHECK_EQ_I64(inputs, 2);
  CHECK_EQ_I64(cases, 7);
  golden_free(&g);
  test_device_close(d);
  fclose(f);
}

/* ---- where exponents end ---------------------------------------------------------------- */

/* A device that flushes. */
static float flushed(float x) { return fabsf(x) < FLT_MIN ? 0 : x; }

TEST(order_of_the_denominator) {
  for (uint32_t halves = 12; halves <= 384; halves++) { /* a code of 6 and more */
    const float c = (float)halves * 0.5f, scale = direct_p_scale(1);
    CHECK(flushed(flushed(scale / 6) * c) == 0); /* the trap */
    CHECK(flushed(scale * direct_p_sum(halves)) >= FLT_MIN);
    CHECK(direct_p_sum(halves) == c / 6);
  }
}

/* Two blocks with scores z and z + step (log2), the anchor at the first. */
static void two_blocks(struct head *x, float z, float step) {
  const float kappa = ATTENTION_LOG2_E;
  for (int64_t j = 0; j < x->h.keys; j++) x->k[j * x->h.ld] = (j < 32 ? z : z + step) / kappa, x->v[j * x->h.ld] = j < 32 ? 6 : 12;
  x->q[0] = 1;
}

TEST(extreme_logits) {
  struct device *d = device_new(1);
  const struct direct_p fast = direct_p_fast();
  struct direct_p guard = direct_p_accurate(), bare;
  struct head x = head_new(1, 64, 1, 1);
  two_blocks(&x, 0, 100.25f);
  head_run(&x, &fast, d);
  CHECK(isfinite(x.out[0]) && x.out[0] == 2); /* v is six times 1 and 2 */
  CHECK_CLOSE(x.lse[0], (100 + 5) * 0.693147, 0.3);
  two_blocks(&x, 0, 128.25f); /* a byte beyond 254: seen, not clipped */
  head_run(&x, &fast, d);
  CHECK(isnan(x.out[0]) && isnan(x.lse[0]) && x.p.scales[1] == 255);
  two_blocks(&x, 0, 125.25f); /* the numerator is finite, the denominator is not */
  for (int64_t j = 0; j < 64; j++) x.v[j] = 0x1p-20f;
  head_run(&x, &fast, d);
  CHECK(isnan(x.out[0]) && isnan(x.lse[0]) && x.p.scales[1] == 252);
  two_blocks(&x, -200, 0); /* all beneath: no mass at all */
  head_run(&x, &fast, d);
  CHECK(x.p.scales[0] == 0 && x.p.scales[1] == 0 && isnan(x.out[0]));

  guard.anchor = 1; /* row 0 */
  bare = guard;
  guard.margin = 110, guard.lift = 16;
  CHECK(direct_p_refuse(&guard) == NULL);
  two_blocks(&x, 1000, 236.25f);
  head_run(&x, &bare, d);
  CHECK(isnan(x.out[0]));
  head_run(&x, &guard, d);
  CHECK(x.out[0] == 2);
  CHECK_CLOSE(x.lse[0], (1236 + 5) * 0.693147, 0.3);
  two_blocks(&x, 1000, -300); /* the anchor's own block is at byte 1 and is the whole row */
  head_run(&x, &guard, d);
  CHECK(x.p.scales[0] == 1 && x.p.scales[1] == 1 && x.out[0] == 1);
  CHECK_CLOSE(x.lse[0], (1000 + 5) * 0.693147, 0.3);
  for (int64_t j = 32; j < 64; j++) CHECK(x.p.codes[j] == 0);
  two_blocks(&x, 1000, 238.25f); /* beyond the margin */
  head_run(&x, &guard, d);
  CHECK(isnan(x.out[0]));
  head_free(&x);
  test_device_close(d);
}

/* What the guard adds cancels, but in the normaliser's last bits. */
TEST(guard_cancels) {
  struct device *d = device_new(1);
  struct head x = head_new(9, 100, 32, 1), y = head_new(9, 100, 32, 1);
  fill(x.q, &x.h, 9, 1, 2), fill(x.k, &x.h, 100, 2, 2), fill(x.v, &x.h, 100, 3, 2);
  memcpy(y.q, x.q, (size_t)(9 * x.h.ld) * 4), memcpy(y.k, x.k, (size_t)(100 * x.h.ld) * 4), memcpy(y.v, x.v, (size_t)(100 * x.h.ld) * 4);
  struct direct_p rule = direct_p_accurate();
  head_run(&x, &rule, d);
  rule.margin = 32, rule.lift = 20; /* t loses bits to the margin, so a code may be another */
  head_run(&y, &rule, d);
  int64_t other = 0;
  for (int64_t i = 0; i < 9 * 100; i++) other += x.p.codes[i] != y.p.codes[i];
  CHECK(other <= 1);
  for (int64_t i = 0; i < 9 * 4; i++) CHECK_EQ_I64(x.p.scales[i], y.p.scales[i] + 32 + 20);
  for (int64_t i = 0; i < 9; i++) CHECK_CLOSE(y.lse[i], x.lse[i], 1e-3);
  for (int64_t i = 0; i < 9 * 32; i++) CHECK_CLOSE(y.out[i], x.out[i], 1e-2);
  head_free(&x), head_free(&y);
  test_device_close(d);
}

TEST(not_finite) {
  struct device *d = device_new(1);
  const struct direct_p rules[] = {direct_p_fast(), direct_p_accurate(), {1.5f, 1.2f, DIRECT_P_FLOOR, 0, 64, 110, 16}};
  static const float bad[] = {NAN, INFINITY, -INFINITY};
  for (int r = 0; r < 3; r++)
    for (int b = 0; b < 3; b++) {
      struct head x = head_new(4, 70, 16, 1);
      fill(x.q, &x.h, 4, 1, 2), fill(x.k, &x.h, 70, 2, 2), fill(x.v, &x.h, 70, 3, 2);
      x.q[2 * x.h.ld + 3] = bad[b];
      head_run(&x, &rules[r], d);
      for (int64_t i = 0; i < 4; i++)
        for (int64_t c = 0; c < 16; c++) CHECK(isfinite(x.out[i * 16 + c]) == (i != 2));
      CHECK(!isfinite(x.lse[2]));
      head_free(&x);
    }
  test_device_close(d);
}

TEST(refusals) {
  struct direct_p rule = direct_p_guarded();
  CHECK(direct_p_refuse(&rule) == NULL);
  rule = direct_p_fast();
  CHECK(direct_p_refuse(&rule) == NULL);
  rule.margin = 1;
  CHECK(direct_p_refuse(&rule) != NULL); /* no anchor */
  rule.anchor = 128, rule.margin = 112, rule.lift = 14;
  CHECK(direct_p_refuse(&rule) == NULL);
  rule.lift = 15;
  CHECK(direct_p_refuse(&rule) != NULL);
  rule = direct_p_fast();
  rule.slope = 0;
  CHECK(direct_p_refuse(&rule) != NULL);
  rule = direct_p_fast();
  rule.native = 0x10000;
  CHECK(direct_p_refuse(&rule) != NULL);
}

int main(void) {
  RUN(literal);
  RUN(golden);
  RUN(order_of_the_denominator);
  RUN(extreme_logits);
  RUN(guard_cancels);
  RUN(not_finite);
  RUN(refusals);
  return test_report();
}
