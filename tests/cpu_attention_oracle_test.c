/* Attention in every pair of formats against tests/golden/attention.bin
 * (tests/oracle/attention_lowp.py): codes to the byte, results to what FP32 sums
 * leave open.  P and dS that lie on a boundary between two codes may take either. */
#include <errno.h>

#include "base/hash.h"
#include "tests/cpu_attention_case.h"

static bool read_line(FILE *f, char *line, int size) {
  if (!fgets(line, size, f)) return false;
  line[strcspn(line, "\n")] = 0;
  return true;
}

static float *read_floats(FILE *f, int64_t n) {
  float *x = test_memory((size_t)n * sizeof *x);
  if (fread(x, sizeof *x, (size_t)n, f) != (size_t)n) FAIL("the file ends early");
  return x;
}

static void check_codes(const char *name, const char *words, int number, const void *bytes, int64_t n) {
  char expected[32] = "", text[HASH_TEXT];
  for (int i = 0; i <= number; i++) {
    words += strspn(words, " ");
    snprintf(expected, sizeof expected, "%.*s", (int)strcspn(words, " "), words);
    words += strcspn(words, " ");
  }
  if (n == 0) {
    if (strcmp(expected, "-") != 0) FAIL("%s: codes %d are expected", name, number);
    return;
  }
  hash_text(hash_bytes(bytes, (size_t)n), text);
  if (strcmp(text + 16, expected) != 0) FAIL("%s: codes %d are %s, expected %s", name, number, text + 16, expected);
}

/* Sum over d of value times sign, per token and head. */
static float *projected(const struct matrix *m, int64_t col, int64_t heads, int64_t dim) {
  float *out = test_memory((size_t)(m->rows * heads) * sizeof *out);
  for (int64_t r = 0; r < m->rows; r++)
    for (int64_t h = 0; h < heads; h++) {
      double sum = 0;
      for (int64_t d = 0; d < dim; d++) {
        uint32_t word = philox4x32_10(0x51A27153u, (struct philox_block){{(uint32_t)d, 99, 0, 0}}).word[0];
        double x = test_get(m, r * m->cols + col + h * dim + d);
        sum += word & 1u ? -x : x;
      }
      out[r * heads + h] = (float)sum;
    }
  return out;
}

static double check_close(const char *name, const char *what, float *got, float *expected, int64_t n, double tolerance) {
  double difference = 0, norm = 0;
  for (int64_t i = 0; i < n; i++) {
    double d = (double)got[i] - (double)expected[i];
    difference += d * d;
    norm += (double)expected[i] * (double)expected[i];
  }
  double error = norm > 0 ? sqrt(difference / norm) : sqrt(difference);
  if (!(error <= tolerance)) FAIL("%s: %s is %.3g off, allowed %g", name, what, error, tolerance);
  free(got);
  free(expected);
  return error;
}

static bool check_case(FILE *f) {
  char line[512], codes[512], counts[512], name[64];
  long long b, seq_len, heads, kv, dim;
  int qk, pv, d_out;
  double slope, offset, lift, steep, gradient;
  int documents;
  if (!read_line(f, line, sizeof line)) return false;
  if (sscanf(line, "case %63s %lld %lld %lld %lld %lld %d %d %d %lf %lf %lf %lf %lf %d", name, &b, &seq_len, &heads, &kv, &dim,
             &qk, &pv, &d_out, &slope, &offset, &lift, &steep, &gradient, &documents) != 15 ||
      !read_line(f, codes, sizeof codes) || !read_line(f, counts, sizeof counts)) {
    FAIL("not a case: %s", line);
    return false;
  }
  struct attention_formats formats = {(enum format)qk, (enum format)pv, (enum format)d_out, (float)slope, (float)offset, (float)lift};
  struct attention_case *c = case_new((struct attention_shape){b, seq_len, heads, kv, dim}, formats, 2);
  case_fill(c, steep, gradient);
  if (documents > 0) case_documents(c, documents, 31);
  case_run(c);

  bool plain = attention_plain(&formats);
  int64_t tokens = case_tokens(c), q = heads * dim, k = kv * dim;
  for (int v = 0; v < ATTENTION_VIEWS; v++)
    check_codes(name, codes + 6, v, c->payload.view[v], attention_view_bytes(&formats, &c->s, true, (enum attention_view)v));
  check_codes(name, codes + 6, ATTENTION_VIEWS, c->gradient.codes, c->coded ? tokens * q : 0);
  check_codes(name, codes + 6, ATTENTION_VIEWS + 1, c->gradient.lift, c->coded ? b * kv * 4 : 0);
  const char *at = counts + 7;
  for (int t = 0; t < ATTENTION_TENSORS; t++) {
    char *end;
    int64_t elements = strtoll(at, &end, 10), underflowed = strtoll(end, &end, 10);
    int64_t open = t == ATTENTION_P || t == ATTENTION_DS ? 2 + underflowed / 1000 : 0;
    at = end;
    CHECK_EQ_I64(c->counts[t].elements, elements);
    if (llabs(c->counts[t].underflowed - underflowed) > open)
      FAIL("%s: tensor %d: %lld codes are 0, expected %lld", name, t, (long long)c->counts[t].underflowed, (long long)underflowed);
  }

  double tolerance = plain ? 5e-3 : 4e-3;
  struct {
    const char *what;
    const struct matrix *m;
    int64_t col, heads;
  } part[] = {{"out", &c->out, 0, heads}, {"dQ", &c->d_qkv, 0, heads}, {"dK", &c->d_qkv, q, kv}, {"dV", &c->d_qkv, q + k, kv}};
  double error[4];
  for (int i = 0; i < 4; i++) {
    float *expected = read_floats(f, tokens * part[i].heads);
    error[i] = check_close(name, part[i].what, projected(part[i].m, part[i].col, part[i].heads, dim), expected, tokens * part[i].heads, tolerance);
    if (i > 0) continue;
    float *lse = read_floats(f, tokens * heads);
    for (int64_t n = 0; n < tokens * heads; n++)
      if (!(fabs((double)c->lse[n] - (double)lse[n]) <= 2e-5 * (1 + fabs((double)lse[n])))) FAIL("%s: lse %lld", name, (long long)n);
    free(lse);
  }
  printf("# %-24s out %.1e dQ %.1e dK %.1e dV %.1e\n", name, error[0], error[1], error[2], error[3]);
  case_free(c);
  return true;
}

TEST(golden) {
  const char *path = "tests/golden/attention.bin";
  FILE *f = fopen(path, "rb");
  if (!f) {
    FAIL("%s: %s (run from the top folder)", path, strerror(errno));
    return;
  }
  int cases = 0;
  while (check_case(f)) cases++;
  CHECK_EQ_I64(cases, 24);
  fclose(f);
}

int main(void) {
  RUN(golden);
  return test_report();
}
