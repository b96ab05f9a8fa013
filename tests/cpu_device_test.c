/* The CPU device: opening, memory, scratch, and the whole table. */
#include <stdlib.h>

#include "kernels/kernels.h"
#include "tests/test.h"

TEST(unknown_backends) {
  static const char *const names[] = {"sm80", "CPU", "", "cpu "};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    struct error e = {0};
    CHECK(device_open(names[i], 1, &e) == NULL);
    CHECK_EQ_I64(e.code, ERROR_DEVICE);
    CHECK(strstr(e.message, names[i]) != NULL && strstr(e.hint, "cpu") != NULL);
  }
  struct error e = {0};
  CHECK(device_open("cpu", -2, &e) == NULL);
  CHECK_EQ_I64(e.code, ERROR_DEVICE);
}

TEST(memory) {
  struct error e = {0};
  struct device *d = device_open("cpu", 0, &e);
  CHECK(d != NULL);
  if (!d) return;
  CHECK_STR(d->k->backend, "cpu");
  char host[100], back[100];
  for (int i = 0; i < 100; i++) host[i] = (char)i;
  char *p = d->k->allocate(d, 100, &e);
  CHECK(p && (uintptr_t)p % 256 == 0);
  if (p) {
    d->k->upload(d, p, host, 100);
    d->k->clear(d, p + 40, 7);
    d->k->download(d, back, p, 100);
    CHECK(d->k->synchronize(d, &e));
    for (int i = 0; i < 100; i++) CHECK_EQ_I64(back[i], i >= 40 && i < 47 ? 0 : i);
  }
  d->k->release(d, p);
  p = d->k->allocate(d, 0, &e);
  CHECK(p != NULL);
  d->k->release(d, p);
  CHECK(d->k->allocate(d, SIZE_MAX, &e) == NULL);
  CHECK_EQ_I64(e.code, ERROR_SYSTEM);
  CHECK(strstr(e.message, "18446744073709551615") != NULL && e.hint[0]);
  CHECK(d->k->allocate(d, SIZE_MAX - 255, &e) == NULL);
  d->k->close(d);
}

/* A function pointer for every operation, and quantising through the table. */
TEST(table) {
  struct error e = {0};
  struct device *d = device_open("cpu", 2, &e);
  CHECK(d != NULL);
  if (!d) return;
  const struct kernels *k = d->k;
  CHECK(k->refuse_encoding && k->refuse_attention && k->attention_gradient && k->quantise && k->embedding_forward && k->embedding_backward);
  CHECK(k->add_rmsnorm_forward && k->add_rmsnorm_backward && k->rope_forward && k->rope_backward);
  CHECK(k->attention_forward && k->attention_backward && k->swiglu_forward && k->swiglu_backward);
  CHECK(k->contract && k->cross_entropy && k->adamw_update && k->measure && k->sum);

  struct extent x = {.tokens = 64, .head_chunk = 32, .hidden_size = 96, .ffn_size = 160, .vocab_size = 100,
                     .attention = {.batch = 2, .seq_len = 32, .n_heads = 4, .n_kv_heads = 2, .head_dim = 24}};
  int64_t bytes = k->scratch_bytes(d, &x);
  CHECK(bytes > 0 && bytes < (int64_t)1 << 30);
  void *scratch = k->allocate(d, (size_t)bytes, &e);
  CHECK(scratch != NULL);
  k->set_scratch(d, scratch, bytes);

  float source[32 * 96];
  for (int i = 0; i < 32 * 96; i++) source[i] = (float)(i % 13) - 6;
  struct matrix m = {.data = source, .dtype = DTYPE_F32, .rows = 32, .cols = 96};
  uint8_t codes[32 * 96 / 2], scales[128 * 4];
  struct operand row = {.encoding = {FORMAT_MXFP4, BLOCK_1X32, SCALE_MX_ENCODE, ROUND_NEAREST, HADAMARD_NONE},
                        .rows = 32, .cols = 96, .codes = codes, .scales = scales};
  CHECK(k->refuse_encoding(d, &row.encoding, VIEW_ROW) == NULL);
  k->quantise(d, &(struct emission){.row = &row}, &m);
  CHECK_EQ_I64(scales[operand_scale_offset(5, 2, 3)], 130); /* amax 6: s = 8 */
  CHECK_EQ_I64(scales[operand_scale_offset(5, 3, 3)], 0);
  k->release(d, scratch);
  k->close(d);
}

int main(void) {
  RUN(unknown_backends);
  RUN(memory);
  RUN(table);
  return test_report();
}
