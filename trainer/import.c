#include "trainer/import.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/log.h"
#include "checkpoints/checkpoint.h"
#include "checkpoints/llama_config.h"
#include "checkpoints/llama_names.h"
#include "checkpoints/safetensors.h"
#include "kernels/formats.h"
#include "model/problems.h"
#include "trainer/config.h"
#include "trainer/record.h"
#include "trainer/state.h"
#include "trainer/version.h"

enum { MOST_THREADS = 8 }; /* that compress: files come in no faster */

/* A parameter on its way in. */
struct incoming {
  const struct param *param;
  const struct safetensors_tensor *tensor;
};

struct import {
  const char *from;
  struct llama_config llama;
  struct safetensors *files;
  struct param *params;
  struct incoming *in;
  int n;
  enum dtype dtype; /* of the checkpoint */
};

/* ---- what is there ---------------------------------------------------------- */

static bool of_type(const struct safetensors_tensor *t, const char *dtype) { return strcmp(t->dtype, dtype) == 0; }

/* A model whose head is its table may carry that table twice: then equal to the bit. */
static bool check_tied_head(const struct import *x, struct error *e) {
  enum { PIECE = 1 << 20 };
  const struct safetensors_tensor *head = safetensors_find(x->files, "lm_head.weight"), *table = x->in[0].tensor;
  if (!x->llama.model.tied || !head) return true;
  char *pieces = malloc(2 * (size_t)PIECE);
  if (!pieces) return error_set(e, ERROR_SYSTEM, "out of memory");
  bool same = head->bytes == table->bytes && of_type(head, table->dtype), good = true;
  for (int64_t at = 0; good && same && at < head->bytes; at += PIECE) {
    const size_t n = head->bytes - at < PIECE ? (size_t)(head->bytes - at) : PIECE;
    good = safetensors_read(x->files, head, at, pieces, n, e) && safetensors_read(x->files, table, at, pieces + PIECE, n, e);
    same = good && memcmp(pieces, pieces + PIECE, n) == 0;
  }
  free(pieces);
  if (good && !same)
    good = error_set(e, ERROR_CHECKPOINT, "%s: tie_word_embeddings is true, but lm_head.weight is not model.embed_tokens.weight", x->from);
  return good;
}

static void check_tensor(struct import *x, int i, struct problems *p) {
  char name[LLAMA_NAME];
  const struct param *want = &x->params[i];
  const bool vector = want->cols == 1 && !want->decay;
  if (!llama_name(want->name, name)) {
    problems_add(p, "%s has no name there", want->name);
    return;
  }
  const struct safetensors_tensor *t = safetensors_find(x->files, name);
  x->in[i] = (struct incoming){want, t};
  if (!t) {
    problems_add(p, "tensor %s is missing", name);
    return;
  }
  if (t->n_dims != (vector ? 1 : 2) || t->shape[0] != want->rows || (!vector && t->shape[1] != want->cols)) {
    char shape[200] = "";
    for (int d = 0; d < t->n_dims; d++)
      snprintf(shape + strlen(shape), sizeof shape - strlen(shape), "%s%" PRId64, d ? ", " : "", t->shape[d]);
    if (vector)
      problems_add(p, "tensor %s is [%s], config.json makes it [%" PRId64 "]", name, shape, want->rows);
    else
      problems_add(p, "tensor %s is [%s], config.json makes it [%" PRId64 ", %" PRId64 "]", name, shape, want->rows, want->cols);
  }
  if (!of_type(t, "BF16") && !of_type(t, "F32") && !of_type(t, "F16"))
    problems_add(p, "tensor %s is of type %s: only BF16, F32 and F16 can be represented", name, t->dtype);
  if (!of_type(t, "BF16")) x->dtype = DTYPE_F32;
}

static bool is_wanted(const struct import *x, const struct safetensors_tensor *t) {
  for (int i = 0; i < x->n; i++)
    if (x->in[i].tensor == t) return true;
  return llama_name_is_derived(t->name) || (x->llama.model.tied && strcmp(t->name, "lm_head.weight") == 0);
}

static bool look(struct import *x, struct error *e) {
  if (!llama_config_read(x->from, &x->llama, e)) return false;
  x->files = safetensors_open(x->from, e);
  if (!x->files) return false;
  x->n = params_number(&x->llama.model);
  x->params = calloc((size_t)x->n, sizeof *x->params);
  x->in = calloc((size_t)x->n, sizeof *x->in);
  if (!x->params || !x->in) return error_set(e, ERROR_SYSTEM, "out of memory");
  params_list(&x->llama.model, x->params);
  x->dtype = DTYPE_BF16;
  struct problems p = {.error = e, .code = ERROR_CHECKPOINT};
  for (int i = 0; i < x->n; i++) check_tensor(x, i, &p);
  for (int i = 0; i < safetensors_count(x->files); i++)
    if (!is_wanted(x, safetensors_tensor(x->files, i)))
      problems_add(&p, "tensor %s of %s is none of a Llama's", safetensors_tensor(x->files, i)->name,
                   safetensors_path(x->files, safetensors_tensor(x->files, i)));
  if (!problems_none(&p)) return error_context(e, "%s", x->from);
  return check_tied_head(x, e);
}

/* ---- tensors ----------------------------------------------------------------- */

/* FP16 (IEEE 754 binary16) is a subset of FP32. */
static float f16_decode(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
  if (exponent == 31) return f32_from_bits(sign | 0x7f800000u | fraction << 13);
  if (exponent > 0) return f32_from_bits(sign | (exponent + 112) << 23 | fraction << 13);
  const float small = (float)fraction * 0x1p-24f;
  return sign ? -small : small;
}

/* In place from the back: an element never becomes narrower. */
static void widen(void *data, const char *dtype, int64_t n) {
  float *to = data;
  const uint16_t *from = data;
  if (strcmp(dtype, "F32") == 0) return;
  const bool half = strcmp(dtype, "F16") == 0;
  for (int64_t i = n - 1; i >= 0; i--) {
    uint16_t code;
    memcpy(&code, (const char *)from + (size_t)i * sizeof code, sizeof code);
    const float value = half ? f16_decode(code) : bf16_decode(code);
    memcpy((char *)to + (size_t)i * sizeof value, &value, sizeof value);
  }
}

static bool check_finite(const struct import *x, const struct safetensors_tensor *t, const void *data, int64_t n, struct error *e) {
  for (int64_t i = 0; i < n; i++) {
    const float value = x->dtype == DTYPE_F32 ? ((const float *)data)[i] : bf16_decode(((const uint16_t *)data)[i]);
    if (!isfinite(value))
      return error_set(e, ERROR_CHECKPOINT, "%s: element %" PRId64 " of tensor %s is %g", safetensors_path(x->files, t), i, t->name, (double)value);
  }
  return true;
}

static bool take_tensor(const struct import *x, const struct incoming *in, struct checkpoint_writer *w, void *theirs, void *ours,
                        struct error *e) {
  const struct param *p = in->param;
  const int64_t n = p->rows * p->cols;
  if (!safetensors_read(x->files, in->tensor, 0, theirs, (size_t)in->tensor->bytes, e)) return false;
  if (x->dtype == DTYPE_F32) widen(theirs, in->tensor->dtype, n);
  if (!check_finite(x, in->tensor, theirs, n, e)) return false;
  llama_rows_to_interleaved(ours, theirs, p->rows, llama_row_group(&x->llama.model, p->name), (size_t)p->cols * dtype_bytes(x->dtype));
  struct tensor_slice s = {.dtype = x->dtype, .global_rows = p->rows, .cols = p->cols, .rows = p->rows, .data = ours};
  snprintf(s.name, sizeof s.name, "param/%s", p->name);
  return checkpoint_add(w, &s, 1, e);
}

static bool take_tensors(const struct import *x, struct checkpoint_writer *w, struct error *e) {
  size_t largest = 1;
  for (int i = 0; i < x->n; i++) {
    const size_t bytes = (size_t)(x->params[i].rows * x->params[i].cols) * dtype_bytes(x->dtype);
    if (bytes > largest) largest = bytes;
  }
  void *theirs = malloc(largest), *ours = malloc(largest);
  bool good = (theirs && ours) || error_set(e, ERROR_SYSTEM, "out of memory for the largest tensor, %zu bytes", largest);
  for (int i = 0; good && i < x->n; i++) good = take_tensor(x, &x->in[i], w, theirs, ours, e);
  free(theirs);
  free(ours);
  return good;
}

/* ---- configuration and meta ----------------------------------------------------- */

static void write_number(FILE *out, const char *before, double x) {
  char text[LLAMA_NUMBER];
  llama_number(x, text);
  fprintf(out, "%s%s\n", before, text);
}

static void write_model(const struct model_config *m, FILE *out) {
  const struct rope_scaling *s = &m->rope_scaling;
  fprintf(out, "model:\n  vocab_size: %" PRId64 "\n  hidden_size: %" PRId64 "\n  ffn_size: %" PRId64 "\n  n_layers: %" PRId64, m->vocab_size,
          m->hidden_size, m->ffn_size, m->n_layers);
  fprintf(out, "\n  n_heads: %" PRId64 "\n  n_kv_heads: %" PRId64 "\n  head_dim: %" PRId64 "\n  tied: %s\n", m->n_heads, m->n_kv_heads,
          m->head_dim, m->tied ? "true" : "false");
  write_number(out, "  norm_eps: ", m->norm_eps);
  write_number(out, "  rope_theta: ", m->rope_theta);
  if (!s->enabled) {
    fputs("  rope_scaling: none\n", out);
    return;
  }
  write_number(out, "  rope_scaling:\n    factor: ", s->factor);
  write_number(out, "    low_freq_factor: ", s->low_freq_factor);
  write_number(out, "    high_freq_factor: ", s->high_freq_factor);
  fprintf(out, "    original_max_position: %" PRId64 "\n", s->original_max_position);
}

/* The tokenizer's file beside the model as a setting; without one data.tokenizer is "unknown". */
static void find_tokenizer(const struct import *x, char setting[CONFIG_TEXT + 32]) {
  static const char *const names[] = {"tokenizer.json", "tokenizer.model"};
  for (int i = 0; i < 2; i++) {
    const int n = snprintf(setting, CONFIG_TEXT + 32, "data.tokenizer=%s/%s", x->from, names[i]);
    if (n < CONFIG_TEXT && file_exists(strchr(setting, '=') + 1)) return;
  }
  snprintf(setting, CONFIG_TEXT + 32, "data.tokenizer=unknown");
}

/* A whole configuration round the model, as every checkpoint carries one; its data are none. */
static char *whole_config(const struct import *x, struct error *e) {
  char *text = NULL, *resolved = NULL;
  size_t bytes = 0;
  FILE *out = open_memstream(&text, &bytes);
  struct config *c = malloc(sizeof *c);
  char tokenizer[CONFIG_TEXT + 32];
  const char *const settings[] = {tokenizer};
  find_tokenizer(x, tokenizer);
  if (out && c) {
    const int64_t context = x->llama.max_position;
    write_model(&x->llama.model, out);
    fprintf(out, "train: {param_dtype: %s, master: false, seq_len: %" PRId64 ", global_batch: 1, local_batch: 1}\n", x->dtype == DTYPE_F32 ? "fp32" : "bf16",
            context >= 1 && context < 8192 ? context : 8192);
    fputs("run: {name: imported}\ndata: {train: none}\n", out);
    if (x->dtype == DTYPE_F32) fputs("route: fp32\n", out);
  }
  if (!out || fclose(out) != 0 || !c)
    error_set(e, ERROR_SYSTEM, "out of memory");
  else if (config_parse(c, text, x->from, settings, 1, e) && !(resolved = config_dump(c)))
    error_set(e, ERROR_SYSTEM, "out of memory");
  free(text);
  free(c);
  return resolved;
}

static char *meta_text(const struct import *x, const char *config) {
  json_t *meta = json_object(), *imported = json_object();
  record_integer(meta, "format", STATE_META_FORMAT);
  record_integer(meta, "update", 0);
  record_integer(meta, "applied", 0);
  record_integer(meta, "samples", 0);
  record_integer(meta, "tokens", 0);
  record_text(meta, "build", version_build());
  record_text(meta, "config", config);
  record_hash(meta, "config_hash", hash_bytes(config, strlen(config)));
  record_text(imported, "from", x->from);
  record_integer(imported, "max_position_embeddings", x->llama.max_position);
  json_object_set(imported, "bos_token_id", x->llama.bos);
  json_object_set(imported, "eos_token_id", x->llama.eos);
  json_object_set_new(meta, "imported", imported);
  char *text = record_dump(meta);
  json_decref(meta);
  return text;
}

static bool write_yaml(const struct import *x, const char *path, struct error *e) {
  char *text = NULL;
  size_t bytes = 0;
  FILE *out = open_memstream(&text, &bytes);
  if (!out) return error_set(e, ERROR_SYSTEM, "out of memory");
  write_model(&x->llama.model, out);
  const bool good = (fclose(out) == 0 || error_set(e, ERROR_SYSTEM, "out of memory")) && file_publish(path, text, bytes, ERROR_SYSTEM, e);
  free(text);
  return good;
}

static bool make(struct import *x, const char *folder, const char *yaml, enum checkpoint_compression compression, struct error *e) {
  char *config = whole_config(x, e), *meta = config ? meta_text(x, config) : NULL;
  if (config && !meta) error_set(e, ERROR_SYSTEM, "out of memory");
  struct threads *threads = meta ? threads_create(threads_available() < MOST_THREADS ? threads_available() : MOST_THREADS, e) : NULL;
  struct checkpoint_writer *w = threads ? checkpoint_create(folder, 0, compression, threads, e) : NULL;
  bool good = w != NULL;
  if (w) {
    good = take_tensors(x, w, e) && (!yaml || write_yaml(x, yaml, e));
    good = checkpoint_finish(w, good ? meta : NULL, e) && good;
  }
  threads_destroy(threads);
  free(config);
  free(meta);
  return good;
}

bool import_llama(const char *from, const char *folder, const char *yaml, enum checkpoint_compression compression, struct error *e) {
  struct import x = {.from = from};
  const bool good = look(&x, e) && make(&x, folder, yaml, compression, e);
  if (good)
    log_info("%s/step-00000000: %" PRId64 " parameters in %d tensors, %s", folder, model_config_param_count(&x.llama.model), x.n,
             x.dtype == DTYPE_F32 ? "FP32" : "BF16");
  safetensors_close(x.files);
  llama_config_free(&x.llama);
  free(x.params);
  free(x.in);
  return good;
}
