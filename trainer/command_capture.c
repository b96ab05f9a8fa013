/* fp4d capture: the tensors that a route would quantise, from a checkpoint.
 *
 * Forward and backward of the batches that training would read next, with the
 * checkpoint's weights, which are not changed.  The model runs under `bf16`,
 * whatever route trained it, where every operand exists as it is. */
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "checkpoints/store.h"
#include "trainer/capture.h"
#include "trainer/command.h"
#include "trainer/plan.h"
#include "trainer/run.h"
#include "trainer/state.h"

struct capture_arguments {
  const char *checkpoint, *config, *out, *layers;
  struct argument_list sets;
  int64_t updates;
};

const struct argument command_capture_arguments[] = {
    {.name = "CKPT", .type = ARGUMENT_WORD, .offset = offsetof(struct capture_arguments, checkpoint),
     .help = "a step folder, a folder of them, or a run's folder (then the newest whole one)"},
    ARGUMENT_CONFIG(struct capture_arguments, config),
    ARGUMENT_SETS(struct capture_arguments, sets),
    {.name = "--out", .value = "FILE.h5", .type = ARGUMENT_TEXT, .offset = offsetof(struct capture_arguments, out),
     .needed = true, .help = "where to write, whole or not at all"},
    {.name = "--layers", .value = "1,4", .type = ARGUMENT_TEXT, .offset = offsetof(struct capture_arguments, layers),
     .help = "blocks, counted from 1 (default: first, middle and last)"},
    {.name = "--updates", .value = "N", .type = ARGUMENT_INTEGER, .offset = offsetof(struct capture_arguments, updates),
     .low = 1, .high = 10000, .help = "batches, one after the other (default 1); of each its first micro-batch runs"},
    {0}};

struct capture {
  struct run *run;
  struct hdf5_writer *out;
  bool *wanted;               /* by block */
  bool *seen;                 /* by block, site and tensor: of this update; W: of all */
  char *staging;
  int64_t update, first_sample; /* of the batch that runs */
  int64_t written, bytes;
  bool good;
  struct error *e;
};

/* ---- arguments ------------------------------------------------------------------ */

static bool parse_layers(const char *text, int64_t n_layers, bool *wanted, struct error *e) {
  if (!text) {
    wanted[0] = wanted[(n_layers - 1) / 2] = wanted[n_layers - 1] = true;
    return true;
  }
  for (const char *at = text;;) {
    char *end;
    const long long block = strtoll(at, &end, 10);
    if (end == at || *at < '0' || *at > '9' || (*end != 0 && *end != ','))
      return error_set(e, ERROR_USAGE, "capture: --layers '%.60s': numbers like 1,4 are wanted", text);
    if (block < 1 || block > n_layers)
      return error_set(e, ERROR_USAGE, "capture: --layers %lld: the model has blocks 1 to %" PRId64, block, n_layers);
    wanted[block - 1] = true;
    if (*end == 0) return true;
    at = end + 1;
  }
}

/* ---- tensors --------------------------------------------------------------------- */

static void on_tensor(void *context, int layer, enum linear_site site, enum tensor tensor, const struct matrix *values) {
  struct capture *c = context;
  bool *seen = &c->seen[(layer * LINEAR_SITES + (int)site) * TENSOR_COUNT + (int)tensor];
  if (!c->good || !c->wanted[layer] || *seen) return;
  *seen = true;
  const struct kernels *k = c->run->device->k;
  const size_t bytes = (size_t)(values->rows * values->cols) * dtype_bytes(values->dtype);
  const struct capture_entry entry = {.block = layer + 1,
                                      .site = site,
                                      .tensor = tensor,
                                      .update = tensor == TENSOR_W ? c->run->update : c->update,
                                      .first_sample = tensor == TENSOR_W ? 0 : c->first_sample};
  struct tensor_slice s = {.dtype = values->dtype, .global_rows = values->rows, .cols = values->cols,
                           .rows = values->rows, .data = c->staging};
  struct hdf5_attribute attributes[CAPTURE_ENTRY_ATTRIBUTES];
  capture_name(s.name, sizeof s.name, entry.block, site, tensor, entry.update);
  capture_entry_attributes(&entry, attributes);
  k->download(c->run->device, c->staging, values->data, bytes);
  c->good = k->synchronize(c->run->device, c->e) && hdf5_add(c->out, &s, attributes, CAPTURE_ENTRY_ATTRIBUTES, c->e);
  c->written++;
  c->bytes += (int64_t)bytes;
}

/* The whole batch is read, as training does, to divide by its targets: backwards, so that
 * its first micro-batch is there in the end, which runs. */
static bool run_update(struct capture *c, struct error *e) {
  struct run *run = c->run;
  const struct kernels *k = run->device->k;
  const int64_t seq = run->config.train.seq_len;
  int64_t targets = 0;
  for (int64_t i = run->config.train.global_batch - 1; i >= 0; i--) {
    const int64_t at = i % run->local_batch * seq;
    const struct data_sample s = {run->host_inputs + at, run->host_targets + at, run->host_starts ? run->host_starts + at : NULL, NULL};
    if (!data_sample(&run->train_order, c->first_sample + i, &s, e)) return false;
    for (int64_t t = 0; t < seq; t++) targets += s.targets[t] >= 0;
  }
  if (targets == 0) return error_set(e, ERROR_DATA, "update %" PRId64 " has no target token", c->update);
  model_clear_gradients(run->model);
  struct micro_batch b = run_upload(run, run->host_inputs, run->host_targets, run->host_starts);
  b.first_sample = (uint64_t)c->first_sample;
  b.update = (uint32_t)c->update;
  b.seed = (uint64_t)run->config.run.seed;
  model_forward_backward(run->model, &b, (float)(1.0 / (double)targets), run->nll);
  return k->synchronize(run->device, e) && c->good;
}

/* By what its checkpoint says. */
static void trained_route(const struct checkpoint *k, char *text, int size) {
  json_t *meta = json_loads(checkpoint_meta(k), 0, NULL);
  const char *name = json_string_value(json_object_get(meta, "route"));
  snprintf(text, (size_t)size, "%s", name ? name : "unknown");
  json_decref(meta);
}

static bool write_all(struct capture *c, const struct capture_arguments *a, const struct checkpoint *k, struct error *e) {
  struct run *run = c->run;
  const struct config *config = &run->config;
  const int64_t blocks = config->model.shape.n_layers;
  struct capture_header header = {.extent = plan_extent(&run->config), .n_layers = blocks, .seed = config->run.seed, .update = run->update};
  struct hdf5_attribute attributes[CAPTURE_FILE_ATTRIBUTES];
  trained_route(k, header.trained, sizeof header.trained);
  capture_file_attributes(&header, attributes);
  bool good = hdf5_add(c->out, NULL, attributes, CAPTURE_FILE_ATTRIBUTES, e);
  model_on_tensor(run->model, on_tensor, c);
  for (int64_t i = 0; good && i < a->updates; i++) {
    c->update = run->update + 1 + i;
    c->first_sample = config->train.overfit_one_batch ? 0 : run->samples + i * config->train.global_batch;
    for (int64_t t = 0; i > 0 && t < blocks * LINEAR_SITES * TENSOR_COUNT; t++)
      if (t % TENSOR_COUNT != TENSOR_W) c->seen[t] = false;
    good = run_update(c, e);
  }
  return good;
}

static bool capture(struct run *run, const struct capture_arguments *a, struct error *e) {
  if (run->world != 1) return error_set(e, ERROR_USAGE, "capture runs in one process, %d were started", run->world);
  const int64_t blocks = run->config.model.shape.n_layers;
  const struct extent x = plan_extent(&run->config);
  struct capture c = {.run = run, .good = true, .e = e};
  c.wanted = calloc((size_t)blocks, sizeof *c.wanted);
  c.seen = calloc((size_t)(blocks * LINEAR_SITES * TENSOR_COUNT), sizeof *c.seen);
  c.staging = malloc((size_t)plan_largest_tensor(&x) * sizeof(uint16_t));
  bool good = c.wanted && c.seen && c.staging;
  if (!good) error_set(e, ERROR_SYSTEM, "out of memory");
  good = good && parse_layers(a->layers, blocks, c.wanted, e);
  struct checkpoint *k = good ? state_find(a->checkpoint, e) : NULL;
  good = k && state_read_parameters(run, k, e) && state_read_counters(run, k, e);
  if (good) {
    char temporary[STORE_PATH];
    good = snprintf(temporary, sizeof temporary, "%s.tmp", a->out) < (int)sizeof temporary ||
           error_set(e, ERROR_USAGE, "capture: the path of --out is too long");
    if (good) c.out = hdf5_create(temporary, e);
    good = c.out != NULL && write_all(&c, a, k, e);
    if (c.out) good = hdf5_finish(c.out, e) && good;
    good = good && (rename(temporary, a->out) == 0 || error_errno(e, ERROR_SYSTEM, "cannot rename %s to %s", temporary, a->out)) &&
           file_sync_parent(a->out, ERROR_SYSTEM, e);
    if (!good) unlink(temporary);
  }
  char updates[64];
  snprintf(updates, sizeof updates, a->updates > 1 ? "updates %" PRId64 " to %" PRId64 : "update %" PRId64, run->update + 1,
           run->update + a->updates);
  if (good)
    printf("%s: %" PRId64 " tensors, %" PRId64 " bytes, of %s after %s, run under bf16\n", a->out, c.written, c.bytes, updates,
           checkpoint_path(k));
  checkpoint_close(k);
  free(c.wanted);
  free(c.seen);
  free(c.staging);
  return good;
}

int command_capture(int argc, char **argv) {
  struct capture_arguments a = {.updates = 1};
  struct error e = {0};
  if (!arguments_parse(command_capture_arguments, argc, argv, &a, &e)) return command_fail(&e);
  struct config config;
  struct run run;
  bool loaded = config_load(&config, a.config, a.sets.item, a.sets.n, &e);
  if (loaded) {
    config.run.ranks = config.train.accumulation = 0; /* one process does a share's work */
    loaded = route_named("bf16", (int)config.model.shape.n_layers, &config.route, &e);
  }
  if (!run_open(&run, &config, loaded, RUN_TRAIN, &e)) return run_leave(&run, false, &e);
  const bool good = capture(&run, &a, &e);
  return run_leave(&run, good, &e);
}
