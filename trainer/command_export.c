/* fp4d export: a checkpoint as a Hugging Face model folder. */
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "data/tokenizer.h"
#include "trainer/command.h"
#include "trainer/config.h"
#include "trainer/export.h"
#include "trainer/state.h"
#include "trainer/vocabulary.h"

struct export_arguments {
  const char *checkpoint, *folder, *dtype;
  struct argument_list tokenizer;
  int64_t shard_bytes, vocab_size, bos, eos;
};

const struct argument command_export_arguments[] = {
    {.name = "CKPT", .type = ARGUMENT_WORD, .offset = offsetof(struct export_arguments, checkpoint),
     .help = "a step folder, a folder of them, or a run's folder (then the newest whole one)"},
    {.name = "DIR", .type = ARGUMENT_WORD, .offset = offsetof(struct export_arguments, folder), .help = "the folder to make"},
    {.name = "--dtype", .value = "bf16|fp32", .type = ARGUMENT_TEXT, .offset = offsetof(struct export_arguments, dtype),
     .help = "type of every tensor (default: the run's train.param_dtype)"},
    {.name = "--shard-bytes", .value = "N", .type = ARGUMENT_INTEGER, .offset = offsetof(struct export_arguments, shard_bytes),
     .low = 0, .high = INT64_MAX, .help = "most bytes of tensors in a file; 0: all in one (default 5000000000)"},
    {.name = "--tokenizer", .value = "PATH", .type = ARGUMENT_REPEATED, .offset = offsetof(struct export_arguments, tokenizer),
     .help = "a tokenizer's file, or a folder of its files, copied byte for byte"},
    {.name = "--vocab-size", .value = "N", .type = ARGUMENT_INTEGER, .offset = offsetof(struct export_arguments, vocab_size),
     .low = 1, .high = INT32_MAX, .help = "leave out the rows from N on (default: those that the training stream's tokenizer has no id for, where it is known)"},
    {.name = "--bos", .value = "ID", .type = ARGUMENT_INTEGER, .offset = offsetof(struct export_arguments, bos), .low = 0,
     .high = INT32_MAX, .help = "begin-of-text id for config.json (default: the training stream's, else the tokenizer's)"},
    {.name = "--eos", .value = "ID", .type = ARGUMENT_INTEGER, .offset = offsetof(struct export_arguments, eos), .low = 0,
     .high = INT32_MAX, .help = "end-of-text id, likewise"},
    {0}};

static void take_ids(struct llama_config *out, int32_t bos, int32_t eos) {
  out->bos = bos >= 0 ? json_integer(bos) : NULL;
  out->eos = eos >= 0 ? json_integer(eos) : NULL;
}

static void cut_padding(const struct stream_info *info, struct llama_config *out) {
  const int64_t rows = out->model.vocab_size, kept = vocabulary_rows(info, rows);
  if (kept == rows) return;
  log_info("tokenizer %s has %lld ids, the model %lld rows: those above are padding and left out; --vocab-size %lld keeps them", info->tokenizer,
           (long long)kept, (long long)rows, (long long)rows);
  out->model.vocab_size = kept;
}

/* Ids that the checkpoint's origin knows: what it was imported with; the stream that it was
 * trained on where that is at hand; else its tokenizer, likewise.  NULL each: unknown.
 * With `cut` the vocabulary ends where that stream's does. */
static void find_ids(const struct checkpoint *k, const struct config *c, bool cut, struct llama_config *out) {
  json_t *meta = json_loads(checkpoint_meta(k), 0, NULL);
  const json_t *imported = json_object_get(meta, "imported");
  struct stream *s = vocabulary_stream(k, c);
  if (imported) {
    out->bos = json_incref(json_object_get(imported, "bos_token_id"));
    out->eos = json_incref(json_object_get(imported, "eos_token_id"));
    const int64_t positions = json_integer_value(json_object_get(imported, "max_position_embeddings"));
    if (positions > 0) out->max_position = positions;
  } else if (s) {
    const struct stream_info *info = stream_info(s);
    take_ids(out, info->bos, info->eos);
    if (cut) cut_padding(info, out);
  } else {
    struct error none;
    struct tokenizer *t = tokenizer_open(c->data.tokenizer, &none);
    if (t) take_ids(out, tokenizer_info(t)->bos, tokenizer_info(t)->eos);
    tokenizer_close(t);
  }
  if (s) stream_close(s);
  json_decref(meta);
}

static void give_id(json_t **id, int64_t given) {
  if (given < 0) return;
  json_decref(*id);
  *id = json_integer(given);
}

/* Every id of the list, or the one. */
static bool id_fits(const json_t *id, const char *flag, int64_t vocab_size, struct error *e) {
  const size_t n = json_is_array(id) ? json_array_size(id) : json_is_integer(id);
  for (size_t i = 0; i < n; i++) {
    const int64_t value = json_integer_value(json_is_array(id) ? json_array_get(id, i) : id);
    if (value < 0 || value >= vocab_size)
      return error_set(e, ERROR_USAGE, "%s %lld: the vocabulary has %lld ids", flag, (long long)value, (long long)vocab_size);
  }
  return true;
}

static bool settle(const struct export_arguments *a, const struct checkpoint *k, const struct config *c, struct llama_config *out,
                   struct export_options *o, struct error *e) {
  *out = (struct llama_config){.model = c->model.shape, .max_position = c->train.seq_len};
  *o = (struct export_options){.folder = a->folder, .dtype = c->train.param_dtype, .shard_bytes = a->shard_bytes, .tokenizer = a->tokenizer};
  if (a->dtype && strcmp(a->dtype, "bf16") != 0 && strcmp(a->dtype, "fp32") != 0)
    return error_set(e, ERROR_USAGE, "--dtype %s: bf16 or fp32 is wanted", a->dtype);
  if (a->dtype) o->dtype = strcmp(a->dtype, "bf16") == 0 ? DTYPE_BF16 : DTYPE_F32;
  if (a->vocab_size > c->model.shape.vocab_size)
    return error_set(e, ERROR_USAGE, "--vocab-size %lld: the model has %lld rows", (long long)a->vocab_size, (long long)c->model.shape.vocab_size);
  find_ids(k, c, a->vocab_size == 0, out);
  if (a->vocab_size > 0) out->model.vocab_size = a->vocab_size;
  give_id(&out->bos, a->bos);
  give_id(&out->eos, a->eos);
  return id_fits(out->bos, "--bos", out->model.vocab_size, e) && id_fits(out->eos, "--eos", out->model.vocab_size, e);
}

int command_export(int argc, char **argv) {
  struct export_arguments a = {.shard_bytes = 5000000000, .bos = -1, .eos = -1};
  struct error e = {0};
  if (!arguments_parse(command_export_arguments, argc, argv, &a, &e)) return command_fail(&e);
  struct checkpoint *k = state_find(a.checkpoint, &e);
  if (!k) return command_fail(&e);
  struct config *config = malloc(sizeof *config);
  char *text = state_saved_config(k, &e);
  struct llama_config llama = {0};
  struct export_options options;
  bool good = text && (config || error_set(&e, ERROR_SYSTEM, "out of memory")) &&
              config_parse(config, text, checkpoint_path(k), NULL, 0, &e) && settle(&a, k, config, &llama, &options, &e) &&
              export_llama(k, &llama, config->model.shape.vocab_size, &options, &e);
  llama_config_free(&llama);
  free(text);
  free(config);
  checkpoint_close(k);
  return good ? ERROR_NONE : command_fail(&e);
}
