/* Configuration: defaults, then the included files, then the file, then --set;
 * what needs several keys is checked once all are there (config_resolve.c). */
#include "trainer/config.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/file.h"
#include "trainer/config_load.h"

enum { FILE_LIMIT = 1 << 20 };

/* ---- files ------------------------------------------------------------------ */

static bool same_file(const char *a, const char *b) {
  struct stat x, y;
  return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

static void take_text(struct config_loader *l, int index, const char *text, size_t bytes);

/* Reads one file that file `parent` names at n. */
static bool take_included(struct config_loader *l, int parent, struct document_node *n) {
  struct document *d = &l->file[parent].document;
  struct origin at = document_origin(d, n);
  if (n->kind == DOCUMENT_BROKEN) return false;
  if (n->kind != DOCUMENT_SCALAR || n->text[0] == 0) {
    findings_add(&l->problems, at, "include", "a file's name is wanted");
    return false;
  }
  char *path = file_beside(d->file, n->text), shown[QUOTED];
  struct error e = {0};
  size_t bytes;
  bool cycle = false;
  int depth = 0;
  for (int i = parent; path && i >= 0; i = l->file[i].parent, depth++) cycle |= same_file(path, l->file[i].path);
  if (!path) {
    findings_add(&l->problems, at, "include", "out of memory");
  } else if (cycle) {
    findings_add(&l->problems, at, "include", "%s is being read already: files include each other in a circle",
                 text_quote(path, shown));
  } else if (l->n_files == CONFIG_FILES || depth > CONFIG_INCLUDE_DEPTH) {
    findings_add(&l->problems, at, "include", "more than %d files, or %d inside each other", CONFIG_FILES - 1,
                 CONFIG_INCLUDE_DEPTH);
  } else if (!file_read(path, FILE_LIMIT, ERROR_CONFIG, &l->file[l->n_files].text, &bytes, &e)) {
    findings_add(&l->problems, at, "include", "%s", e.message);
  } else {
    l->file[l->n_files].path = path;
    l->file[l->n_files].parent = parent;
    take_text(l, l->n_files, l->file[l->n_files].text, bytes);
    return true;
  }
  free(path);
  return false;
}

/* A name, or a list of names read in order. */
static void take_include(struct config_loader *l, int parent, struct document_node *n) {
  if (n->kind == DOCUMENT_LIST) {
    for (struct document_node *item = n->child; item; item = item->next)
      if (!take_included(l, parent, item)) l->whole = false; /* what it would have given is not there */
  } else if (!take_included(l, parent, n)) {
    l->whole = false;
  }
}

static void take_text(struct config_loader *l, int index, const char *text, size_t bytes) {
  struct document *d = &l->file[index].document;
  l->n_files = index + 1;
  document_read(d, l->file[index].path, text, bytes, &l->problems);
  if (!d->whole) l->whole = false;
  for (struct document_node *n = d->root && d->root->kind == DOCUMENT_MAPPING ? d->root->child : NULL; n; n = n->next)
    if (strcmp(n->key, "include") == 0) take_include(l, index, n);
  config_take_document(l, d);
}

/* ---- all together ------------------------------------------------------------ */

static bool load(struct config_loader *l, struct config *c, const char *name, char *owned, const char *text,
                 size_t bytes, const char *const *sets, int n_sets, struct error *e) {
  memset(c, 0, sizeof *c);
  *l = (struct config_loader){.config = c, .name = name, .whole = true};
  config_take_defaults(l);
  l->file[0] = (struct config_file){.path = strdup(name), .text = owned, .parent = -1};
  l->n_files = 1;
  if (l->file[0].path)
    take_text(l, 0, text, bytes);
  else
    findings_add(&l->problems, (struct origin){0}, NULL, "out of memory");
  for (int i = 0; i < n_sets; i++) config_take_set(l, sets[i]);
  if (l->whole) config_resolve(l);
  bool good = findings_report(&l->problems, e);
  for (int i = 0; i < l->n_files; i++) {
    document_free(&l->file[i].document);
    free(l->file[i].text);
    free(l->file[i].path);
  }
  return good;
}

bool config_parse(struct config *c, const char *text, const char *name, const char *const *sets, int n_sets,
                  struct error *e) {
  struct config_loader *l = malloc(sizeof *l);
  if (!l) return error_set(e, ERROR_SYSTEM, "out of memory reading %s", name);
  bool good = load(l, c, name, NULL, text, strlen(text), sets, n_sets, e);
  free(l);
  return good;
}

void config_default_limits(struct comm_limits *out) {
  static struct config c;
  option_take_defaults(option_section("limits"), &c);
  *out = c.limits;
}

bool config_load(struct config *c, const char *path, const char *const *sets, int n_sets, struct error *e) {
  char *text;
  size_t bytes;
  if (!file_read(path, FILE_LIMIT, ERROR_CONFIG, &text, &bytes, e)) return false;
  struct config_loader *l = malloc(sizeof *l);
  if (!l) {
    free(text);
    return error_set(e, ERROR_SYSTEM, "out of memory reading %s", path);
  }
  bool good = load(l, c, path, text, text, bytes, sets, n_sets, e);
  free(l);
  return good;
}
