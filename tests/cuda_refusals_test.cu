/* Extents that the CUDA backends refuse: those that would end the program in a kernel's launch,
 * and none that a launch takes. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/cuda_rig.h"

struct refusal {
  const char *backend;
  enum dtype type;
  struct attention_shape shape;
  const char *why; /* NULL: taken */
};

static const struct refusal cases[] = {
    {"sm90", DTYPE_BF16, {1, 64, 4, 2, 512}, "head_dim above 256"},
    {"sm90", DTYPE_F32, {1, 64, 4, 2, 258}, "head_dim above 256"},
    {"sm100", DTYPE_BF16, {1, 64, 4, 2, 512}, "head_dim above 256"},
    {"sm90", DTYPE_F32, {1, 64, 4, 2, 256}, NULL},
    {"sm100", DTYPE_BF16, {1, 64, 4, 2, 256}, NULL},
    {"sm90", DTYPE_F32, {16384, 64, 4, 2, 64}, "local_batch x n_heads above 65535"},
    {"sm100", DTYPE_BF16, {16384, 64, 4, 2, 128}, "local_batch x n_heads above 65535"},
    {"sm90", DTYPE_BF16, {1, 64, 65536, 1, 2}, "local_batch x n_heads above 65535"},
    {"sm100", DTYPE_BF16, {21845, 64, 3, 1, 128}, NULL},
    {"sm90", DTYPE_BF16, {16384, 64, 4, 2, 128}, NULL}, /* its own kernels */
    {"sm90", DTYPE_BF16, {65536, 1, 1, 1, 64}, "local_batch above 65535"},
    {"sm90", DTYPE_BF16, {1, 1, 65536, 1, 64}, "n_heads above 65535"},
    {"sm90", DTYPE_BF16, {1, 65535 * 128, 1, 1, 64}, NULL},
    {"sm90", DTYPE_BF16, {1, 65535 * 128 + 1, 1, 1, 64}, "seq_len above 8388480"},
    {"sm90", DTYPE_BF16, {1, 1 << 20, 4096, 2048, 64}, "a TiB"},
    {"sm90", DTYPE_BF16, {65535, 65535 * 9, 4, 1, 64}, "2^37"},
};

TEST(extents) {
  for (const struct refusal &c : cases) {
    struct error e = {};
    struct device *d = device_open_plan(c.backend, 1, &e);
    if (!d) rig_end(&e);
    struct extent x = {};
    x.attention = c.shape;
    const char *why = d->k->refuse_extent(d, &x, c.type);
    if (!why != !c.why || (why && !strstr(why, c.why)))
      FAIL("%s batch %" PRId64 ", seq_len %" PRId64 ", heads %" PRId64 ", head_dim %" PRId64 ": \"%s\", expected \"%s\"", c.backend, c.shape.batch,
           c.shape.seq_len, c.shape.n_heads, c.shape.head_dim, why ? why : "taken", c.why ? c.why : "taken");
    d->k->close(d);
  }
}

/* Launches attention with no tensors there: the backward, whose limits are the narrower ones, but for maps. */
[[noreturn]] static void launch(struct device *d, const struct refusal &c) {
  const struct attention_shape *s = &c.shape;
  const int64_t tokens = s->batch * s->seq_len;
  alignas(256) static char memory[256];
  const struct matrix qkv = {memory, c.type, tokens, (s->n_heads + 2 * s->n_kv_heads) * s->head_dim}, out = {memory, c.type, tokens, s->n_heads * s->head_dim};
  struct matrix d_qkv = qkv;
  struct extent x = {};
  x.attention = *s;
  x.attention_backward = c.type;
  signal(SIGALRM, SIG_DFL);
  if (!freopen("/dev/null", "w", stderr)) _exit(3);
  d->k->set_scratch(d, memory, d->k->scratch_bytes(d, &x));
  struct matrix to = out;
  if (strstr(c.why, "TiB")) d->k->attention_forward(d, &to, reinterpret_cast<float *>(memory), NULL, NULL, &qkv, NULL, NULL, s);
  d->k->attention_backward(d, &d_qkv, NULL, &out, NULL, &out, reinterpret_cast<float *>(memory), &qkv, NULL, NULL, s);
  _exit(0);
}

/* A refusal has a launch behind it that would abort, or a map that the driver would not make. */
TEST(refused_for_a_reason) {
  if (rig_on_gpu) return;
  for (const struct refusal &c : cases) {
    if (!c.why) continue;
    struct error e = {};
    struct device *d = cuda_model_open(c.backend, &e);
    if (!d) rig_end(&e);
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) launch(d, c);
    int status = 0;
    waitpid(child, &status, 0);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGABRT) FAIL("%s: a launch of \"%s\" ends with status %d", c.backend, c.why, status);
    d->k->close(d);
  }
}

int main() {
  RUN(extents);
  RUN(refused_for_a_reason);
  return test_report();
}
