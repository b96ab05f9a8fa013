/* The program with targets that do not count, which no stream gives yet: linked
 * with --wrap=data_sample, it masks a share of the targets of each sample before
 * the model, the loss and the batch hash see them.
 *
 *   FP4D_TEST_MASK="FIRST SECOND"   percent of targets masked in the first and in
 *                                   the second half of each 8 samples of the run
 */
#include <stdlib.h>

#include "base/philox.h"
#include "data/data.h"
#include "trainer/main.c"

enum { BATCH = 8 };

bool __real_data_sample(const struct data_order *o, int64_t index, const struct data_sample *out, struct error *e);
bool __wrap_data_sample(const struct data_order *o, int64_t index, const struct data_sample *out, struct error *e);

bool __wrap_data_sample(const struct data_order *o, int64_t index, const struct data_sample *out, struct error *e) {
  const char *text = getenv("FP4D_TEST_MASK");
  int percent[2];
  if (!__real_data_sample(o, index, out, e)) return false;
  if (!text || sscanf(text, "%d %d", &percent[0], &percent[1]) != 2) return true;
  for (int64_t t = 0; t < o->seq_len; t++) {
    struct philox_block w = philox4x32_10((uint64_t)index, (struct philox_block){{(uint32_t)t, 8, 8, 8}});
    if ((int)(w.word[0] % 100) < percent[index % BATCH >= BATCH / 2]) out->targets[t] = -1;
  }
  return true;
}
