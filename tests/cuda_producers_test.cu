/* Producers of the CUDA backends, and the embedding: the CPU's bits, at shapes
 * that take every path, of ordinary and extreme numbers. */
#include "tests/cuda_twin.h"

#include "kernels/cuda/sigmoid.cuh"

extern "C" {
#include "kernels/rope.h"
}

static struct extent extents() {
  struct extent x = {};
  x.tokens = 8300, x.head_chunk = 8, x.attention = {1, 128, 4, 2, 32}, x.hidden_size = 4096, x.ffn_size = 4096, x.vocab_size = 300;
  return x;
}

struct shape {
  int64_t rows, cols;
};

/* ---- RMSNorm -------------------------------------------------------------- */
/* Lengths of one, four and eight pieces of 1024, more, and such as are not whole. */
static const struct shape norm_shapes[] = {{1, 8},    {2, 96},   {5, 1000}, {4, 1024}, {4, 4096}, {3, 2056}, {4, 8192}, {3, 6152},
                                           {4, 9216}, {3, 9001}, {6, 33},   {5, 1},    {2, 4100}};

TEST(rmsnorm_forward) {
  int number = 0;
  for (struct shape s : norm_shapes)
    for (enum dtype t : twin_types)
      for (int mode = 0; mode < 4; mode++, number++) {
        const int64_t shift = number % 7 == 3;
        const bool cast = mode == 3, with_delta = mode != 1, in_place = mode == 2;
        struct twin residual = twin_shifted(twin_values(t, s.rows, s.cols, 10 + (uint64_t)number, 1.3), shift);
        struct twin delta = twin_shifted(twin_values(t, s.rows, s.cols, 60 + 4 * (uint64_t)number, 0.7), shift);
        struct twin gain = twin_of(rig_random(twin_types[number % 3 == 0], 1, s.cols, 7, 1.0));
        struct twin sum = twin_of(rig_matrix(t, s.rows, s.cols)), rstd = twin_of(rig_matrix(DTYPE_F32, s.rows, 1));
        struct twin *to = in_place ? &residual : &sum;
        struct twin_emission *e = twin_emission_of(1 + number % 7, t, s.rows, s.cols, 0);
        const auto run = [&](struct device *d, const struct emission *out, struct matrix *residual_out, void *r, const struct matrix *x,
                             const struct matrix *add, const struct matrix *g) {
          const auto forward = cast ? d->k->add_rmsnorm_forward_cast : d->k->add_rmsnorm_forward;
          forward(d, out, with_delta ? residual_out : NULL, static_cast<float *>(r), x, with_delta ? add : NULL, g, 1e-5f);
        };
        run(rig.cpu, &e->host, &to->host, rstd.host.data, &residual.host, &delta.host, &gain.host);
        run(rig.gpu, &e->device, &to->device, rstd.device.data, &residual.device, &delta.device, &gain.device);
        twin_same("rstd", &rstd);
        twin_same("residual_out", to);
        twin_emission_check("rmsnorm", e);
        struct twin *const all[] = {&residual, &delta, &gain, &sum, &rstd};
        for (struct twin *x : all) twin_drop(x);
      }
}

/* `ordinary`: numbers of like size, in which the order of a sum shows. */
static void backward_case(struct shape s, enum dtype t, enum dtype gradient, int mode, bool ordinary, int number) {
  const int64_t shift = number % 5 == 3;
  const uint64_t key = 10 + (uint64_t)number;
  struct twin dy = twin_shifted(ordinary ? rig_random(t, s.rows, s.cols, key, 1.0) : twin_values(t, s.rows, s.cols, key, 1.0), shift);
  struct twin x = twin_of(ordinary ? rig_random(t, s.rows, s.cols, key + 1, 1.0) : twin_values(t, s.rows, s.cols, key + 1, 1.0));
  struct twin above = twin_shifted(rig_random(t, s.rows, s.cols, 12, 0.5), shift);
  struct twin gain = twin_of(rig_random(twin_types[number % 3 == 0], 1, s.cols, 8, 1.0));
  struct twin d_gain = twin_of(rig_random(gradient, 1, s.cols, 9, 3.0));
  struct twin rstd = twin_of(rig_random(DTYPE_F32, s.rows, 1, 10, 1.0));
  struct twin_emission *e = twin_emission_of(mode == 2 ? 0 : 1 + number % 7, t, s.rows, s.cols, 0);
  if (mode == 2) e->host.plain = &above.host, e->device.plain = &above.device; /* in place of d_above */
  rig.cpu->k->add_rmsnorm_backward(rig.cpu, &e->host, &d_gain.host, &dy.host, mode == 1 ? NULL : &above.host, &x.host,
                                   static_cast<float *>(rstd.host.data), &gain.host);
  rig.gpu->k->add_rmsnorm_backward(rig.gpu, &e->device, &d_gain.device, &dy.device, mode == 1 ? NULL : &above.device, &x.device,
                                   static_cast<float *>(rstd.device.data), &gain.device);
  twin_same("d_gain", &d_gain);
  twin_same("d_above", &above);
  twin_emission_check("rmsnorm backward", e);
  struct twin *const all[] = {&dy, &x, &above, &gain, &d_gain, &rstd};
  for (struct twin *y : all) twin_drop(y);
}

TEST(rmsnorm_backward) {
  static const int64_t strips[] = {1, 31, 32, 33, 65, 100};
  int number = 0;
  for (struct shape s : norm_shapes)
    for (enum dtype t : twin_types) {
      if (s.cols <= 1000) s.rows = strips[number % 6];
      for (bool ordinary : {false, true}) backward_case(s, t, twin_types[number / 2 % 2], number % 3, ordinary, number);
      number++;
    }
  backward_case({70, 4096}, DTYPE_BF16, DTYPE_F32, 0, true, 40);
}

/* Strips of which one tree takes 256, and a tree of trees: every odd count passes one through. */
TEST(rmsnorm_many_strips) {
  static const int64_t strips[] = {3, 11, 31, 257};
  for (int64_t n : strips) backward_case({32 * n - 7, 2}, DTYPE_F32, DTYPE_F32, 0, true, (int)n);
}

/* ---- SwiGLU ---------------------------------------------------------------- */
static void swiglu_case(struct twin *x, struct twin *d, int number) {
  const int64_t rows = d->host.rows, n = d->host.cols;
  struct twin_emission *out = twin_emission_of(1 + number % 7, x->host.dtype, rows, n, 0);
  struct twin_emission *dx = twin_emission_of(1 + number * 3 % 7, x->host.dtype, rows, 2 * n, number % 3 == 2);
  rig.cpu->k->swiglu_forward(rig.cpu, &out->host, &x->host);
  rig.gpu->k->swiglu_forward(rig.gpu, &out->device, &x->device);
  rig.cpu->k->swiglu_backward(rig.cpu, &dx->host, &d->host, &x->host);
  rig.gpu->k->swiglu_backward(rig.gpu, &dx->device, &d->device, &x->device);
  twin_emission_check("swiglu", out);
  twin_emission_check("swiglu backward", dx);
  twin_drop(x), twin_drop(d);
}

TEST(swiglu) {
  static const struct shape shapes[] = {{1, 8}, {4, 1}, {9, 33}, {4, 2048}, {4, 2056}, {5, 4096}, {8, 100}};
  int number = 0;
  for (struct shape s : shapes)
    for (enum dtype t : twin_types) {
      struct twin x = twin_shifted(twin_values(t, s.rows, 2 * s.cols, 30 + (uint64_t)number, 8.0), number % 5 == 4);
      struct twin d = twin_of(twin_values(t, s.rows, s.cols, 32 + (uint64_t)number, 1.0));
      swiglu_case(&x, &d, number++);
    }
}

/* Gates of every size and both signs: where the exponential is short and where it is not. */
TEST(swiglu_all_gates) {
  enum { STEP = 9973, N = 2048 };
  const int64_t points = (int64_t)(0xFFFFFFFFu / STEP), rows = points / N + 1;
  struct matrix x = rig_matrix(DTYPE_F32, rows, 2 * N), d = rig_matrix(DTYPE_F32, rows, N);
  for (int64_t i = 0; i < rows * N; i++) {
    const uint32_t bits = (uint32_t)(i * STEP);
    rig_set(&x, i / N * 2 * N + i % N, (double)f32_from_bits(bits << 31 | bits >> 1)); /* signs in turn */
    rig_set(&x, i / N * 2 * N + N + i % N, i % 3 ? 1.0 : -0.75);
    rig_set(&d, i, i % 5 ? 1.0 : 2.5);
  }
  struct twin twins[] = {twin_of(x), twin_of(d)};
  swiglu_case(&twins[0], &twins[1], 0);
}

/* Every BF16 gate, beside ups of all 128 significands: products in the middle of two BF16 show a sigmoid's last bit. */
TEST(swiglu_all_bf16_gates) {
  enum { N = 2048, ROWS = 65536 / N };
  for (int turn = 0; turn < 4; turn++) {
    struct matrix x = rig_matrix(DTYPE_BF16, ROWS, 2 * N), d = rig_matrix(DTYPE_BF16, ROWS, N);
    for (int i = 0; i < ROWS * N; i++) {
      rig_set(&x, i / N * 2 * N + i % N, (double)bf16_decode((uint16_t)i));
      rig_set(&x, i / N * 2 * N + N + i % N, 1.0 + (i * 37 + turn * 29) % 128 / 128.0);
      rig_set(&d, i, 1.0 + (i * 53 + turn * 31) % 128 / 128.0);
    }
    struct twin twins[] = {twin_of(x), twin_of(d)};
    swiglu_case(&twins[0], &twins[1], turn);
  }
}

/* The sigmoid itself, in FP32, of every BF16 for which it is the short one. */
static __global__ void bf16_sigmoids(float *to) {
  const unsigned i = blockIdx.x * 256 + threadIdx.x;
  const float x = bf16_decode((uint16_t)i);
  to[i] = sigmoid_is_ordinary(x) ? sigmoid_ordinary<true>(x) : 0.0f;
}

TEST(sigmoid_of_every_bf16) {
  struct twin s = twin_of(rig_matrix(DTYPE_F32, 1, 65536));
  int64_t ordinary = 0;
  for (int i = 0; i < 65536; i++) {
    const float x = bf16_decode((uint16_t)i);
    const bool is_ordinary = fabsf(x) <= 50.0f;
    ordinary += is_ordinary;
    rig_set(&s.host, i, is_ordinary ? (double)f32_sigmoid(x) : 0.0);
  }
  CHECK(ordinary == 33938);
  CUDA_LAUNCH(cuda_of(rig.gpu), bf16_sigmoids, 256, 256, 0, static_cast<float *>(s.device.data));
  twin_same("sigmoids of BF16", &s);
  twin_drop(&s);
}

/* ---- rotary embedding ------------------------------------------------------ */
TEST(rope) {
  static const struct attention_shape cases[] = {{1, 1, 1, 1, 2},   {2, 33, 4, 2, 32}, {3, 20, 3, 1, 6},  {1, 40, 8, 8, 4},
                                                 {5, 13, 2, 1, 128}, {1, 9, 24, 4, 96}, {2, 7, 3, 3, 10}, {1, 4, 32, 8, 128},
                                                 {1, 3, 70, 2, 128}, {2, 2, 2, 1, 1032}, {1, 3, 1, 1, 1030}}; /* heads in turns; in parts of several blocks */
  int number = 0;
  for (const struct attention_shape &s : cases)
    for (enum dtype t : twin_types) {
      const int64_t cols = (s.n_heads + 2 * s.n_kv_heads) * s.head_dim, rows = s.batch * s.seq_len;
      struct matrix angles = rig_matrix(DTYPE_F32, s.seq_len, s.head_dim);
      rope_table(static_cast<float *>(angles.data), s.seq_len, s.head_dim, 10000.0, NULL);
      struct twin table = twin_of(angles);
      struct twin x = twin_shifted(twin_values(t, rows, cols, 70 + (uint64_t)number, 1.0), number % 3 == 1);
      const float *host = static_cast<float *>(table.host.data), *device = static_cast<float *>(table.device.data);
      struct twin_emission *e = twin_emission_of(1 + number % 7, t, rows, cols, number % 5 == 2);
      rig.cpu->k->rope_backward(rig.cpu, &e->host, &x.host, host, &s);
      rig.gpu->k->rope_backward(rig.gpu, &e->device, &x.device, device, &s);
      twin_emission_check("rope backward", e);
      rig.cpu->k->rope_forward(rig.cpu, &x.host, NULL, NULL, host, &s); /* in place */
      rig.gpu->k->rope_forward(rig.gpu, &x.device, NULL, NULL, device, &s);
      twin_same("rope", &x);
      struct emission host_out = {}, device_out = {};
      host_out.plain = &x.host, device_out.plain = &x.device;
      rig.cpu->k->rope_backward(rig.cpu, &host_out, &x.host, host, &s);
      rig.gpu->k->rope_backward(rig.gpu, &device_out, &x.device, device, &s);
      twin_same("rope backward in place", &x);
      twin_drop(&table), twin_drop(&x);
      number++;
    }
}

/* ---- embedding ------------------------------------------------------------- */
static int32_t *ids_of(int64_t tokens, int64_t vocab, int number) {
  int32_t *ids = static_cast<int32_t *>(rig_host((size_t)tokens * sizeof *ids));
  for (int64_t t = 0; t < tokens; t++) {
    const uint32_t word = philox4x32_10(90, philox_counter(3, (uint64_t)number, 0, 0, (uint32_t)t)).word[0];
    const int64_t among = number % 3 == 0 ? vocab : number % 3 == 1 ? (t % 2 ? vocab : 3) : 1; /* many repeats; all one token */
    ids[t] = (int32_t)(word % (uint32_t)(among < vocab ? among : vocab));
  }
  ids[0] = (int32_t)vocab - 1;
  return ids;
}

TEST(embedding) {
  static const struct {
    int64_t tokens, vocab, width;
  } cases[] = {{1, 1, 8}, {29, 37, 96}, {70, 300, 33}, {513, 512, 8}, {1500, 513, 4}, {40, 700, 1032}, {300, 270000, 4}, {64, 100, 2056}};
  int number = 0;
  for (const auto &c : cases)
    for (enum dtype t : twin_types)
      for (enum dtype u : twin_types) {
        const int64_t shift = number % 5 == 2;
        int32_t *ids = ids_of(c.tokens, c.vocab, number);
        int32_t *device_ids = static_cast<int32_t *>(rig_put(&rig, ids, (size_t)c.tokens * sizeof *ids));
        struct twin table = twin_shifted(twin_values(u, c.vocab, c.width, 50 + (uint64_t)number, 1.0), shift);
        struct twin x = twin_of(rig_matrix(t, c.tokens, c.width));
        rig.cpu->k->embedding_forward(rig.cpu, &x.host, &table.host, ids);
        rig.gpu->k->embedding_forward(rig.gpu, &x.device, &table.device, device_ids);
        twin_same("x", &x);
        struct twin dx = twin_shifted(twin_values(t, c.tokens, c.width, 51 + (uint64_t)number, 1.0), shift);
        rig.cpu->k->embedding_backward(rig.cpu, &table.host, &dx.host, ids);
        rig.gpu->k->embedding_backward(rig.gpu, &table.device, &dx.device, device_ids);
        twin_same("d_table", &table);
        rig_drop(&rig, device_ids), free(ids);
        twin_drop(&table), twin_drop(&x), twin_drop(&dx);
        number++;
      }
}

/* ---- copies ---------------------------------------------------------------- */
TEST(quantise) {
  static const struct shape shapes[] = {{1, 1}, {3, 7}, {33, 100}, {4, 2048}, {5, 1001}};
  int number = 0;
  for (struct shape s : shapes)
    for (enum dtype from : twin_types)
      for (enum dtype to : twin_types)
        for (int which = 1; which < 8; which++, number++) {
          if (from == DTYPE_F32 && to == DTYPE_BF16 && (which & 5) == 5) continue; /* refused */
          struct twin x = twin_shifted(twin_values(from, s.rows, s.cols, 80 + (uint64_t)number, 1.0), number % 3 == 1);
          struct twin_emission *e = twin_emission_of(which, to, s.rows, s.cols, number % 4 == 1);
          rig.cpu->k->quantise(rig.cpu, &e->host, &x.host);
          rig.gpu->k->quantise(rig.gpu, &e->device, &x.device);
          twin_emission_check("copy", e);
          twin_drop(&x);
        }
}

int main() {
  const struct extent x = extents();
  rig = rig_open("sm90", &x);
  RUN(rmsnorm_forward);
  RUN(rmsnorm_backward);
  RUN(rmsnorm_many_strips);
  RUN(swiglu);
  RUN(swiglu_all_gates);
  RUN(swiglu_all_bf16_gates);
  RUN(sigmoid_of_every_bf16);
  RUN(rope);
  RUN(embedding);
  RUN(quantise);
  rig_close(&rig);
  return test_report();
}
