/* Checkpoints: rank files, step folders, folders of steps. */
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "checkpoints/checkpoint.h"
#include "checkpoints/hdf5.h"
#include "checkpoints/manifest.h"
#include "checkpoints/store.h"
#include "trainer/capture.h"
#include "trainer/inspect.h"

static int64_t slice_bytes(const struct tensor_slice *s) {
  return s->rows * s->cols * (int64_t)dtype_bytes(s->dtype);
}

/* ---- a rank's file ---------------------------------------------------------- */

/* Reads every slice: HDF5 has no checksum of its own, but a broken structure shows. */
static bool read_slices(struct hdf5_file *f, struct error *e) {
  bool good = true;
  for (int i = 0; good && i < hdf5_slice_count(f); i++) {
    const struct tensor_slice *s = hdf5_slice(f, i);
    void *data = malloc((size_t)slice_bytes(s) + 1);
    good = data ? hdf5_read(f, i, 0, s->rows, data, e) : error_set(e, ERROR_SYSTEM, "out of memory for %s", s->name);
    free(data);
  }
  return good;
}

/* The manifest beside the file, where there is one (*known), knows its checksum. */
static bool check_rank_file(const char *path, bool *known, struct error *e) {
  const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
  char folder[STORE_PATH] = ".", beside[STORE_PATH + 16];
  if (slash) snprintf(folder, sizeof folder, "%.*s", slash == path ? 1 : (int)(slash - path), path);
  snprintf(beside, sizeof beside, "%s/manifest.json", folder);
  struct manifest m;
  *known = file_exists(beside);
  if (!*known) return true;
  if (!manifest_load(folder, &m, e)) return false;
  const struct manifest_file *entry = NULL;
  for (int i = 0; i < m.n_files && !entry; i++)
    if (strcmp(m.files[i].name, name) == 0) entry = &m.files[i];
  const bool good = entry ? manifest_check(folder, entry, true, e)
                          : error_set(e, ERROR_CHECKPOINT, "%s does not name %s", beside, name);
  manifest_free(&m);
  return good;
}

bool inspect_rank_file(const struct inspection *in, struct error *e) {
  bool known = false;
  if (in->verify && !check_rank_file(in->path, &known, e)) return false; /* before the HDF5 library sees it */
  struct hdf5_file *f = hdf5_open(in->path, e);
  if (!f) return false;
  int64_t bytes = 0;
  const int n = hdf5_slice_count(f);
  for (int i = 0; i < n; i++) bytes += slice_bytes(hdf5_slice(f, i));
  char format[32];
  const bool capture = hdf5_text(f, -1, "format", format, sizeof format) && strcmp(format, CAPTURE_FORMAT) == 0;
  printf("%s: %s\n", in->path, capture ? "a capture of a model's linears" : "one rank's file of a checkpoint");
  inspect_line("slices", "%d, %" PRId64 " bytes, in a file of %" PRId64, n, bytes, file_size(in->path));
  const bool good = !in->verify || read_slices(f, e);
  if (good && in->verify)
    inspect_line("verified", "every slice can be read; %s",
                 known ? "size and checksum are the manifest's" : "no manifest.json lies beside it to compare checksums with");
  printf("  %-48s %-5s %10s %8s %10s %14s\n", "tensor", "type", "rows", "cols", "first row", "of rows");
  for (int i = 0; i < n; i++) {
    const struct tensor_slice *s = hdf5_slice(f, i);
    printf("  %-48s %-5s %10" PRId64 " %8" PRId64 " %10" PRId64 " %14" PRId64 "\n", s->name, dtype_name(s->dtype), s->rows,
           s->cols, s->first_row, s->global_rows);
  }
  hdf5_close(f);
  return good;
}

/* ---- a step ------------------------------------------------------------------ */

static void print_object(const char *key, const json_t *value) {
  char *text = json_dumps(value, JSON_COMPACT | JSON_REAL_PRECISION(7));
  if (text) inspect_line(key, "%s", text);
  free(text);
}

/* The meta's counters and digests; long texts (the configuration) only by name. */
static void print_meta(const char *text) {
  json_t *meta = json_loads(text, 0, NULL);
  if (!meta) {
    inspect_line("meta", "not JSON");
    return;
  }
  const char *key;
  json_t *value;
  json_object_foreach(meta, key, value) {
    const char *word = json_string_value(value);
    if (json_is_integer(value))
      inspect_line(key, "%" JSON_INTEGER_FORMAT, json_integer_value(value));
    else if (json_is_real(value))
      inspect_line(key, "%.17g", json_real_value(value));
    else if (word && strlen(word) < 100 && !strchr(word, '\n'))
      inspect_line(key, "%s", word);
    else if (strcmp(key, "route_constants") == 0 || strcmp(key, "imported") == 0)
      print_object(key, value);
  }
  json_decref(meta);
}

/* Sums by the part of the name before the slash ("adam_m"). */
static void print_kinds(const struct checkpoint *k) {
  const int n = checkpoint_tensor_count(k);
  for (int i = 0; i < n;) {
    const struct tensor_slice *first = checkpoint_tensor(k, i);
    const size_t length = strcspn(first->name, "/");
    int64_t bytes = 0, elements = 0;
    int count = 0;
    for (; i < n; i++, count++) {
      const struct tensor_slice *s = checkpoint_tensor(k, i);
      if (strncmp(s->name, first->name, length) != 0 || s->name[length] != first->name[length]) break;
      bytes += slice_bytes(s);
      elements += s->rows * s->cols;
    }
    printf("  %.*s: %d tensors, %" PRId64 " elements, %s, %" PRId64 " bytes\n", (int)length, first->name, count, elements,
           dtype_name(first->dtype), bytes);
  }
}

static void print_tensors(const struct checkpoint *k) {
  printf("  %-48s %-5s %20s %14s\n", "tensor", "type", "shape", "bytes");
  for (int i = 0; i < checkpoint_tensor_count(k); i++) {
    const struct tensor_slice *s = checkpoint_tensor(k, i);
    char shape[48];
    snprintf(shape, sizeof shape, "[%" PRId64 ", %" PRId64 "]", s->rows, s->cols);
    printf("  %-48s %-5s %20s %14" PRId64 "\n", s->name, dtype_name(s->dtype), shape, slice_bytes(s));
  }
}

/* A living run removes old steps, the manifest first.  Is that what happened to this one? */
static bool was_removed(const char *step) {
  enum { LOOKS = 100 };
  char manifest[STORE_PATH + 16];
  snprintf(manifest, sizeof manifest, "%s/manifest.json", step);
  for (int i = 0; i < LOOKS && !file_exists(manifest); i++) { /* the rest goes soon */
    if (!file_exists(step)) return true;
    nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
  }
  return false;
}

/* The tensors that a damaged file still gives wrong: a compressed chunk has a checksum of its own. */
static void name_damaged(const char *path) {
  struct error e;
  struct hdf5_file *f = hdf5_open(path, &e);
  for (int i = 0; f && i < hdf5_slice_count(f); i++) {
    const struct tensor_slice *s = hdf5_slice(f, i);
    void *data = malloc((size_t)slice_bytes(s) + 1);
    if (data && !hdf5_read(f, i, 0, s->rows, data, &e)) printf("  %-14s %s\n", "", e.message);
    free(data);
  }
  if (!f) printf("  %-14s %s\n", "", e.message);
  hdf5_close(f);
}

/* Every file of the manifest; the first fault is the error. */
static bool check_files(const char *path, const struct manifest *m, bool verify, struct error *e) {
  int damaged = 0;
  for (int i = 0; i < m->n_files; i++) {
    struct error fault;
    const bool good = manifest_check(path, &m->files[i], verify, &fault);
    if (!good || m->n_files <= 16)
      printf("  %-14s %s %14" PRId64 " bytes  %s\n", i == 0 ? "files" : "", m->files[i].name, m->files[i].bytes,
             !good ? "DAMAGED" : verify ? "checksum holds" : "size is right");
    if (!good && damaged++ == 0) *e = fault;
    char file[STORE_PATH + 80];
    snprintf(file, sizeof file, "%s/%s", path, m->files[i].name);
    if (!good && verify && file_size(file) == m->files[i].bytes) name_damaged(file);
  }
  if (m->n_files > 16) inspect_line("files", "%d, %d of them damaged", m->n_files, damaged);
  if (damaged > 1) error_context(e, "%d files of %s are damaged; the first", damaged, path);
  return damaged == 0;
}

bool inspect_step(const struct inspection *in, struct error *e) {
  struct manifest m;
  if (!manifest_load(in->path, &m, e)) return false;
  printf("%s: checkpoint of update %" PRId64 "\n", in->path, m.update);
  print_meta(m.meta);
  bool good = check_files(in->path, &m, in->verify, e);
  manifest_free(&m);
  struct checkpoint *k = good ? checkpoint_open(in->path, false, e) : NULL;
  if (!k) {
    inspect_line("state", "DAMAGED");
    return false;
  }
  inspect_line("state", "whole%s", in->verify ? "" : " as far as sizes tell; --verify compares checksums");
  int64_t tensors, files;
  checkpoint_bytes(k, &tensors, &files);
  inspect_line("bytes", "%" PRId64 " of tensors in files of %" PRId64, tensors, files);
  print_kinds(k);
  print_tensors(k);
  const bool written = !in->vds || checkpoint_index(k, in->vds, e);
  checkpoint_close(k);
  return written;
}

/* ---- a folder of steps --------------------------------------------------------- */

static void print_latest(const char *folder) {
  char path[STORE_PATH], target[STORE_PATH];
  snprintf(path, sizeof path, "%s/latest", folder);
  const ssize_t length = readlink(path, target, sizeof target - 1);
  if (length > 0) printf("  latest         -> %.*s\n", (int)length, target);
}

/* One look at the steps after `last`. */
struct look {
  int64_t last;      /* the newest that was listed */
  int whole, damaged;
  bool gone;         /* a living run removed one meanwhile */
  bool shown;        /* the newest whole one, in full */
};

static void look_at_step(const struct inspection *in, int64_t update, struct look *l, int64_t *newest, struct error *e) {
  char path[STORE_PATH];
  struct error fault;
  store_step_path(in->path, update, path);
  struct checkpoint *k = checkpoint_open(path, in->verify, &fault);
  const bool gone = !k && was_removed(path);
  printf("  step-%08" PRId64 "  %s\n", update, k ? "whole" : gone ? "removed meanwhile" : fault.message);
  l->last = update;
  l->gone |= gone;
  if (k) {
    *newest = update;
    l->whole++;
  } else if (!gone && l->damaged++ == 0) {
    *e = fault;
  }
  checkpoint_close(k);
}

static bool look_at_steps(const struct inspection *in, struct look *l, struct error *e) {
  int64_t *updates, newest = -1;
  int n, first = 0;
  if (!store_list(in->path, &updates, &n, e)) return false;
  while (first < n && updates[first] <= l->last) first++;
  printf("%s: %d checkpoint%s\n", in->path, n - first, n - first == 1 ? "" : "s");
  *l = (struct look){.last = l->last};
  for (int i = first; i < n; i++) look_at_step(in, updates[i], l, &newest, e);
  free(updates);
  print_latest(in->path);
  if (newest < 0) return true;
  char path[STORE_PATH];
  struct inspection step = *in;
  struct error fault;
  store_step_path(in->path, newest, path);
  step.path = path;
  putchar('\n');
  l->shown = inspect_step(&step, &fault);
  if (l->shown) return true;
  if (was_removed(path)) {
    printf("%s was removed meanwhile\n", path);
    l->gone = true;
  } else if (l->damaged++ == 0) {
    *e = fault;
  }
  return true;
}

/* Where all that was whole has been removed, the run that did it has a newer one. */
bool inspect_steps(const struct inspection *in, struct error *e) {
  enum { LOOKS = 100 };
  struct look l = {.last = -1, .gone = true};
  int seen = 0, damaged = 0;
  for (int i = 0; i < LOOKS && !l.shown && l.gone; i++) {
    struct error fault;
    if (!look_at_steps(in, &l, &fault)) {
      *e = fault;
      return false;
    }
    if (l.damaged > 0 && damaged == 0) *e = fault;
    damaged += l.damaged;
    seen += l.whole + l.damaged;
  }
  if (seen == 0) return error_set(e, ERROR_CHECKPOINT, "there is no checkpoint in %s", in->path);
  return damaged == 0;
}
