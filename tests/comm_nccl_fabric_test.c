/* What is said of the NVLink fabric that the GPUs of a world have joined. */
#include "comm/nccl_fabric.h"

#include <stdio.h>
#include <string.h>

#include "tests/test.h"

enum { MOST = 72 };
static const struct gpu_fabric none, of_host = {.state = FABRIC_COMPLETED, .health = 0xAA}, of_rack = {.state = FABRIC_COMPLETED, .cluster = {7}, .clique = 3, .health = 0xAA};
static struct gpu_fabric gpu[MOST];

static void all(int n, struct gpu_fabric f) {
  for (int i = 0; i < n; i++) gpu[i] = f;
}

/* `words`: of the only warning; NULL: there is none. */
static void check_said(int n, const char *summary, const char *words) {
  const struct nccl_fabric said = nccl_fabric(gpu, n, "the GPU of rank ");
  if (strcmp(said.summary, summary) != 0) FAIL("\"%s\", expected \"%s\"", said.summary, summary);
  CHECK_EQ_I64(said.n, words != NULL);
  if (said.n == 1 && words && !strstr(said.warning[0], words)) FAIL("\"%s\" does not say \"%s\"", said.warning[0], words);
  for (int i = 0; i < said.n; i++) CHECK(strlen(said.warning[i]) < NCCL_FABRIC_TEXT - 1);
}

TEST(summaries) {
  all(MOST, none);
  check_said(8, "no NVLink fabric", NULL);
  all(MOST, of_host);
  check_said(8, "8 of 8 GPUs in their hosts' NVLink fabric", NULL);
  all(MOST, of_rack);
  check_said(MOST, "72 of 72 GPUs in a rack's NVLink fabric, 1 clique", NULL);
  for (int i = 0; i < MOST; i++) gpu[i].clique = (unsigned)i % 3;
  check_said(MOST, "72 of 72 GPUs in a rack's NVLink fabric, 3 cliques", NULL);
  for (int i = 0; i < MOST; i++) gpu[i].cluster[15] = (unsigned char)(i / 36);
  check_said(MOST, "72 of 72 GPUs in a rack's NVLink fabric, 6 cliques", NULL);
}

TEST(who_is_outside) {
  all(MOST, of_rack);
  gpu[5].state = gpu[70].state = FABRIC_IN_PROGRESS;
  check_said(MOST, "70 of 72 GPUs in a rack's NVLink fabric, 1 clique", "the GPU of rank 5 and 1 more are not in the NVLink fabric that others are in (it is joining, ");
  all(MOST, of_rack);
  gpu[0].status = 999;
  check_said(MOST, "71 of 72 GPUs in a rack's NVLink fabric, 1 clique", "(it ended, NVML's status 999)");
  all(MOST, of_host);
  for (int i = 4; i < 8; i++) gpu[i] = of_rack;
  check_said(8, "4 of 8 GPUs in a rack's NVLink fabric, 1 clique", "the GPU of rank 0 and 3 more are not in the NVLink fabric that others are in (it is in its host's alone, NVML's status 0): NCCL then goes without");
  all(MOST, of_host);
  gpu[7] = none;
  check_said(8, "7 of 8 GPUs in their hosts' NVLink fabric", "the GPU of rank 7 is not in the NVLink fabric that others are in (it has none, NVML's status 0); see");
  all(MOST, none);
  gpu[0].state = FABRIC_NOT_STARTED;
  check_said(MOST, "no NVLink fabric", NULL);
}

TEST(who_is_troubled) {
  static const char *const words[] = {"degraded bandwidth", "a route being recovered", "an unhealthy route", "recovery from an access that timed out"};
  for (int i = 0; i < 4; i++) {
    char text[128];
    all(MOST, of_rack);
    gpu[71].health = (0xAAu & ~(3u << 2 * i)) | 1u << 2 * i;
    snprintf(text, sizeof text, "%s at the GPU of rank 71 (health mask 0x", words[i]);
    check_said(MOST, "72 of 72 GPUs in a rack's NVLink fabric, 1 clique", text);
  }
  all(MOST, of_rack);
  gpu[3].health = gpu[9].health = 0xA9;
  gpu[9].state = FABRIC_IN_PROGRESS;
  const struct nccl_fabric said = nccl_fabric(gpu, MOST, "GPU ");
  CHECK_EQ_I64(said.n, 2);
  CHECK(strstr(said.warning[0], "GPU 9 is not in") && strstr(said.warning[1], "at GPU 3 and 1 more"));
  CHECK(strstr(said.warning[1], "0xa9") != NULL);
}

int main(void) {
  RUN(summaries);
  RUN(who_is_outside);
  RUN(who_is_troubled);
  return test_report();
}
