/* The embedding on the CUDA backends: the CPU's bits. */
#include "tests/cuda_rig.h"

static const struct extent extents = {64, 32, {2, 32, 4, 2, 24}, 96, 160, 100};

/* Widths that take every path: whole vectors, odd ones, several passes of a block. */
TEST(forward) {
  struct rig r = rig_open("sm90", &extents);
  static const int64_t widths[] = {8, 96, 1, 33, 4096, 8200};
  static const enum dtype types[] = {DTYPE_F32, DTYPE_BF16};
  for (int64_t width : widths)
    for (enum dtype from : types)
      for (enum dtype to : types) {
        const int64_t vocab = 37, tokens = 29;
        int32_t ids[29];
        for (int i = 0; i < tokens; i++) ids[i] = (i * 11 + 5) % (int)vocab;
        ids[3] = 0;
        ids[4] = (int)vocab - 1;
        struct matrix table = rig_random(from, vocab, width, 7, 1.0), want = rig_matrix(to, tokens, width);
        r.cpu->k->embedding_forward(r.cpu, &want, &table, ids);
        struct matrix device_table = rig_matrix_put(&r, &table), x = rig_matrix(to, tokens, width), device_x = rig_matrix_put(&r, &x);
        int32_t *device_ids = static_cast<int32_t *>(rig_put(&r, ids, sizeof ids));
        r.gpu->k->embedding_forward(r.gpu, &device_x, &device_table, device_ids);
        rig_synchronize(&r);
        struct matrix got = rig_matrix_get(&r, &device_x);
        rig_same("x", &got, &want);
        void *const device[] = {device_table.data, device_x.data, device_ids};
        for (void *p : device) rig_drop(&r, p);
        void *const host[] = {table.data, want.data, x.data, got.data};
        for (void *p : host) free(p);
      }
  rig_close(&r);
}

int main(void) {
  RUN(forward);
  return test_report();
}
