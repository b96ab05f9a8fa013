/* Tensors of more than 2^31 elements on a GPU: zeros, and numbers in their last rows, which
 * must become what the CPU makes of these rows alone.  Needs some 60 GB of device memory,
 * so `make check-gpu` alone has it. */
#include "tests/cuda_twin.h"

enum { FAR = 2 }; /* rows with numbers */

static struct extent extents() {
  struct extent x = {};
  x.tokens = 524290, x.head_chunk = 16800, x.attention = {43, 8192, 32, 8, 128}, x.hidden_size = 4096, x.ffn_size = 2048, x.vocab_size = 128256, x.attention_backward = DTYPE_BF16;
  return x;
}

/* A device matrix of zeros whose last rows are those of `last`. */
static struct matrix large(int64_t rows, const struct matrix *last) {
  struct error e = {};
  struct matrix m = {NULL, last->dtype, rows, last->cols};
  m.data = rig.gpu->k->allocate(rig.gpu, rig_bytes(&m), &e);
  if (!m.data) rig_end(&e);
  rig.gpu->k->clear(rig.gpu, m.data, rig_bytes(&m));
  rig.gpu->k->upload(rig.gpu, static_cast<char *>(m.data) + rig_bytes(&m) - rig_bytes(last), last->data, rig_bytes(last));
  rig_synchronize(&rig);
  CHECK(rows * last->cols > INT64_C(1) << 31);
  return m;
}
static struct matrix large_zeros(enum dtype t, int64_t rows, int64_t cols) {
  struct matrix none = rig_matrix(t, FAR, cols);
  memset(none.data, 0, rig_bytes(&none));
  const struct matrix m = large(rows, &none);
  free(none.data);
  return m;
}

/* The device matrix' last rows are the host's. */
static void check_last(const char *what, const struct matrix *device, const struct matrix *want) {
  struct matrix got = rig_matrix(want->dtype, want->rows, want->cols);
  rig_get(&rig, got.data, static_cast<const char *>(device->data) + rig_bytes(device) - rig_bytes(want), rig_bytes(want));
  rig_same(what, &got, want);
  free(got.data);
}

static const int64_t ROWS = 524290, COLS = 4096; /* 2^31 + 8192 */

TEST(norm) {
  struct matrix residual = rig_random(DTYPE_BF16, FAR, COLS, 1, 1.0), delta = rig_random(DTYPE_BF16, FAR, COLS, 2, 1.0), gain = rig_random(DTYPE_BF16, 1, COLS, 3, 1.0);
  struct matrix sum = rig_matrix(DTYPE_BF16, FAR, COLS), normed = rig_matrix(DTYPE_BF16, FAR, COLS);
  float rstd[FAR];
  struct emission out = {};
  out.plain = &normed;
  rig.cpu->k->add_rmsnorm_forward(rig.cpu, &out, &sum, rstd, &residual, &delta, &gain, 1e-5f);
  struct matrix d_residual = large(ROWS, &residual), d_delta = large(ROWS, &delta), d_gain = rig_matrix_put(&rig, &gain);
  struct matrix d_sum = large_zeros(DTYPE_BF16, ROWS, COLS), d_normed = large_zeros(DTYPE_BF16, ROWS, COLS);
  float *d_rstd = static_cast<float *>(rig_put(&rig, NULL, (size_t)ROWS * sizeof(float)));
  out.plain = &d_normed;
  rig.gpu->k->add_rmsnorm_forward(rig.gpu, &out, &d_sum, d_rstd, &d_residual, &d_delta, &d_gain, 1e-5f);
  rig_synchronize(&rig);
  check_last("residual_out", &d_sum, &sum);
  check_last("normed", &d_normed, &normed);
  for (void *p : {d_residual.data, d_delta.data, d_gain.data, d_sum.data, d_normed.data, static_cast<void *>(d_rstd)}) rig_drop(&rig, p);
  for (void *p : {residual.data, delta.data, gain.data, sum.data, normed.data}) free(p);
}

TEST(gate) {
  struct matrix x = rig_random(DTYPE_BF16, FAR, COLS, 4, 3.0), y = rig_matrix(DTYPE_BF16, FAR, COLS / 2);
  struct emission out = {};
  out.plain = &y;
  rig.cpu->k->swiglu_forward(rig.cpu, &out, &x);
  struct matrix dx = large(2 * ROWS, &x), dy = large_zeros(DTYPE_BF16, 2 * ROWS, COLS / 2);
  out.plain = &dy;
  rig.gpu->k->swiglu_forward(rig.gpu, &out, &dx);
  rig_synchronize(&rig);
  check_last("act", &dy, &y);
  for (void *p : {dx.data, dy.data}) rig_drop(&rig, p);
  for (void *p : {x.data, y.data}) free(p);
}

TEST(embedding) {
  struct matrix table = rig_random(DTYPE_BF16, FAR, COLS, 5, 1.0), dx = rig_random(DTYPE_BF16, FAR, COLS, 6, 1.0);
  const int32_t tokens[FAR] = {(int32_t)ROWS - 1, (int32_t)ROWS - 2};
  struct matrix d_table = large(ROWS, &table), x = rig_matrix(DTYPE_BF16, FAR, COLS), d_x = rig_matrix_put(&rig, &x);
  int32_t *d_tokens = static_cast<int32_t *>(rig_put(&rig, tokens, sizeof tokens));
  rig.gpu->k->embedding_forward(rig.gpu, &d_x, &d_table, d_tokens);
  struct matrix got = rig_matrix_get(&rig, &d_x);
  for (int r = 0; r < FAR; r++) memcpy(static_cast<char *>(x.data) + r * COLS * 2, static_cast<char *>(table.data) + (1 - r) * COLS * 2, (size_t)COLS * 2);
  rig_same("x", &got, &x);
  struct matrix gradient = large_zeros(DTYPE_BF16, ROWS, COLS), want = rig_matrix(DTYPE_BF16, FAR, COLS);
  rig.gpu->k->upload(rig.gpu, d_x.data, dx.data, rig_bytes(&dx));
  rig.gpu->k->embedding_backward(rig.gpu, &gradient, &d_x, d_tokens);
  rig_synchronize(&rig);
  for (int r = 0; r < FAR; r++) memcpy(static_cast<char *>(want.data) + r * COLS * 2, static_cast<char *>(dx.data) + (1 - r) * COLS * 2, (size_t)COLS * 2);
  check_last("d_table", &gradient, &want);
  for (void *p : {d_table.data, d_x.data, gradient.data, static_cast<void *>(d_tokens)}) rig_drop(&rig, p);
  for (void *p : {table.data, dx.data, x.data, got.data, want.data}) free(p);
}

/* A flat tensor: its last elements draw, and are measured, by their place in it. */
TEST(adamw_and_measure) {
  const int64_t n = (INT64_C(1) << 31) + 8, last = 1000;
  struct matrix host[4] = {rig_random(DTYPE_BF16, 1, last, 7, 0.5), rig_random(DTYPE_F32, 1, last, 8, 0.01), rig_random(DTYPE_F32, 1, last, 9, 0.01),
                           rig_random(DTYPE_BF16, 1, last, 10, 1.0)};
  for (int64_t i = 0; i < last; i++) rig_set(&host[2], i, fabs(rig_value(&host[2], i)));
  struct matrix device[4], flat[4];
  for (int i = 0; i < 4; i++) {
    struct matrix column = {host[i].data, host[i].dtype, last, 1};
    device[i] = large(n, &column);
    flat[i] = {device[i].data, device[i].dtype, 1, n};
  }
  struct measure measured = {}, cpu_measured = {}, *d_measured = static_cast<struct measure *>(rig_put(&rig, &measured, sizeof measured));
  rig.gpu->k->measure(rig.gpu, d_measured, &flat[3], 1);
  rig.cpu->k->measure(rig.cpu, &cpu_measured, &host[3], 1);
  rig_get(&rig, &measured, d_measured, sizeof measured);
  CHECK_CLOSE(measured.sum_squares / cpu_measured.sum_squares, 1.0, 1e-12);
  CHECK(measured.amax == cpu_measured.amax && measured.nonfinite == 0);
  const struct adamw a = {3e-3f, 0.9f, 0.95f, 1e-8f, 0.7f, 0.271f, 0.142625f};
  const struct draw draw = {99, 3, 0, 0, 0, DRAW_PARAMETER};
  struct adamw_tensor cpu = {}, gpu = {};
  cpu.param = host[0].data, cpu.m = static_cast<float *>(host[1].data), cpu.v = static_cast<float *>(host[2].data), cpu.grad = host[3].data;
  cpu.n = last, cpu.weight_decay = 0.1f, cpu.layer = 4, cpu.first = static_cast<uint64_t>(n - last);
  gpu = cpu;
  gpu.param = device[0].data, gpu.m = static_cast<float *>(device[1].data), gpu.v = static_cast<float *>(device[2].data), gpu.grad = device[3].data;
  gpu.n = n, gpu.first = 0;
  rig.cpu->k->adamw_update(rig.cpu, &cpu, 1, DTYPE_BF16, DTYPE_BF16, &a, &draw);
  rig.gpu->k->adamw_update(rig.gpu, &gpu, 1, DTYPE_BF16, DTYPE_BF16, &a, &draw);
  rig_synchronize(&rig);
  static const char *const names[] = {"param", "m", "v"};
  for (int i = 0; i < 3; i++) {
    const struct matrix want = {host[i].data, host[i].dtype, last, 1};
    check_last(names[i], &device[i], &want);
  }
  rig_drop(&rig, d_measured);
  for (int i = 0; i < 4; i++) rig_drop(&rig, device[i].data), free(host[i].data);
}

/* Whole numbers, exact in any order. */
TEST(contraction) {
  const int64_t m = 65544, n = 32776, k = 64;
  struct matrix a = rig_matrix(DTYPE_BF16, FAR, k), b = rig_matrix(DTYPE_BF16, n, k), want = rig_matrix(DTYPE_BF16, FAR, n);
  for (int64_t i = 0; i < FAR * k; i++) rig_set(&a, i, (double)(i * 7 % 5) - 2);
  for (int64_t i = 0; i < n * k; i++) rig_set(&b, i, (double)(i * 11 % 3) - 1);
  struct operand oa = operand_of_matrix(&a, VIEW_ROW), ob = operand_of_matrix(&b, VIEW_ROW);
  rig.cpu->k->contract(rig.cpu, &want, &oa, &ob, NULL);
  struct matrix whole = rig_matrix(DTYPE_BF16, m, k);
  memset(whole.data, 0, rig_bytes(&whole));
  memcpy(static_cast<char *>(whole.data) + rig_bytes(&whole) - rig_bytes(&a), a.data, rig_bytes(&a));
  struct matrix da = rig_matrix_put(&rig, &whole), db = rig_matrix_put(&rig, &b), out = large_zeros(DTYPE_BF16, m, n);
  oa = operand_of_matrix(&da, VIEW_ROW), ob = operand_of_matrix(&db, VIEW_ROW);
  rig.gpu->k->contract(rig.gpu, &out, &oa, &ob, NULL);
  rig_synchronize(&rig);
  check_last("out", &out, &want);
  for (void *p : {da.data, db.data, out.data}) rig_drop(&rig, p);
  for (void *p : {a.data, b.data, want.data, whole.data}) free(p);
}

/* The last of many samples as that sample alone. */
TEST(attention) {
  const struct attention_shape many = extents().attention, one = {1, many.seq_len, many.n_heads, many.n_kv_heads, many.head_dim};
  const int64_t tokens = many.batch * many.seq_len, wide = (many.n_heads + 2 * many.n_kv_heads) * many.head_dim, narrow = many.n_heads * many.head_dim;
  struct matrix qkv = rig_random(DTYPE_BF16, one.seq_len, wide, 11, 1.5), d_out = rig_random(DTYPE_BF16, one.seq_len, narrow, 12, 1.0);
  struct matrix result[2]; /* d_qkv of the sample: in front of nothing, behind others */
  for (int with = 0; with < 2; with++) {
    const struct attention_shape *s = with ? &many : &one;
    struct matrix x = with ? large(tokens, &qkv) : rig_matrix_put(&rig, &qkv), g = rig_matrix_put(&rig, &d_out);
    struct matrix out = {NULL, DTYPE_BF16, s->batch * s->seq_len, narrow}, d_x = with ? large_zeros(DTYPE_BF16, tokens, wide) : rig_matrix_put(&rig, &qkv);
    struct error e = {};
    if (with) { /* fewer than 2^31 elements */
      rig_drop(&rig, g.data);
      g.rows = out.rows;
      if (!(g.data = rig.gpu->k->allocate(rig.gpu, rig_bytes(&g), &e))) rig_end(&e);
      rig.gpu->k->clear(rig.gpu, g.data, rig_bytes(&g));
      rig.gpu->k->upload(rig.gpu, static_cast<char *>(g.data) + rig_bytes(&g) - rig_bytes(&d_out), d_out.data, rig_bytes(&d_out));
    }
    if (!(out.data = rig.gpu->k->allocate(rig.gpu, rig_bytes(&out), &e))) rig_end(&e);
    float *lse = static_cast<float *>(rig_put(&rig, NULL, static_cast<size_t>(s->batch * s->n_heads * s->seq_len) * sizeof(float)));
    rig.gpu->k->attention_forward(rig.gpu, &out, lse, NULL, NULL, &x, NULL, NULL, s);
    rig.gpu->k->attention_backward(rig.gpu, &d_x, NULL, &g, NULL, &out, lse, &x, NULL, NULL, s);
    rig_synchronize(&rig);
    result[with] = rig_matrix(DTYPE_BF16, one.seq_len, wide);
    rig_get(&rig, result[with].data, static_cast<char *>(d_x.data) + rig_bytes(&d_x) - rig_bytes(&qkv), rig_bytes(&qkv));
    for (void *p : {x.data, g.data, out.data, d_x.data, static_cast<void *>(lse)}) rig_drop(&rig, p);
  }
  rig_same("d_qkv", &result[1], &result[0]);
  for (void *p : {qkv.data, d_out.data, result[0].data, result[1].data}) free(p);
}

int main() {
  const struct extent x = extents();
  rig = rig_open("sm90", &x);
  RUN(norm);
  RUN(gate);
  RUN(embedding);
  RUN(adamw_and_measure);
  RUN(contraction);
  RUN(attention);
  rig_close(&rig);
  return test_report();
}
