/* A YAML file as a tree whose nodes know where they stand.
 *
 * Only what a configuration needs is let in: one document of mappings, lists
 * and scalars.  Anchors, aliases, tags, keys that are not words, duplicate
 * keys and deep nesting are problems, each named with its place; YAML's own
 * errors (from libyaml) too.
 */
#ifndef FP4D_TRAINER_DOCUMENT_H
#define FP4D_TRAINER_DOCUMENT_H

#include <stdbool.h>
#include <stddef.h>

#include "trainer/findings.h"

enum document_kind {
  DOCUMENT_SCALAR,
  DOCUMENT_LIST,
  DOCUMENT_MAPPING,
  DOCUMENT_BROKEN /* a problem is already on record; look no further */
};

struct document_node {
  enum document_kind kind;
  int line, column;            /* from 1 */
  bool quoted;                 /* a scalar in quotes, or a block scalar */
  char *text;                  /* of a scalar */
  char *key;                   /* of an entry of a mapping, else NULL */
  int key_line, key_column;
  struct document_node *child; /* first item or entry */
  struct document_node *next;  /* sibling */
  struct document_node *allocated; /* all nodes, for freeing */
};

struct document {
  const char *file; /* the caller's; must outlive the document */
  struct document_node *root, *allocated;
  bool whole; /* read to its end; false: what follows the last problem was not seen */
};

/* Reads `bytes` of text. Problems are added to *p; what could be read is in the
 * tree, whose root is NULL when there is nothing to look at. */
void document_read(struct document *d, const char *file, const char *text, size_t bytes, struct findings *p);
void document_free(struct document *d);

struct origin document_origin(const struct document *d, const struct document_node *n);
struct origin document_key_origin(const struct document *d, const struct document_node *n);

/* "a number or word", "a list", "a mapping". */
const char *document_kind_name(enum document_kind kind);

#endif
