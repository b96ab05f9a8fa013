/* All logits of a checkpoint, for tests/peer/transformers_llama.py:
 *   exchange_logits_main CKPT CONFIG IDS OUT [before|after [fp32|exact]]    (--norm-cast, --rope-angles)
 * IDS: train.seq_len int32; OUT: their logits [seq_len, vocab], float32. */
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "trainer/run.h"
#include "trainer/state.h"

struct sink {
  struct run *run;
  FILE *out;
  bool good;
};

static void write_rows(void *context, int64_t first, const struct matrix *logits) {
  struct sink *s = context;
  const size_t n = (size_t)(logits->rows * logits->cols);
  float *host = malloc(n * sizeof *host);
  struct error e;
  (void)first;
  if (host) s->run->device->k->download(s->run->device, host, logits->data, n * sizeof *host);
  s->good = s->good && host && s->run->device->k->synchronize(s->run->device, &e) && fwrite(host, sizeof *host, n, s->out) == n;
  free(host);
}

static bool work(struct run *run, char **argv, struct error *e) {
  char *ids;
  size_t bytes;
  struct checkpoint *k = state_find(argv[1], e);
  if (!k) return false;
  bool good = state_read_parameters(run, k, e) && file_read(argv[3], 1 << 30, ERROR_DATA, &ids, &bytes, e);
  checkpoint_close(k);
  if (!good) return false;
  const size_t wanted = (size_t)run->tokens * sizeof(int32_t);
  struct sink s = {.run = run, .out = fopen(argv[4], "wb"), .good = true};
  if (bytes != wanted || !s.out) {
    free(ids);
    return error_set(e, ERROR_USAGE, "%zu bytes of ids for %zu, or no output", bytes, wanted);
  }
  run->device->k->upload(run->device, run->inputs, ids, wanted);
  run->device->k->upload(run->device, run->targets, ids, wanted);
  struct micro_batch b = {.inputs = run->inputs, .targets = run->targets};
  model_on_logits(run->model, write_rows, &s);
  model_forward(run->model, &b, run->nll);
  good = run->device->k->synchronize(run->device, e) && s.good;
  free(ids);
  return fclose(s.out) == 0 && good;
}

int main(int argc, char **argv) {
  struct config config;
  struct run run;
  struct error e = {0};
  static const char *const alone[] = {"train.local_batch=1", "train.global_batch=1"};
  if (argc < 5 || argc > 7) return ERROR_USAGE;
  const struct parity_arguments parity = {argc > 5 ? argv[5] : NULL, argc > 6 ? argv[6] : NULL};
  const bool loaded = config_load(&config, argv[2], alone, 2, &e);
  if (!run_open(&run, &config, loaded, RUN_GENERATE, &e)) return run_leave(&run, false, &e);
  const bool good = run_set_parity(&run, &parity, &e) && work(&run, argv, &e);
  return run_leave(&run, good, &e);
}
