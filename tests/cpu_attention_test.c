/* Attention of the CPU backend against a literal implementation in double. */
#include "base/hash.h"
#include "tests/cpu_attention_problem.h"

TEST(against_double) {
  const struct attention_shape shape[] = {
      {3, 1, 4, 4, 32},  {3, 2, 4, 1, 32},   {2, 17, 8, 1, 64}, {1, 63, 4, 1, 128}, {1, 127, 2, 2, 80},
      {1, 128, 4, 1, 32}, {1, 129, 2, 1, 64}, {3, 33, 8, 2, 32}, {1, 200, 4, 1, 64}, {1, 257, 1, 1, 32},
      {1, 31, 2, 1, 2},  {1, 40, 2, 2, 6},   {1, 37, 1, 1, 256}, {2, 65, 6, 2, 10}};
  for (size_t i = 0; i < sizeof shape / sizeof *shape; i++)
    for (int type = DTYPE_F32; type <= DTYPE_BF16; type++) {
      struct problem p = problem_new((enum dtype)type, shape[i], 2.5f);
      run(&p, 1);
      compare(&p, type == DTYPE_F32 ? 1e-5 : 2e-2, 1e-5);
      problem_free(&p);
    }
}

/* The gradient of sum(d_out * out) by differences of the literal forward. */
TEST(finite_differences) {
  struct problem p = problem_new(DTYPE_F32, (struct attention_shape){2, 19, 4, 2, 8}, 2.0f);
  run(&p, 1);
  struct literal x = literal_of(&p);
  double h = 1e-5;
  for (int64_t n = 0; n < 60; n++) {
    int64_t i = n * 7919 % elements(&p.qkv);
    double value[2], keep = x.qkv[i];
    for (int side = 0; side < 2; side++) {
      x.qkv[i] = keep + (side ? h : -h);
      literal_forward(&p.s, NULL, x.qkv, x.out, x.lse, &x.max_logit);
      value[side] = 0;
      for (int64_t k = 0; k < elements(&p.out); k++) value[side] += x.d_out[k] * x.out[k];
    }
    x.qkv[i] = keep;
    CHECK_CLOSE(at(&p.d_qkv, i), (value[1] - value[0]) / (2 * h), 2e-5);
  }
  literal_free(&x);
  problem_free(&p);
}

/* One thread is fused, two and three are split in the first shape. */
TEST(threads) {
  const struct attention_shape shape[] = {{1, 300, 4, 1, 32}, {2, 150, 6, 3, 64}, {1, 129, 1, 1, 80}};
  for (int i = 0; i < 3; i++) {
    struct problem one = problem_new(DTYPE_F32, shape[i], 2.0f);
    run(&one, 1);
    for (int threads = 2; threads <= 3; threads++) {
      struct problem many = problem_new(DTYPE_F32, shape[i], 2.0f);
      run(&many, threads);
      CHECK(same_bits(&one, &many));
      problem_free(&many);
    }
    problem_free(&one);
  }
}

/* Scratch sized for the largest extents serves smaller ones, whichever of the
 * two is fused and which is split: same bits. */
TEST(smaller_than_extent) {
  static const struct attention_shape pairs[][2] = {{{3, 140, 2, 1, 16}, {4, 160, 2, 1, 16}},
                                                    {{1, 40, 2, 1, 8}, {4, 40, 2, 1, 8}},
                                                    {{1, 200, 3, 1, 6}, {2, 200, 3, 1, 6}},
                                                    {{2, 33, 8, 1, 4}, {3, 127, 8, 1, 4}},
                                                    {{2, 129, 2, 2, 10}, {5, 129, 2, 2, 10}}};
  for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
    for (int threads = 1; threads <= 4; threads++) {
      struct problem a = problem_new(DTYPE_BF16, pairs[i][0], 2.0f), b = problem_new(DTYPE_BF16, pairs[i][0], 2.0f);
      run(&a, threads);
      run_sized(&b, threads, pairs[i][1]);
      CHECK(same_bits(&a, &b));
      problem_free(&a);
      problem_free(&b);
    }
}

/* Sequences of many tiles, heads of any even and odd width, groups of any size. */
TEST(large_shapes) {
  for (int i = 0; i < 12; i++) {
    struct attention_shape s = {.seq_len = i % 2 ? test_size(43, i, 900) : 300 + (int64_t)(test_uniform(42, i) * 600)};
    int64_t room = 1200000 / (s.seq_len * s.seq_len); /* batch * n_heads * head_dim */
    s.head_dim = test_size(44, i, room < 256 ? room : 256), room /= s.head_dim;
    s.n_kv_heads = test_size(45, i, room < 3 ? room : 3), room /= s.n_kv_heads;
    s.n_heads = s.n_kv_heads * test_size(46, i, room < 7 ? room : 7), room /= s.n_heads / s.n_kv_heads;
    s.batch = test_size(47, i, room < 3 ? room : 3);
    if (s.seq_len < 2) s.seq_len = 2;
    enum dtype type = test_types[i / 2 % 2];
    struct problem one = problem_new(type, s, 2.0f), many = problem_new(type, s, 2.0f);
    run(&one, 1);
    compare(&one, type == DTYPE_F32 ? 1e-5 : 2e-2, 1e-5);
    run(&many, 2 + i % 2);
    CHECK(same_bits(&one, &many));
    problem_free(&one);
    problem_free(&many);
  }
}

/* Each sample of a batch is what it is alone. */
TEST(samples_are_independent) {
  struct attention_shape s = {3, 70, 4, 2, 32};
  struct problem all = problem_new(DTYPE_F32, s, 2.0f);
  run(&all, 1);
  s.batch = 1;
  for (int64_t b = 0; b < 3; b++) {
    struct problem one = problem_new(DTYPE_F32, s, 2.0f);
    size_t wide = (size_t)elements(&one.qkv) * 4, narrow = (size_t)elements(&one.out) * 4;
    memcpy(one.qkv.data, (char *)all.qkv.data + (size_t)b * wide, wide);
    memcpy(one.d_out.data, (char *)all.d_out.data + (size_t)b * narrow, narrow);
    run(&one, 1);
    CHECK(!memcmp(one.out.data, (char *)all.out.data + (size_t)b * narrow, narrow));
    CHECK(!memcmp(one.d_qkv.data, (char *)all.d_qkv.data + (size_t)b * wide, wide));
    CHECK(!memcmp(one.lse, all.lse + b * 70 * 4, 70 * 4 * 4));
    problem_free(&one);
  }
  problem_free(&all);
}

/* Whatever token t becomes, nothing before it changes by a bit; and d_out of
 * tokens before t gives t and later ones no gradient. */
TEST(causality) {
  struct attention_shape s = {1, 150, 4, 2, 32};
  const int64_t changed[] = {1, 8, 31, 32, 45, 127, 128, 149};
  const float value[] = {3.0f, NAN, INFINITY, -INFINITY};
  struct problem a = problem_new(DTYPE_F32, s, 2.0f);
  run(&a, 1);
  for (size_t n = 0; n < sizeof changed / sizeof *changed; n++) {
    int64_t t = changed[n];
    struct problem b = problem_new(DTYPE_F32, s, 2.0f), c = problem_new(DTYPE_F32, s, 2.0f);
    for (int64_t i = t * b.qkv.cols; i < (t + 1) * b.qkv.cols; i++) {
      float x = value[n % 4];
      cpu_store(&b.qkv, i, &x, 1);
    }
    run(&b, 1);
    CHECK(!memcmp(a.out.data, b.out.data, (size_t)(t * a.out.cols) * 4));
    CHECK(memcmp(a.out.data, b.out.data, (size_t)elements(&a.out) * 4));
    for (int64_t h = 0; h < s.n_heads; h++) CHECK(!memcmp(a.lse + h * 150, b.lse + h * 150, (size_t)t * 4));
    memset((char *)c.d_out.data + t * c.d_out.cols * 4, 0, (size_t)((150 - t) * c.d_out.cols) * 4);
    run(&c, 1);
    bool zero = true;
    for (int64_t i = t * c.qkv.cols; i < elements(&c.qkv); i++) zero = zero && at(&c.d_qkv, i) == 0.0f;
    CHECK(zero);
    problem_free(&b);
    problem_free(&c);
  }
  problem_free(&a);
}

/* A NaN reaches the outputs of its own and later queries of its group, no others. */
TEST(nan_propagates) {
  struct attention_shape s = {2, 140, 4, 2, 32};
  struct problem p = problem_new(DTYPE_BF16, s, 2.0f);
  set(&p.qkv, 50, 4 * 32 + 32 + 5, NAN); /* k of kv head 1, token 50 of sample 0 */
  run(&p, 2);
  for (int64_t r = 0; r < p.out.rows; r++)
    for (int64_t c = 0; c < p.out.cols; c++) {
      bool expected = r >= 50 && r < 140 && c >= 2 * 32;
      if (isnan(at(&p.out, r * p.out.cols + c)) != expected) FAIL("row %d col %d: NaN is not as expected", (int)r, (int)c);
    }
  CHECK(isnan(at(&p.d_qkv, 50 * p.qkv.cols + 4 * 32 + 32)));
  CHECK(!isnan(at(&p.d_qkv, 139 * p.qkv.cols)));
  problem_free(&p);
  /* a key of -inf weighs nothing */
  p = problem_new(DTYPE_F32, (struct attention_shape){1, 9, 1, 1, 2}, 1.0f);
  for (int64_t r = 0; r < 9; r++) {
    set(&p.qkv, r, 0, 1.0f);
    set(&p.qkv, r, 1, 1.0f);
    set(&p.qkv, r, 2, r < 8 ? -INFINITY : 0.5f);
  }
  run(&p, 1);
  CHECK(isnan(at(&p.out, 0)));
  CHECK(at(&p.out, 16) == at(&p.qkv, 8 * 6 + 4));
  problem_free(&p);
}

/* Scores up to +-1e4 that are exact in FP32. */
TEST(large_logits) {
  struct problem p = problem_new(DTYPE_F32, (struct attention_shape){1, 140, 2, 1, 64}, 1.0f);
  for (int64_t r = 0; r < 140; r++)
    for (int64_t c = 0; c < 3 * 64; c++) {
      float x = at(&p.qkv, r * p.qkv.cols + c);
      set(&p.qkv, r, c, rintf(x * 90.0f));
    }
  run(&p, 1);
  CHECK(p.max_logit > 5e3f);
  struct literal x = literal_of(&p);
  CHECK(distance(&p.out, x.out, 0, p.out.cols) < 1e-5);
  for (int64_t i = 0; i < 280; i++) CHECK_CLOSE(p.lse[i], x.lse[i], 2e-7 * (1 + fabs(x.lse[i])));
  for (int64_t i = 0; i < elements(&p.d_qkv); i++) CHECK(isfinite(at(&p.d_qkv, i)));
  literal_free(&x);
  problem_free(&p);
}

TEST(max_logit_only_grows) {
  struct problem p = problem_new(DTYPE_F32, (struct attention_shape){1, 5, 1, 1, 4}, 1.0f);
  p.max_logit = 1e6f;
  run(&p, 1);
  CHECK(p.max_logit == 1e6f);
  problem_free(&p);
}

/* One bit pattern on every machine and instruction set. */
TEST(fixed_bits) {
  const char *expected[] = {"ac68c72336c6639651e3fd297b6e1f3b", "ec946b9b73eb65669ab758293546f654"};
  for (int type = DTYPE_F32; type <= DTYPE_BF16; type++) {
    struct problem p = problem_new((enum dtype)type, (struct attention_shape){2, 150, 4, 2, 40}, 3.0f);
    run(&p, 2);
    struct hash h = hash_bytes(p.out.data, (size_t)elements(&p.out) * dtype_bytes(p.out.dtype));
    h = hash_sum(h, hash_bytes(p.d_qkv.data, (size_t)elements(&p.d_qkv) * dtype_bytes(p.d_qkv.dtype)));
    h = hash_sum(h, hash_bytes(p.lse, (size_t)(tokens(&p) * p.s.n_heads) * 4));
    char text[HASH_TEXT];
    hash_text(h, text);
    CHECK_STR(text, expected[type - DTYPE_F32]);
    problem_free(&p);
  }
}

int main(void) {
  RUN(against_double);
  RUN(finite_differences);
  RUN(threads);
  RUN(smaller_than_extent);
  RUN(large_shapes);
  RUN(samples_are_independent);
  RUN(causality);
  RUN(nan_propagates);
  RUN(large_logits);
  RUN(max_logit_only_grows);
  RUN(fixed_bits);
  return test_report();
}
