#include "trainer/ablation.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "trainer/document.h"

enum { FILE_LIMIT = 1 << 20, KEY = 256 };

struct reader {
  struct ablation *a;
  struct document d;
  struct findings p;
};

static void problem(struct reader *r, const struct document_node *n, const char *key, const char *words) {
  if (n->kind != DOCUMENT_BROKEN) findings_add(&r->p, document_origin(&r->d, n), key, "%s", words);
}

static void take_text(struct reader *r, const struct document_node *n, char *to, size_t size) {
  if (n->kind != DOCUMENT_SCALAR || n->text[0] == 0 || strlen(n->text) >= size)
    problem(r, n, n->key, "a text is wanted");
  else
    snprintf(to, size, "%s", n->text);
}

static void take_base(struct reader *r, const struct document_node *n) {
  if (n->kind != DOCUMENT_SCALAR || n->text[0] == 0) {
    problem(r, n, n->key, "a configuration's file is wanted");
    return;
  }
  r->a->base = file_beside(r->d.file, n->text);
  if (!r->a->base) problem(r, n, n->key, "out of memory");
}

static void take_routes(struct reader *r, const struct document_node *n) {
  struct ablation *a = r->a;
  if (n->kind != DOCUMENT_LIST || !n->child) {
    problem(r, n, n->key, "a list of routes is wanted");
    return;
  }
  for (const struct document_node *item = n->child; item; item = item->next) {
    if (item->kind != DOCUMENT_SCALAR || item->text[0] == 0 || strlen(item->text) >= sizeof a->route[0]) {
      problem(r, item, n->key, "a route's name is wanted");
      continue;
    }
    for (int i = 0; i < a->n_routes; i++)
      if (strcmp(a->route[i], item->text) == 0) problem(r, item, n->key, "this route stands here twice");
    if (a->n_routes == ABLATION_ROUTES) {
      problem(r, item, n->key, "too many routes");
      return;
    }
    snprintf(a->route[a->n_routes++], sizeof a->route[0], "%s", item->text);
  }
}

/* Nested mappings become dotted keys. */
static void take_sets(struct reader *r, const struct document_node *n, const char *above) {
  if (n->kind != DOCUMENT_MAPPING) {
    problem(r, n, "set", "a mapping of a configuration's keys is wanted");
    return;
  }
  for (const struct document_node *entry = n->child; entry; entry = entry->next) {
    char key[KEY], set[KEY + CONFIG_TEXT];
    struct error e;
    snprintf(key, sizeof key, "%s%s%s", above, above[0] ? "." : "", entry->key);
    if (entry->kind == DOCUMENT_MAPPING) {
      take_sets(r, entry, key);
    } else if (entry->kind != DOCUMENT_SCALAR) {
      problem(r, entry, key, "a number or word is wanted; a list is written \"a,b\"");
    } else {
      snprintf(set, sizeof set, "%s=%s", key, entry->text);
      if (!ablation_set(r->a, set, &e)) problem(r, entry, key, e.message);
    }
  }
}

static void split_launch(struct reader *r, const struct document_node *n) {
  struct ablation *a = r->a;
  char *rest = NULL;
  take_text(r, n, a->launch, sizeof a->launch);
  for (char *word = strtok_r(a->launch, " \t\n", &rest); word; word = strtok_r(NULL, " \t\n", &rest)) {
    if (a->n_words == ABLATION_WORDS) {
      problem(r, n, n->key, "too many words");
      return;
    }
    a->launch_word[a->n_words++] = word;
  }
}

static void take(struct reader *r) {
  const struct document_node *root = r->d.root;
  if (root && root->kind != DOCUMENT_MAPPING) problem(r, root, NULL, "a mapping is wanted");
  for (const struct document_node *n = root && root->kind == DOCUMENT_MAPPING ? root->child : NULL; n; n = n->next) {
    if (strcmp(n->key, "base") == 0)
      take_base(r, n);
    else if (strcmp(n->key, "folder") == 0)
      take_text(r, n, r->a->folder, sizeof r->a->folder);
    else if (strcmp(n->key, "routes") == 0)
      take_routes(r, n);
    else if (strcmp(n->key, "launch") == 0)
      split_launch(r, n);
    else if (strcmp(n->key, "set") == 0)
      take_sets(r, n, "");
    else
      findings_add(&r->p, document_key_origin(&r->d, n), n->key, "unknown key; there are base, folder, routes, launch and set");
  }
  const struct origin whole = {.file = r->d.file};
  if (r->p.count > 0 || !r->d.whole) return;
  if (!r->a->base) findings_add(&r->p, whole, "base", "is missing: the configuration that every run takes");
  if (!r->a->folder[0]) findings_add(&r->p, whole, "folder", "is missing: where the runs go");
  if (r->a->n_routes == 0) findings_add(&r->p, whole, "routes", "is missing: what is compared");
}

bool ablation_read(struct ablation *a, const char *path, struct error *e) {
  char *text;
  size_t bytes;
  memset(a, 0, sizeof *a);
  if (!file_read(path, FILE_LIMIT, ERROR_CONFIG, &text, &bytes, e)) return false;
  struct reader *r = calloc(1, sizeof *r);
  bool good = r ? true : error_set(e, ERROR_SYSTEM, "out of memory");
  if (r) {
    r->a = a;
    document_read(&r->d, path, text, bytes, &r->p);
    take(r);
    good = findings_report(&r->p, e);
    document_free(&r->d);
    free(r);
  }
  free(text);
  return good;
}

void ablation_free(struct ablation *a) {
  free(a->base);
  for (int i = 0; i < a->n_sets; i++) free(a->set[i]);
  memset(a, 0, sizeof *a);
}

bool ablation_set(struct ablation *a, const char *set, struct error *e) {
  static const char *const own[] = {"route", "run.name", "run.folder"};
  const size_t length = strcspn(set, "=");
  for (int i = 0; i < 3; i++)
    if (strlen(own[i]) == length && strncmp(set, own[i], length) == 0)
      return error_set(e, ERROR_CONFIG, "%s is each run's own: it cannot be set for all", own[i]);
  char *copy = a->n_sets < ABLATION_SETS ? strdup(set) : NULL;
  if (!copy) return error_set(e, ERROR_CONFIG, "more than %d settings, or no memory", ABLATION_SETS);
  a->set[a->n_sets++] = copy;
  return true;
}

void ablation_run_folder(const struct ablation *a, int route, char *text, int size) {
  const int n = snprintf(text, (size_t)size, "%s/", a->folder);
  if (n < 0 || n >= size) return;
  snprintf(text + n, (size_t)(size - n), "%s", a->route[route]);
  for (char *c = text + n; *c; c++)
    if (*c == '/') *c = '-';
}
