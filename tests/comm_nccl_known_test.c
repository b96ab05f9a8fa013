/* What is said of an NCCL that is known to go wrong. */
#include "comm/nccl_known.h"
#include "tests/test.h"

static const char *switched_off; /* the variable that is "0" */

static const char *environment(const char *name) { return switched_off && strcmp(name, switched_off) == 0 ? "0" : NULL; }

static void check_said(const char *version, bool aarch64, bool unlimited, const char *off, const char *words) {
  const char *said[NCCL_KNOWN_MOST];
  switched_off = off;
  const struct nccl_known_machine m = {aarch64, unlimited, environment};
  const int n = nccl_known(version, &m, said);
  CHECK_EQ_I64(n, words != NULL);
  if (n == 1 && words && !strstr(said[0], words)) FAIL("\"%s\" does not say \"%s\"", said[0], words);
}

TEST(what_is_known) {
  check_said("2.28.3", false, false, NULL, NULL);
  check_said("2.28.9", false, false, NULL, NULL);
  check_said("2.28.9", true, false, NULL, "proxy slots");
  check_said("2.28.3", true, false, NULL, NULL);
  check_said("2.28.3", false, true, NULL, "ulimit -s");
  check_said("2.30.4", false, true, NULL, NULL);
  check_said("2.28.3", false, false, "NCCL_CUMEM_ENABLE", "NCCL_CUMEM_ENABLE=0");
  check_said("2.28.3", false, false, "NCCL_MNNVL_ENABLE", "NCCL_MNNVL_ENABLE=0");
  check_said("2.28.3", false, false, "NCCL_NVLS_ENABLE", NULL);
}

TEST(here) {
  const struct nccl_known_machine m = nccl_known_here();
  const char *said[NCCL_KNOWN_MOST];
  CHECK(m.environment("PATH") != NULL);
  CHECK(nccl_known("2.99.0", &m, said) <= NCCL_KNOWN_MOST);
}

int main(void) {
  RUN(what_is_known);
  RUN(here);
  return test_report();
}
