/* What attention in few bits promises, whatever the numbers: the same bits for any
 * threads and batches, no look ahead, nothing infinite hidden and nothing finite
 * lost, and what happens where a factor of the report is left out. */
#include "base/hash.h"
#include "tests/cpu_attention_case.h"

static const struct attention_formats
    training = {.qk = FORMAT_NVFP4, .pv = FORMAT_E4M3, .d_out = FORMAT_E5M2},
    control = {.qk = FORMAT_NVFP4, .pv = FORMAT_MXFP4, .d_out = FORMAT_E5M2},
    affine = {.qk = FORMAT_NVFP4, .pv = FORMAT_MXFP4, .d_out = FORMAT_E5M2, .p_slope = 1.5f, .p_offset = 1.2f},
    fp8 = {.qk = FORMAT_E4M3, .pv = FORMAT_E4M3, .d_out = FORMAT_E4M3},
    half = {.qk = FORMAT_NVFP4, .pv = FORMAT_E4M3, .d_out = FORMAT_BF16};

static struct attention_case *filled(struct attention_shape s, struct attention_formats f, int threads, double gradient) {
  struct attention_case *c = case_new(s, f, threads);
  case_fill(c, 0, gradient);
  return c;
}

static bool same_results(const struct attention_case *a, const struct attention_case *b) {
  bool same = test_same(&a->out, &b->out) && test_same(&a->d_qkv, &b->d_qkv) && a->max_logit == b->max_logit &&
              memcmp(a->lse, b->lse, (size_t)(case_tokens(a) * a->s.n_heads) * 4) == 0;
  for (int v = 0; v < ATTENTION_VIEWS; v++) {
    int64_t bytes = attention_view_bytes(&a->payload.formats, &a->s, true, (enum attention_view)v);
    if (bytes > 0) same = same && memcmp(a->payload.view[v], b->payload.view[v], (size_t)bytes) == 0;
  }
  for (int t = 0; t < ATTENTION_TENSORS; t++) {
    const struct quantise_counts *x = &a->counts[t], *y = &b->counts[t];
    same = same && x->elements == y->elements && x->underflowed == y->underflowed && x->saturated == y->saturated &&
           x->blocks == y->blocks && x->zero_blocks == y->zero_blocks && x->amax == y->amax;
  }
  return same;
}

/* |x| of columns [from, to). */
static double norm(const struct matrix *m, int64_t from, int64_t to) {
  double sum = 0;
  for (int64_t r = 0; r < m->rows; r++)
    for (int64_t i = from; i < to; i++) sum += test_get(m, r * m->cols + i) * test_get(m, r * m->cols + i);
  return sqrt(sum);
}

static double distance(const struct matrix *got, const struct matrix *expected) {
  double difference = 0, size = 0;
  for (int64_t i = 0; i < got->rows * got->cols; i++) {
    double e = test_get(expected, i), d = test_get(got, i) - e;
    difference += d * d;
    size += e * e;
  }
  return sqrt(difference / size);
}

static bool all_finite(const struct matrix *m) {
  for (int64_t i = 0; i < m->rows * m->cols; i++)
    if (!isfinite(test_get(m, i))) return false;
  return true;
}

/* Boundary (2) publishes what it has rotated and rounded. */
TEST(published_after_the_rotation) {
  struct attention_case *a = filled((struct attention_shape){2, 37, 4, 2, 32}, control, 2, 1), *b = filled(a->s, control, 1, 1);
  float table[37 * 32];
  for (int i = 0; i < 37 * 16; i++) table[2 * i] = 0.8f, table[2 * i + 1] = i % 2 ? 0.6f : -0.6f;
  cpu_rope_forward(case_device(a), &a->qkv, &a->payload, a->counts, table, &a->s);
  cpu_rope_forward(case_device(b), &b->qkv, NULL, NULL, table, &b->s);
  CHECK(test_same(&a->qkv, &b->qkv));
  attention_publish(case_device(b), &b->payload, b->counts, &b->qkv, &b->s);
  for (int v = 0; v < ATTENTION_VIEWS; v++) {
    int64_t bytes = attention_view_bytes(&control, &a->s, true, (enum attention_view)v);
    CHECK(bytes > 0 && memcmp(a->payload.view[v], b->payload.view[v], (size_t)bytes) == 0);
  }
  CHECK_EQ_I64(a->counts[ATTENTION_Q].elements, 2 * 2 * 37 * 128); /* both views */
  case_free(a);
  case_free(b);
}

/* One thread takes fused walks, three split ones. */
TEST(threads) {
  const struct attention_formats formats[] = {training, control, affine, fp8, half};
  for (int i = 0; i < 5; i++) {
    struct attention_case *one = filled((struct attention_shape){1, 300, 4, 1, 32}, formats[i], 1, 1);
    case_run(one);
    struct attention_case *many = filled(one->s, formats[i], 3, 1);
    case_run(many);
    CHECK(same_results(one, many));
    CHECK_EQ_I64(one->counts[ATTENTION_P].elements, 4 * 300 * 301 / 2);
    case_free(one);
    case_free(many);
  }
}

/* Any extents: the same bits for one thread and three, and near attention in BF16. */
TEST(random_shapes) {
  const struct attention_formats formats[] = {training, control, fp8, half};
  for (int64_t n = 0; n < 16; n++) {
    const double u[] = {test_uniform(91, 6 * n), test_uniform(91, 6 * n + 1), test_uniform(91, 6 * n + 2),
                        test_uniform(91, 6 * n + 3), test_uniform(91, 6 * n + 4)};
    struct attention_shape s = {1 + (int64_t)(u[0] * 3), 1 + (int64_t)(u[1] * 200), 0, 1 + (int64_t)(u[2] * 3), 16 * (1 + (int64_t)(u[3] * 6))};
    s.n_heads = s.n_kv_heads * (1 + (int64_t)(u[4] * 4));
    struct attention_case *one = filled(s, formats[n % 4], 1, 1), *three = filled(s, formats[n % 4], 3, 1);
    struct attention_case *exact = filled(s, (struct attention_formats){0}, 3, 1);
    case_run(one);
    case_run(three);
    case_run(exact);
    if (!same_results(one, three)) FAIL("case %d: threads", (int)n);
    double out = distance(&one->out, &exact->out), d_qkv = distance(&one->d_qkv, &exact->d_qkv);
    if (!(out < 0.25 && (d_qkv < 0.25 || s.seq_len < 16))) FAIL("case %d: out %g, d_qkv %g from BF16", (int)n, out, d_qkv);
    CHECK_EQ_I64(one->counts[ATTENTION_P].elements, s.batch * s.n_heads * s.seq_len * (s.seq_len + 1) / 2);
    case_free(one);
    case_free(three);
    case_free(exact);
  }
}

TEST(samples_are_independent) {
  const struct attention_formats formats[] = {training, control};
  for (int i = 0; i < 2; i++) {
    struct attention_shape s = {3, 75, 4, 2, 32};
    struct attention_case *all = filled(s, formats[i], 2, 1);
    case_run(all);
    s.batch = 1;
    for (int64_t b = 0; b < 3; b++) {
      struct attention_case *one = case_new(s, formats[i], 1);
      size_t wide = (size_t)(75 * one->qkv.cols) * 2, narrow = (size_t)(75 * one->out.cols) * 2;
      memcpy(one->qkv.data, (char *)all->qkv.data + (size_t)b * wide, wide);
      memcpy(one->d_out.data, (char *)all->d_out.data + (size_t)b * narrow, narrow);
      case_run(one);
      CHECK(!memcmp(one->out.data, (char *)all->out.data + (size_t)b * narrow, narrow));
      CHECK(!memcmp(one->d_qkv.data, (char *)all->d_qkv.data + (size_t)b * wide, wide));
      case_free(one);
    }
    case_free(all);
  }
}

/* A token's successors change nothing before it; in MXFP4 nothing before its block of 32, whose scales they share. */
TEST(causality) {
  const struct attention_formats formats[] = {training, control};
  const int64_t changed[] = {1, 31, 45, 128, 149};
  const double value[] = {3.0, NAN, INFINITY, -300.0, -INFINITY};
  for (int i = 0; i < 2; i++) {
    struct attention_case *a = filled((struct attention_shape){1, 150, 4, 2, 32}, formats[i], 1, 1);
    case_run(a);
    for (int n = 0; n < 5; n++) {
      struct attention_case *b = filled(a->s, formats[i], 1, 1);
      for (int64_t k = changed[n] * b->qkv.cols; k < (changed[n] + 1) * b->qkv.cols; k++) test_set(&b->qkv, k, value[n]);
      case_run(b);
      int64_t rows = i == 0 ? changed[n] : changed[n] / 32 * 32;
      CHECK(!memcmp(a->out.data, b->out.data, (size_t)(rows * a->out.cols) * 2));
      CHECK(memcmp(a->out.data, b->out.data, (size_t)(a->out.rows * a->out.cols) * 2));
      case_free(b);
    }
    case_free(a);
  }
}

/* Of Q, K, V and dO one element that is not finite: everything that reads it is
 * NaN or infinite, the other kv head is untouched. */
TEST(not_finite_is_seen) {
  const struct attention_formats formats[] = {training, control, fp8};
  const double value[] = {NAN, INFINITY, -INFINITY};
  struct attention_shape s = {1, 70, 2, 2, 32};
  for (int f = 0; f < 3; f++)
    for (int where = 0; where < 4; where++)
      for (int v = 0; v < 3; v++) {
        struct attention_case *c = filled(s, formats[f], 1, 1), *clean = filled(s, formats[f], 1, 1);
        case_run(clean);
        if (where < 3)
          test_set(&c->qkv, 40 * c->qkv.cols + where * 64 + 32 + 7, value[v]);
        else
          test_set(&c->d_out, 40 * c->d_out.cols + 32 + 7, value[v]);
        case_run(c);
        bool seen = !isfinite(test_get(&c->out, 40 * 64 + 32 + 7)), grads = false;
        for (int64_t i = 0; i < 32; i++) grads = grads || !isfinite(test_get(&c->d_qkv, 40 * c->qkv.cols + 64 * 2 + 32 + i));
        if (where < 3 && !seen) FAIL("formats %d, tensor %d, %g: out is finite", f, where, value[v]);
        if (where == 3 && c->coded) CHECK(isnan(c->gradient.lift[1]) && isfinite(c->gradient.lift[0]));
        if (where != 2 && !grads) FAIL("formats %d, tensor %d, %g: dV is finite", f, where, value[v]);
        for (int64_t r = 0; r < 70; r++)
          for (int64_t i = 0; i < 32; i++) {
            if (test_get(&c->out, r * 64 + i) != test_get(&clean->out, r * 64 + i)) FAIL("out %d of the other head", (int)r);
            for (int64_t t = 0; t < 3; t++) {
              int64_t at = r * c->qkv.cols + t * 64 + i;
              if (test_get(&c->d_qkv, at) != test_get(&clean->d_qkv, at)) FAIL("gradient %d of the other head", (int)r);
            }
          }
        case_free(c);
        case_free(clean);
      }
}

/* Scores of -10368, 0 and 10368 that every format holds exactly: a hard maximum,
 * so that out is a mean of V, and nothing that is not finite. */
TEST(large_logits) {
  const struct attention_formats formats[] = {training, control, affine, fp8, half};
  for (int f = 0; f < 5; f++) {
    struct attention_case *c = filled((struct attention_shape){1, 140, 1, 1, 64}, formats[f], 1, 1);
    for (int64_t r = 0; r < 140; r++)
      for (int64_t i = 0; i < 64; i++) {
        test_set(&c->qkv, r * 192 + i, 36);
        test_set(&c->qkv, r * 192 + 64 + i, 36.0 * (double)(r % 3 - 1));
        test_set(&c->qkv, r * 192 + 128 + i, (double)(r % 8));
      }
    case_run(c);
    CHECK(all_finite(&c->out) && all_finite(&c->d_qkv));
    CHECK_CLOSE(c->max_logit, 10368, 0);
    double sum = 0, count = 0;
    for (int64_t r = 0; r < 140; r++) {
      if (r % 3 == 2) sum += (double)(r % 8), count++;
      double mean = r == 0 ? 0 : r == 1 ? 1 : sum / count;
      CHECK_CLOSE(test_get(&c->out, r * 64 + 5), mean, formats[f].pv == FORMAT_MXFP4 ? 0.5 : 0.02);
      CHECK_CLOSE(c->lse[r], r == 0 ? -10368 : r == 1 ? 0 : 10368 + log(count), 2e-3);
    }
    case_free(c);
  }
}

/* Scores so large that FP32 no longer holds log2 of P to a whole number: a row is a mean of V or
 * not finite, never the 0 that codes which end divided by a sum which does not would be. */
TEST(scores_beyond_precision) {
  const struct attention_formats formats[] = {{.pv = FORMAT_E4M3}, {.pv = FORMAT_MXFP4}, {.qk = FORMAT_E4M3, .pv = FORMAT_E4M3}, training, control, {0}};
  for (int f = 0; f < 6; f++)
    for (double size = 1e3; size < 1e17; size *= 7) {
      struct attention_case *c = filled((struct attention_shape){1, 150, 2, 1, 32}, formats[f], 1, 1);
      int64_t cols = c->qkv.cols, wild = 0;
      for (int64_t i = 0; i < 150 * cols; i++)
        test_set(&c->qkv, i, i % cols < 96 ? size * test_get(&c->qkv, i) : 3 + 0.25 * (double)(i % 3));
      case_forward(c);
      for (int64_t i = 0; i < 150 * 64; i++) {
        double x = test_get(&c->out, i);
        wild += !isfinite(x);
        if (isfinite(x) && !(x > 2.4 && x < 4.2)) FAIL("formats %d, Q and K of %g: row %d has %g", f, size, (int)(i / 64), x);
      }
      if (size < 5e3) CHECK_EQ_I64(wild, 0);
      case_free(c);
    }
}

/* One token is its own value; one block of zeros is zero; zero dO is no gradient. */
TEST(smallest) {
  const struct attention_formats formats[] = {training, control, fp8, half};
  for (int f = 0; f < 4; f++) {
    struct attention_case *c = filled((struct attention_shape){2, 1, 4, 2, 16}, formats[f], 1, 0);
    for (int64_t i = 0; i < 2 * c->qkv.cols; i++) test_set(&c->qkv, i, i % c->qkv.cols >= 6 * 16 ? 2.0 : 0.001);
    case_run(c);
    for (int64_t i = 0; i < 2 * 64; i++) CHECK_CLOSE(test_get(&c->out, i), 2, 0);
    for (int64_t i = 0; i < 2 * c->qkv.cols; i++) CHECK(test_get(&c->d_qkv, i) == 0);
    for (int64_t i = 0; i < 8; i++) CHECK_CLOSE(c->lse[i], 0, 1e-4);
    if (f < 2) CHECK_EQ_I64(c->counts[ATTENTION_Q].zero_blocks, 2 * 4);
    case_free(c);
  }
}

/* d_qkv is the true gradient at any magnitude of dO: it scales with it by powers of
 * two, bit for bit, where nothing of P and dS ends. */
TEST(lift_follows) {
  struct attention_shape s = {1, 90, 2, 1, 32};
  struct attention_case *unit = filled(s, training, 1, 1);
  case_run(unit);
  for (int e = -60; e <= 40; e += 20) {
    struct attention_case *c = filled(s, training, 1, ldexp(1, e));
    case_run(c);
    for (int64_t i = 0; i < c->d_qkv.rows * c->d_qkv.cols; i++)
      if (test_get(&c->d_qkv, i) != ldexp(test_get(&unit->d_qkv, i), e)) {
        FAIL("2^%d: element %d", e, (int)i);
        break;
      }
    CHECK_EQ_I64(c->counts[ATTENTION_DS].underflowed, unit->counts[ATTENTION_DS].underflowed);
    case_free(c);
  }
  struct attention_formats given = training;
  given.d_out_lift = 1;
  struct attention_case *dead = filled(s, given, 1, 1e-5); /* the report's constant: dV lives, dS hardly */
  case_run(dead);
  CHECK(norm(&dead->d_qkv, 0, 96) < 0.7e-5 * norm(&unit->d_qkv, 0, 96));
  CHECK(norm(&dead->d_qkv, 96, 128) > 0.9e-5 * norm(&unit->d_qkv, 96, 128));
  CHECK(dead->counts[ATTENTION_DS].underflowed > dead->counts[ATTENTION_DS].elements * 9 / 10);
  case_free(dead);
  case_free(unit);
}

/* The lift ends at 2^-100 and 2^100: what lies beyond saturates or vanishes, and is counted. */
TEST(lift_ends) {
  struct attention_shape s = {1, 40, 2, 1, 32};
  struct attention_case *large = filled(s, training, 1, 0x1p120), *small = filled(s, training, 1, 0x1p-124);
  case_run(large);
  case_run(small);
  CHECK(large->gradient.lift[0] == 0x1p-100f && small->gradient.lift[0] == 0x1p100f);
  CHECK(all_finite(&large->d_qkv) && all_finite(&small->d_qkv));
  CHECK(large->counts[ATTENTION_DO].saturated > large->counts[ATTENTION_DO].elements * 9 / 10);
  CHECK(small->counts[ATTENTION_DO].underflowed > small->counts[ATTENTION_DO].elements * 9 / 10); /* some were 0 before */
  CHECK(norm(&small->d_qkv, 0, 128) == 0);
  case_free(large);
  case_free(small);
}

/* Without 8 in l_stat P is 1/256 of itself, and with it every gradient: finite and
 * wrong.  Without 1/256 at the end they are 256 times. */
TEST(the_two_factors_of_256) {
  struct attention_case *right = filled((struct attention_shape){1, 128, 4, 1, 64}, training, 1, 1);
  case_run(right);
  struct attention_case *wrong = filled(right->s, training, 1, 1);
  case_forward(wrong);
  case_gradient(wrong);
  for (int64_t i = 0; i < 4 * 128; i++) wrong->gradient.l_stat[i] -= 8.0f;
  case_backward(wrong);
  CHECK(all_finite(&wrong->d_qkv));
  CHECK_CLOSE(norm(&wrong->d_qkv, 0, 384) / norm(&right->d_qkv, 0, 384) * 256, 1, 0.1);
  case_gradient(wrong);
  for (int64_t i = 0; i < wrong->s.n_kv_heads; i++) wrong->gradient.lift[i] /= 256.0f;
  case_backward(wrong);
  CHECK_CLOSE(norm(&wrong->d_qkv, 0, 384) / norm(&right->d_qkv, 0, 384) / 256, 1, 1e-6);
  case_free(right);
  case_free(wrong);
}

/* dO near 1e-5 and no lift beyond 4: of E5M2's codes about a seventh are zero, of
 * E4M3's nearly all (the report measured 14.4 % and 97.1 %). */
TEST(zeros_of_d_out) {
  const enum format format[] = {FORMAT_E5M2, FORMAT_E4M3};
  double zeros[2];
  for (int i = 0; i < 2; i++) {
    struct attention_formats f = {.qk = FORMAT_NVFP4, .pv = FORMAT_E4M3, .d_out = format[i], .d_out_lift = 1};
    struct attention_case *c = filled((struct attention_shape){1, 128, 4, 1, 64}, f, 1, 1e-5);
    for (int64_t r = 0; r < 128; r += 32) /* a few tokens with a hundred times the rest */
      for (int64_t k = 0; k < 256; k++) test_set(&c->d_out, r * 256 + k, 100 * test_get(&c->d_out, r * 256 + k));
    case_run(c);
    zeros[i] = (double)c->counts[ATTENTION_DO].underflowed / (double)c->counts[ATTENTION_DO].elements;
    case_free(c);
  }
  printf("# zeros of dO: e5m2 %.1f %%, e4m3 %.1f %%\n", 100 * zeros[0], 100 * zeros[1]);
  CHECK_CLOSE(zeros[0], 0.144, 0.02);
  CHECK(zeros[1] > 0.96);
}

/* Distance from exact attention, standard normal inputs: the published order of the formats. */
TEST(order_of_formats) {
  struct attention_shape s = {1, 256, 4, 1, 128};
  const struct attention_formats formats[] = {{0}, {.pv = FORMAT_E4M3}, {.pv = FORMAT_MXFP4}, half, control, affine};
  double error[6];
  struct attention_case *exact = NULL;
  for (int i = 0; i < 6; i++) {
    struct attention_case *c = filled(s, formats[i], 2, 1);
    case_forward(c);
    if (i == 0) exact = c;
    error[i] = distance(&c->out, &exact->out);
    if (i > 0) case_free(c);
  }
  case_free(exact);
  printf("# bf16/e4m3 %.4f, bf16/mxfp4 %.4f, nvfp4/e4m3 %.4f, nvfp4/mxfp4 %.4f, affine %.4f\n", error[1], error[2], error[3],
         error[4], error[5]);
  CHECK(error[1] > 0.02 && error[1] < 0.045);
  CHECK(error[2] > 0.11 && error[2] < 0.17);
  CHECK(error[3] > 0.09 && error[3] < 0.14);
  CHECK(error[4] > error[3] && error[4] < 0.22);
  CHECK(error[5] > error[4] && error[5] < 0.36);
}

TEST(round_is_decode_of_encode) {
  for (int64_t i = 0; i <= UINT32_MAX; i += 4099) {
    float x = f32_from_bits((uint32_t)i), a = e4m3_decode(e4m3_encode(x)), b = e4m3_round(x);
    if (isnan(x) ? !isnan(b) : f32_bits(a) != f32_bits(b)) FAIL("%a: %a, not %a", (double)x, (double)b, (double)a);
  }
  for (uint32_t code = 0; code < 0x7E; code++) { /* ties and their neighbours */
    float middle = (e4m3_decode(code) + e4m3_decode(code + 1)) / 2;
    for (int n = -1; n <= 1; n++) {
      float x = f32_from_bits(f32_bits(middle) + (uint32_t)n);
      CHECK(e4m3_round(x) == e4m3_decode(e4m3_encode(x)) && e4m3_round(-x) == -e4m3_round(x));
    }
  }
}

TEST(refusals) {
  const struct attention_shape even = {1, 8, 2, 1, 32}, odd = {1, 8, 2, 1, 24};
  struct attention_formats f = control;
  CHECK(!cpu_refuse_attention(NULL, &f, ATTENTION_PART_QK, &even) && !cpu_refuse_attention(NULL, &f, ATTENTION_PART_PV, &even));
  CHECK(!cpu_refuse_attention(NULL, &f, ATTENTION_PART_D_OUT, &odd));
  CHECK(strstr(cpu_refuse_attention(NULL, &f, ATTENTION_PART_QK, &odd), "head_dim") != NULL);
  CHECK(strstr(cpu_refuse_attention(NULL, &f, ATTENTION_PART_PV, &odd), "head_dim") != NULL);
  f = fp8;
  CHECK(!cpu_refuse_attention(NULL, &f, ATTENTION_PART_QK, &odd) && !cpu_refuse_attention(NULL, &f, ATTENTION_PART_PV, &odd));
  f.qk = FORMAT_MXFP4, f.pv = FORMAT_NVFP4, f.d_out = FORMAT_NVFP4;
  for (int part = 0; part < ATTENTION_PARTS; part++) CHECK(cpu_refuse_attention(NULL, &f, (enum attention_part)part, &even) != NULL);
  f = affine;
  f.p_offset = F32_NAN;
  CHECK(cpu_refuse_attention(NULL, &f, ATTENTION_PART_PV, &even) != NULL);
  const float lifts[] = {3.0f, -2.0f, 0x1p-101f, F32_INFINITY, F32_NAN};
  for (int i = 0; i < 5; i++) {
    f.d_out_lift = lifts[i];
    CHECK(cpu_refuse_attention(NULL, &f, ATTENTION_PART_D_OUT, &even) != NULL);
  }
  f.d_out_lift = 0x1p16f;
  CHECK(!cpu_refuse_attention(NULL, &f, ATTENTION_PART_D_OUT, &even));
}

/* One bit pattern on every machine and instruction set. */
TEST(fixed_bits) {
  const struct {
    struct attention_formats f;
    const char *expected;
  } row[] = {{training, "6c549556712559dfe74aaa2aacd4b10d"},
             {control, "7d9da4fb780477cefbb03c58daa2fde4"},
             {affine, "860aa07c8ac4ff4ad40de2769db6336f"},
             {fp8, "4c1c7b982ac35ce8cd85da6b78e64f68"},
             {half, "084998a5aafa38d9767e0feb15be4da2"}};
  for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
    struct attention_case *c = filled((struct attention_shape){2, 150, 4, 2, 48}, row[i].f, 2, 1e-4);
    case_run(c);
    struct hash h = hash_bytes(c->out.data, (size_t)(c->out.rows * c->out.cols) * 2);
    h = hash_sum(h, hash_bytes(c->d_qkv.data, (size_t)(c->d_qkv.rows * c->d_qkv.cols) * 2));
    h = hash_sum(h, hash_bytes(c->lse, (size_t)(case_tokens(c) * 4) * 4));
    char text[HASH_TEXT];
    hash_text(h, text);
    CHECK_STR(text, row[i].expected);
    case_free(c);
  }
}

int main(void) {
  RUN(published_after_the_rotation);
  RUN(threads);
  RUN(random_shapes);
  RUN(samples_are_independent);
  RUN(causality);
  RUN(not_finite_is_seen);
  RUN(large_logits);
  RUN(scores_beyond_precision);
  RUN(smallest);
  RUN(lift_follows);
  RUN(lift_ends);
  RUN(the_two_factors_of_256);
  RUN(zeros_of_d_out);
  RUN(order_of_formats);
  RUN(round_is_decode_of_encode);
  RUN(refusals);
  RUN(fixed_bits);
  return test_report();
}
