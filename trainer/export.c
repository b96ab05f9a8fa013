#include "trainer/export.h"

#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "checkpoints/llama_names.h"
#include "checkpoints/safetensors.h"
#include "kernels/formats.h"
#include "trainer/export_files.h"

enum { PIECE_ELEMENTS = 8 << 20 };

/* A parameter on its way out. */
struct outgoing {
  const struct param *param;
  char source[128]; /* its tensor in the checkpoint */
  char name[LLAMA_NAME];
  enum dtype stored;
  int64_t global_rows; /* in the checkpoint */
  int64_t group;       /* rows that are moved together */
  int64_t bytes;       /* in the file */
  int shard;
};

struct export {
  struct checkpoint *k;
  const struct export_options *o;
  const char *temporary;
  struct param *params;
  struct outgoing *out; /* in the model's order, later by shard and name */
  int n, n_shards;
  void *stored, *made, *moved; /* a piece as it is read, as it is written, with its rows in their order */
};

/* ---- what goes where -------------------------------------------------------- */

static const struct tensor_slice *find_tensor(const struct checkpoint *k, const char *name) {
  for (int i = 0; i < checkpoint_tensor_count(k); i++)
    if (strcmp(checkpoint_tensor(k, i)->name, name) == 0) return checkpoint_tensor(k, i);
  return NULL;
}

static bool plan_tensor(struct export *x, int i, const struct llama_config *c, int64_t vocab_size, struct error *e) {
  static const char *const prefixes[] = {"master", "param"};
  struct outgoing *t = &x->out[i];
  const struct tensor_slice *found = NULL;
  t->param = &x->params[i];
  for (int p = 0; !found && p < 2; p++) {
    snprintf(t->source, sizeof t->source, "%s/%s", prefixes[p], t->param->name);
    found = find_tensor(x->k, t->source);
  }
  if (!found) return error_set(e, ERROR_CHECKPOINT, "%s holds no tensor %s", checkpoint_path(x->k), t->source);
  if (!llama_name(t->param->name, t->name)) return error_set(e, ERROR_INTERNAL, "%s has no name in a Llama of Hugging Face", t->param->name);
  const bool of_vocabulary = t->param->layer < 0 && t->param->decay; /* the table and the head */
  t->stored = found->dtype;
  t->global_rows = of_vocabulary ? vocab_size : t->param->rows;
  t->group = llama_row_group(&c->model, t->param->name);
  t->bytes = t->param->rows * t->param->cols * (int64_t)dtype_bytes(x->o->dtype);
  return true;
}

/* Files are filled in the model's order. */
static void plan_shards(struct export *x) {
  int64_t filled = 0;
  x->n_shards = 1;
  for (int i = 0; i < x->n; i++) {
    if (x->o->shard_bytes > 0 && filled > 0 && filled + x->out[i].bytes > x->o->shard_bytes) {
      x->n_shards++;
      filled = 0;
    }
    filled += x->out[i].bytes;
    x->out[i].shard = x->n_shards - 1;
  }
}

static int by_shard_and_name(const void *a, const void *b) {
  const struct outgoing *x = a, *y = b;
  return x->shard != y->shard ? x->shard - y->shard : strcmp(x->name, y->name);
}

static bool plan(struct export *x, const struct llama_config *c, int64_t vocab_size, struct error *e) {
  size_t piece = PIECE_ELEMENTS;
  x->n = params_number(&c->model);
  x->params = calloc((size_t)x->n, sizeof *x->params);
  x->out = calloc((size_t)x->n, sizeof *x->out);
  if (!x->params || !x->out) return error_set(e, ERROR_SYSTEM, "out of memory");
  params_list(&c->model, x->params);
  for (int i = 0; i < x->n; i++) {
    if (!plan_tensor(x, i, c, vocab_size, e)) return false;
    const size_t least = (size_t)(x->out[i].group * x->params[i].cols);
    if (least > piece) piece = least;
  }
  plan_shards(x);
  qsort(x->out, (size_t)x->n, sizeof *x->out, by_shard_and_name);
  x->stored = malloc(piece * sizeof(float));
  x->made = malloc(piece * sizeof(float));
  x->moved = malloc(piece * sizeof(float));
  return (x->stored && x->made && x->moved) || error_set(e, ERROR_SYSTEM, "out of memory for a piece of a tensor");
}

/* ---- data ---------------------------------------------------------------------- */

/* n elements of x->stored into x->made, in the type asked for; what is not finite is refused. */
static bool convert(struct export *x, const struct outgoing *t, int64_t first, int64_t n, struct error *e) {
  for (int64_t i = 0; i < n; i++) {
    const float value = t->stored == DTYPE_F32 ? ((const float *)x->stored)[i] : bf16_decode(((const uint16_t *)x->stored)[i]);
    const uint16_t rounded = bf16_encode(value);
    if (!isfinite(value))
      return error_set(e, ERROR_CHECKPOINT, "checkpoint %s: element %" PRId64 " of %s is %g", checkpoint_path(x->k), first + i, t->source,
                       (double)value);
    if (x->o->dtype == DTYPE_F32)
      ((float *)x->made)[i] = value;
    else if (isfinite(bf16_decode(rounded)))
      ((uint16_t *)x->made)[i] = rounded;
    else
      return error_set(e, ERROR_CHECKPOINT, "checkpoint %s: element %" PRId64 " of %s is %g, beyond BF16", checkpoint_path(x->k), first + i,
                       t->source, (double)value);
  }
  return true;
}

static bool write_tensor(struct export *x, const struct outgoing *t, struct safetensors_writer *w, struct error *e) {
  const int64_t cols = t->param->cols;
  int64_t piece = PIECE_ELEMENTS / cols / t->group * t->group;
  if (piece < t->group) piece = t->group;
  for (int64_t row = 0; row < t->param->rows; row += piece) {
    const int64_t rows = t->param->rows - row < piece ? t->param->rows - row : piece;
    struct tensor_slice s = {.dtype = t->stored, .global_rows = t->global_rows, .cols = cols, .first_row = row, .rows = rows, .data = x->stored};
    memcpy(s.name, t->source, sizeof t->source);
    if (!checkpoint_read(x->k, &s, 1, e) || !convert(x, t, row * cols, rows * cols, e)) return false;
    const size_t row_bytes = (size_t)cols * dtype_bytes(x->o->dtype);
    llama_rows_to_half_split(x->moved, x->made, rows, t->group, row_bytes);
    if (!safetensors_put(w, x->moved, (size_t)rows * row_bytes, e)) return false;
  }
  return true;
}

static void shard_name(const struct export *x, int shard, char text[64]) {
  if (x->n_shards == 1)
    snprintf(text, 64, "model.safetensors");
  else
    snprintf(text, 64, "model-%05d-of-%05d.safetensors", shard + 1, x->n_shards);
}

/* Tensors [first, first + n) are a file's. */
static bool write_shard(struct export *x, int first, int n, struct error *e) {
  char name[64], path[PATH_MAX + 80];
  struct safetensors_entry *entries = calloc((size_t)n, sizeof *entries);
  if (!entries) return error_set(e, ERROR_SYSTEM, "out of memory");
  for (int i = 0; i < n; i++) {
    const struct outgoing *t = &x->out[first + i];
    const bool vector = t->param->cols == 1 && !t->param->decay;
    entries[i] = (struct safetensors_entry){.name = t->name, .dtype = x->o->dtype == DTYPE_F32 ? "F32" : "BF16", .n_dims = vector ? 1 : 2,
                                            .shape = {t->param->rows, t->param->cols}, .bytes = t->bytes};
  }
  shard_name(x, x->out[first].shard, name);
  snprintf(path, sizeof path, "%s/%s", x->temporary, name);
  struct safetensors_writer *w = safetensors_create(path, entries, n, e);
  free(entries);
  if (!w) return false;
  bool good = true;
  for (int i = 0; good && i < n; i++) good = write_tensor(x, &x->out[first + i], w, e);
  struct error giving_up;
  return safetensors_finish(w, good ? e : &giving_up) && good;
}

static bool write_index(const struct export *x, struct error *e) {
  char path[PATH_MAX + 80], name[64], *text = NULL;
  size_t bytes = 0;
  int64_t total = 0;
  snprintf(path, sizeof path, "%s/model.safetensors.index.json", x->temporary);
  FILE *out = open_memstream(&text, &bytes);
  if (!out) return error_set(e, ERROR_SYSTEM, "out of memory");
  for (int i = 0; i < x->n; i++) total += x->out[i].bytes;
  fprintf(out, "{\n  \"metadata\": {\n    \"total_size\": %" PRId64 "\n  },\n  \"weight_map\": {", total);
  for (int i = 0; i < x->n; i++) {
    shard_name(x, x->out[i].shard, name);
    fprintf(out, "%s\n    \"%s\": \"%s\"", i ? "," : "", x->out[i].name, name);
  }
  fputs("\n  }\n}\n", out);
  const bool good = (fclose(out) == 0 || error_set(e, ERROR_SYSTEM, "out of memory")) && file_publish(path, text, bytes, ERROR_CHECKPOINT, e);
  free(text);
  return good;
}

static bool write_tensors(struct export *x, struct error *e) {
  for (int first = 0, n; first < x->n; first += n) {
    for (n = 1; first + n < x->n && x->out[first + n].shard == x->out[first].shard; n++) continue;
    if (!write_shard(x, first, n, e)) return false;
  }
  return x->n_shards == 1 || write_index(x, e);
}

bool export_llama(struct checkpoint *k, const struct llama_config *c, int64_t vocab_size, const struct export_options *o,
                  struct error *e) {
  char temporary[PATH_MAX];
  if (!export_begin(o->folder, temporary, e)) return false;
  struct export x = {.k = k, .o = o, .temporary = temporary};
  const bool good = plan(&x, c, vocab_size, e) && export_configs(temporary, c, o->dtype, e) && export_copies(temporary, &o->tokenizer, e) &&
                    write_tensors(&x, e) && export_publish(temporary, o->folder, e);
  if (good && c->model.hidden_size % c->model.n_heads != 0)
    log_warning("%s: hidden_size %" PRId64 " is no multiple of num_attention_heads %" PRId64 ": transformers 5 refuses that", o->folder,
                c->model.hidden_size, c->model.n_heads);
  int64_t bytes = 0;
  for (int i = 0; good && i < x.n; i++) bytes += x.out[i].bytes;
  if (good)
    log_info("%s: %d tensors, %" PRId64 " bytes of %s in %d file%s", o->folder, x.n, bytes, o->dtype == DTYPE_F32 ? "FP32" : "BF16", x.n_shards,
             x.n_shards == 1 ? "" : "s");
  else
    export_abandon(temporary);
  free(x.params);
  free(x.out);
  free(x.stored);
  free(x.made);
  free(x.moved);
  return good;
}
