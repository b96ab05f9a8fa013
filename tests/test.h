/* A test program's frame.  A test prints one line a check group:
 *   ok NAME            or       not ok NAME: FILE:LINE: what
 * and `tests/run` adds them up.  Exit status 0 iff nothing failed.
 *
 *   TEST(name) { CHECK(cond); CHECK_EQ_I64(a, b); … }
 *   int main(void) { RUN(name); return test_report(); }
 */
#ifndef FP4D_TESTS_TEST_H
#define FP4D_TESTS_TEST_H

#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static int test_failures_in_group, test_groups_failed, test_groups;

#define TEST(name) static void test_##name(void)

#define FAIL(...)                                                      \
  do {                                                                 \
    if (test_failures_in_group++ < 8) {                                \
      printf("# %s:%d: ", __FILE__, __LINE__);                         \
      printf(__VA_ARGS__);                                             \
      printf("\n");                                                    \
    }                                                                  \
  } while (0)

#define CHECK(cond)                            \
  do {                                         \
    if (!(cond)) FAIL("not so: %s", #cond);    \
  } while (0)

#define CHECK_EQ_I64(a, b)                                                                  \
  do {                                                                                      \
    int64_t test_a = (int64_t)(a), test_b = (int64_t)(b);                                   \
    if (test_a != test_b) FAIL("%s = %" PRId64 ", expected %" PRId64, #a, test_a, test_b);  \
  } while (0)

#define CHECK_STR(a, b)                                                         \
  do {                                                                          \
    const char *test_a = (a), *test_b = (b);                                    \
    if (strcmp(test_a, test_b) != 0) FAIL("%s = \"%s\", expected \"%s\"", #a, test_a, test_b); \
  } while (0)

#define CHECK_CLOSE(a, b, tolerance)                                                             \
  do {                                                                                           \
    double test_a = (double)(a), test_b = (double)(b), test_d = test_a - test_b;                 \
    if (!(test_d <= (tolerance) && test_d >= -(tolerance)))                                      \
      FAIL("%s = %.9g, expected %.9g within %g", #a, test_a, test_b, (double)(tolerance));       \
  } while (0)

#define RUN(name)                                                     \
  do {                                                                \
    test_failures_in_group = 0;                                       \
    test_##name();                                                    \
    test_groups++;                                                    \
    if (test_failures_in_group) test_groups_failed++;                 \
    printf("%s %s\n", test_failures_in_group ? "not ok" : "ok", #name); \
    fflush(stdout);                                                   \
  } while (0)

static inline int test_report(void) { return test_groups_failed != 0; }

#endif
