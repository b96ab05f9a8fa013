/* Added tokens: a trie over bytes. */
#include "data/added.h"

#include <stdlib.h>

struct node {
  int32_t child, sibling; /* 0: none (node 0 is the root) */
  int32_t id;             /* -1: no token ends here */
  unsigned char byte;
  bool special;
};

struct added {
  struct node *node;
  int32_t n;
  bool begins[2][256]; /* a token begins with the byte; [1]: specials too */
  bool any[2];
};

static int32_t child_of(const struct added *a, int32_t node, unsigned char byte) {
  int32_t c = a->node[node].child;
  while (c && a->node[c].byte != byte) c = a->node[c].sibling;
  return c;
}

static void insert(struct added *a, const unsigned char *s, int32_t bytes, int32_t id, bool special) {
  int32_t node = 0;
  for (int32_t i = 0; i < bytes; i++) {
    int32_t c = child_of(a, node, s[i]);
    if (!c) {
      c = a->n++;
      a->node[c] = (struct node){.sibling = a->node[node].child, .id = -1, .byte = s[i]};
      a->node[node].child = c;
    }
    node = c;
  }
  a->node[node].id = id;
  a->node[node].special = special;
  for (int all = special; all < 2; all++) a->begins[all][s[0]] = a->any[all] = true;
}

struct added *added_create(const struct vocabulary *v, struct error *e) {
  int64_t bytes = 1;
  for (int32_t id = 0; id < v->n; id++)
    if (v->token[id].kind >= TOKEN_ADDED) bytes += v->token[id].bytes;
  struct added *a = bytes < INT32_MAX ? calloc(1, sizeof *a) : NULL;
  if (a) a->node = malloc((size_t)bytes * sizeof *a->node);
  if (!a || !a->node) {
    free(a);
    error_set(e, ERROR_SYSTEM, "out of memory for the added tokens of a vocabulary");
    return NULL;
  }
  a->node[a->n++] = (struct node){.id = -1};
  for (int32_t id = 0; id < v->n; id++) {
    const struct vocabulary_token *t = v->token + id;
    if (t->kind >= TOKEN_ADDED) insert(a, (const unsigned char *)v->text + t->at, t->bytes, id, t->kind == TOKEN_SPECIAL);
  }
  return a;
}

void added_destroy(struct added *a) {
  if (!a) return;
  free(a->node);
  free(a);
}

int32_t added_find(const struct added *a, const unsigned char *text, int64_t bytes, bool specials, int64_t *at, int64_t *length) {
  const bool *begins = a->begins[specials];
  if (!a->any[specials]) return -1;
  for (int64_t i = 0; i < bytes; i++) {
    if (!begins[text[i]]) continue;
    int32_t id = -1, node = 0;
    for (int64_t k = i; k < bytes && (node = child_of(a, node, text[k])); k++)
      if (a->node[node].id >= 0 && (specials || !a->node[node].special)) {
        id = a->node[node].id;
        *length = k + 1 - i;
      }
    if (id >= 0) {
      *at = i;
      return id;
    }
  }
  return -1;
}
