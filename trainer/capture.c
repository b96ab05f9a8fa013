#include "trainer/capture.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char route[] = "bf16";

void capture_name(char *text, int size, int64_t block, enum linear_site site, enum tensor t, int64_t update) {
  if (t == TENSOR_W)
    snprintf(text, (size_t)size, "block-%02" PRId64 "/%s/w", block, linear_name(site));
  else
    snprintf(text, (size_t)size, "block-%02" PRId64 "/%s/update-%08" PRId64 "/%s", block, linear_name(site), update,
             tensor_name(t));
}

/* ---- attributes: one table writes and reads them ------------------------------ */

/* The file's numbers; each of them must be there and at least `low`. */
static int numbers_of(struct capture_header *h, const char *name[CAPTURE_FILE_ATTRIBUTES],
                      int64_t *value[CAPTURE_FILE_ATTRIBUTES]) {
  struct attention_shape *a = &h->extent.attention;
  int n = 0;
#define NUMBER(key, where) name[n] = key, value[n++] = &(where)
  NUMBER("n_layers", h->n_layers);
  NUMBER("tokens", h->extent.tokens);
  NUMBER("batch", a->batch);
  NUMBER("seq_len", a->seq_len);
  NUMBER("n_heads", a->n_heads);
  NUMBER("n_kv_heads", a->n_kv_heads);
  NUMBER("head_dim", a->head_dim);
  NUMBER("hidden_size", h->extent.hidden_size);
  NUMBER("ffn_size", h->extent.ffn_size);
  NUMBER("vocab_size", h->extent.vocab_size);
  NUMBER("seed", h->seed);
  NUMBER("update", h->update);
#undef NUMBER
  return n;
}

void capture_file_attributes(const struct capture_header *h, struct hdf5_attribute out[CAPTURE_FILE_ATTRIBUTES]) {
  struct capture_header copy = *h;
  const char *name[CAPTURE_FILE_ATTRIBUTES];
  int64_t *value[CAPTURE_FILE_ATTRIBUTES];
  const int n = numbers_of(&copy, name, value);
  for (int i = 0; i < n; i++) out[i] = (struct hdf5_attribute){.name = name[i], .number = *value[i]};
  out[n] = (struct hdf5_attribute){.name = "format", .text = CAPTURE_FORMAT};
  out[n + 1] = (struct hdf5_attribute){.name = "version", .number = CAPTURE_VERSION};
  out[n + 2] = (struct hdf5_attribute){.name = "route", .text = route};
  out[n + 3] = (struct hdf5_attribute){.name = "trained_route", .text = h->trained};
}

void capture_entry_attributes(const struct capture_entry *c, struct hdf5_attribute out[CAPTURE_ENTRY_ATTRIBUTES]) {
  out[0] = (struct hdf5_attribute){.name = "layer", .number = c->block};
  out[1] = (struct hdf5_attribute){.name = "site", .text = linear_name(c->site)};
  out[2] = (struct hdf5_attribute){.name = "tensor", .text = tensor_name(c->tensor)};
  out[3] = (struct hdf5_attribute){.name = "update", .number = c->update};
  out[4] = (struct hdf5_attribute){.name = "first_sample", .number = c->first_sample};
  out[5] = (struct hdf5_attribute){.name = "route", .text = route};
}

/* ---- reading ------------------------------------------------------------------ */

static bool read_header(struct capture_file *c, const char *path, struct error *e) {
  const char *name[CAPTURE_FILE_ATTRIBUTES];
  int64_t *value[CAPTURE_FILE_ATTRIBUTES], version;
  char text[64];
  if (!hdf5_text(c->file, -1, "format", text, sizeof text) || strcmp(text, CAPTURE_FORMAT) != 0)
    return error_set(e, ERROR_DATA, "%s is not a capture", path) || error_hint(e, "`fp4d capture` writes one");
  if (!hdf5_number(c->file, -1, "version", &version) || version != CAPTURE_VERSION)
    return error_set(e, ERROR_DATA, "%s: a capture of another version than %d", path, CAPTURE_VERSION);
  const int n = numbers_of(&c->header, name, value);
  for (int i = 0; i < n; i++) {
    const bool free_range = value[i] == &c->header.seed || value[i] == &c->header.update;
    const bool there = hdf5_number(c->file, -1, name[i], value[i]);
    if (!there || (!free_range && (*value[i] < 1 || *value[i] > INT32_MAX)))
      return error_set(e, ERROR_DATA, "%s: attribute %s is missing or impossible", path, name[i]);
  }
  const struct attention_shape *a = &c->header.extent.attention;
  if (!hdf5_text(c->file, -1, "trained_route", c->header.trained, sizeof c->header.trained) ||
      a->batch * a->seq_len != c->header.extent.tokens)
    return error_set(e, ERROR_DATA, "%s: the attributes do not fit together", path);
  c->header.extent.head_chunk = c->header.extent.tokens;
  return true;
}

static bool word_of(const struct capture_file *c, int i, const char *name, const char *(*name_of)(int), int count,
                    int *out) {
  char text[32];
  if (!hdf5_text(c->file, i, name, text, sizeof text)) return false;
  for (*out = 0; *out < count; ++*out)
    if (strcmp(text, name_of(*out)) == 0) return true;
  return false;
}

static const char *site_word(int i) { return linear_name((enum linear_site)i); }
static const char *tensor_word(int i) { return tensor_name((enum tensor)i); }

static bool read_entry(const struct capture_file *c, int i, struct capture_entry *out) {
  const struct tensor_slice *s = hdf5_slice(c->file, i);
  int site, tensor;
  *out = (struct capture_entry){.slice = i};
  if (!hdf5_number(c->file, i, "layer", &out->block) || !hdf5_number(c->file, i, "update", &out->update) ||
      !hdf5_number(c->file, i, "first_sample", &out->first_sample) ||
      !word_of(c, i, "site", site_word, LINEAR_SITES, &site) ||
      !word_of(c, i, "tensor", tensor_word, TENSOR_COUNT, &tensor))
    return false;
  out->site = (enum linear_site)site;
  out->tensor = (enum tensor)tensor;
  const struct linear_shape w = linear_shape(&c->header.extent, out->site);
  const int64_t rows = tensor == TENSOR_W ? w.n : c->header.extent.tokens, cols = tensor == TENSOR_DY ? w.n : w.k;
  return s->dtype == DTYPE_BF16 && s->first_row == 0 && s->global_rows == s->rows && s->rows == rows && s->cols == cols &&
         out->block >= 1 && out->block <= c->header.n_layers;
}

/* By update, block and linear; within one W, X, dY in the enum's order. */
static int entry_order(const void *a, const void *b) {
  const struct capture_entry *x = a, *y = b;
  if (x->update != y->update) return x->update < y->update ? -1 : 1;
  if (x->block != y->block) return x->block < y->block ? -1 : 1;
  if (x->site != y->site) return x->site < y->site ? -1 : 1;
  return (int)x->tensor - (int)y->tensor;
}

bool capture_open(struct capture_file *c, const char *path, struct error *e) {
  memset(c, 0, sizeof *c);
  c->file = hdf5_open(path, e);
  if (!c->file) {
    e->code = ERROR_DATA;
    return false;
  }
  c->n = hdf5_slice_count(c->file);
  c->entries = calloc((size_t)c->n + 1, sizeof *c->entries);
  bool good = c->entries ? read_header(c, path, e) : error_set(e, ERROR_SYSTEM, "out of memory");
  for (int i = 0; good && i < c->n; i++)
    good = read_entry(c, i, &c->entries[i]) ||
           error_set(e, ERROR_DATA, "%s: %s is not a captured tensor of this model", path, hdf5_slice(c->file, i)->name);
  if (!good) {
    capture_close(c);
    return false;
  }
  qsort(c->entries, (size_t)c->n, sizeof *c->entries, entry_order);
  return true;
}

void capture_close(struct capture_file *c) {
  hdf5_close(c->file);
  free(c->entries);
  memset(c, 0, sizeof *c);
}

const struct capture_entry *capture_find(const struct capture_file *c, int64_t block, enum linear_site site,
                                         enum tensor t, int64_t update) {
  for (int i = 0; i < c->n; i++) {
    const struct capture_entry *x = &c->entries[i];
    if (x->block == block && x->site == site && x->tensor == t && (t == TENSOR_W || x->update == update)) return x;
  }
  return NULL;
}
