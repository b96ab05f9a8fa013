/* The program with samples that no stream gives: linked with --wrap=data_sample.
 *
 *   FP4D_TEST_MASK="FIRST SECOND"   percent of targets masked in the first and in the second half of each 8 samples
 *                                   of the run, before the model, the loss and the batch hash see them
 *   FP4D_TEST_SLOW=N                every sample takes N ms
 *   FP4D_TEST_UNREADABLE=I          sample I cannot be read
 */
#include <stdlib.h>
#include <time.h>

#include "base/philox.h"
#include "data/data.h"
#include "trainer/main.c"

enum { BATCH = 8 };

bool __real_data_sample(const struct data_order *o, int64_t index, const struct data_sample *out, struct error *e);
bool __wrap_data_sample(const struct data_order *o, int64_t index, const struct data_sample *out, struct error *e);

static void mask(const struct data_order *o, int64_t index, int32_t *targets) {
  const char *text = getenv("FP4D_TEST_MASK");
  int percent[2];
  if (!text || sscanf(text, "%d %d", &percent[0], &percent[1]) != 2) return;
  for (int64_t t = 0; t < o->seq_len; t++) {
    struct philox_block w = philox4x32_10((uint64_t)index, (struct philox_block){{(uint32_t)t, 8, 8, 8}});
    if ((int)(w.word[0] % 100) < percent[index % BATCH >= BATCH / 2]) targets[t] = -1;
  }
}

bool __wrap_data_sample(const struct data_order *o, int64_t index, const struct data_sample *out, struct error *e) {
  const char *slow = getenv("FP4D_TEST_SLOW"), *unreadable = getenv("FP4D_TEST_UNREADABLE");
  if (slow) nanosleep(&(struct timespec){.tv_nsec = atol(slow) * 1000000}, NULL);
  if (unreadable && atol(unreadable) == index) return error_set(e, ERROR_DATA, "sample %ld is not to be read", (long)index);
  if (!__real_data_sample(o, index, out, e)) return false;
  mask(o, index, out->targets);
  return true;
}
