#include "trainer/document.h"

#include <stdlib.h>
#include <string.h>
#include <yaml.h>

enum { DEPTH = 10, ENTRIES = 200, KEY = 64 };

/* Reading goes event by event; `open` holds the lists and mappings that we are
 * inside of. */
struct level {
  struct document_node *node, *last;
  char *key; /* of the entry whose value comes next; NULL: a key comes next */
  int key_line, key_column;
  bool key_broken; /* the next value is read and dropped */
  int entries;
};

struct reader {
  struct document *d;
  struct findings *p;
  struct level open[DEPTH];
  int depth;
  bool gave_up;
};

static struct origin place(const struct reader *r, yaml_mark_t mark) {
  return (struct origin){.file = r->d->file, .line = (int)mark.line + 1, .column = (int)mark.column + 1};
}

static void give_up(struct reader *r, yaml_mark_t mark, const char *words) {
  findings_add(r->p, place(r, mark), NULL, "%s", words);
  r->gave_up = true;
}

static char *copy(const char *text, size_t length) {
  char *c = malloc(length + 1);
  if (!c) return NULL;
  memcpy(c, text, length);
  c[length] = 0;
  return c;
}

static struct document_node *new_node(struct reader *r, enum document_kind kind, yaml_mark_t mark) {
  struct document_node *n = calloc(1, sizeof *n);
  if (!n) {
    give_up(r, mark, "out of memory");
    return NULL;
  }
  n->kind = kind;
  n->line = (int)mark.line + 1;
  n->column = (int)mark.column + 1;
  n->allocated = r->d->allocated;
  r->d->allocated = n;
  return n;
}

static struct level *top(struct reader *r) { return r->depth ? &r->open[r->depth - 1] : NULL; }

/* A new node takes its place: root, item of a list or value of an entry. */
static void attach(struct reader *r, struct document_node *n) {
  struct level *l = top(r);
  if (!l) {
    r->d->root = n;
    return;
  }
  bool drop = false;
  if (l->node->kind == DOCUMENT_MAPPING) {
    n->key = l->key; /* the node's now */
    n->key_line = l->key_line;
    n->key_column = l->key_column;
    drop = l->key_broken;
    l->key = NULL;
    l->key_broken = false;
  } else if (++l->entries > ENTRIES) {
    findings_add(r->p, document_origin(r->d, n), NULL, "a list of more than %d items", ENTRIES);
    r->gave_up = true;
  }
  if (drop) return;
  if (l->last)
    l->last->next = n;
  else
    l->node->child = n;
  l->last = n;
}

static bool key_expected(struct reader *r) {
  struct level *l = top(r);
  return l && l->node->kind == DOCUMENT_MAPPING && !l->key;
}

static void read_key(struct reader *r, const yaml_event_t *event) {
  struct level *l = top(r);
  const char *text = (const char *)event->data.scalar.value;
  size_t length = event->data.scalar.length;
  struct origin at = place(r, event->start_mark);
  char shown[QUOTED];
  if (++l->entries > ENTRIES) {
    findings_add(r->p, at, NULL, "a mapping of more than %d keys", ENTRIES);
    r->gave_up = true;
    return;
  }
  l->key = copy(text, length);
  if (!l->key) {
    give_up(r, event->start_mark, "out of memory");
    return;
  }
  l->key_line = at.line;
  l->key_column = at.column;
  if (length == 0 || length > KEY || strlen(l->key) != length || strpbrk(l->key, "\n\t")) {
    findings_add(r->p, at, NULL, "%s is not a key", text_quote(l->key, shown));
    l->key_broken = true;
    return;
  }
  for (const struct document_node *n = l->node->child; n; n = n->next)
    if (strcmp(n->key, l->key) == 0) {
      findings_add(r->p, at, l->key, "given twice; first in line %d", n->key_line);
      l->key_broken = true;
      return;
    }
}

static void refuse_decoration(struct reader *r, yaml_mark_t mark, const yaml_char_t *anchor, const yaml_char_t *tag) {
  char shown[QUOTED];
  if (anchor)
    findings_add(r->p, place(r, mark), NULL, "anchor %s: anchors are not accepted; write the value where it is used",
                 text_quote((const char *)anchor, shown));
  if (tag)
    findings_add(r->p, place(r, mark), NULL, "tag %s: tags are not accepted; the key decides the type",
                 text_quote((const char *)tag, shown));
}

static void open_collection(struct reader *r, enum document_kind kind, const yaml_event_t *event) {
  if (key_expected(r)) {
    give_up(r, event->start_mark, "a key must be a word, not a list or mapping");
    return;
  }
  if (r->depth == DEPTH) {
    give_up(r, event->start_mark, "nested too deeply");
    return;
  }
  struct document_node *n = new_node(r, kind, event->start_mark);
  if (!n) return;
  attach(r, n);
  r->open[r->depth++] = (struct level){.node = n};
}

static void read_scalar(struct reader *r, const yaml_event_t *event) {
  if (key_expected(r)) {
    read_key(r, event);
    return;
  }
  struct document_node *n = new_node(r, DOCUMENT_SCALAR, event->start_mark);
  if (!n) return;
  n->quoted = event->data.scalar.style != YAML_PLAIN_SCALAR_STYLE;
  n->text = copy((const char *)event->data.scalar.value, event->data.scalar.length);
  if (!n->text) give_up(r, event->start_mark, "out of memory");
  attach(r, n);
  if (n->text && strlen(n->text) != event->data.scalar.length) {
    findings_add(r->p, place(r, event->start_mark), n->key, "text with a zero byte");
    n->kind = DOCUMENT_BROKEN;
  }
}

static void read_alias(struct reader *r, const yaml_event_t *event) {
  char shown[QUOTED];
  findings_add(r->p, place(r, event->start_mark), NULL,
               "alias %s: aliases are not accepted; write the value itself, or share a file with include",
               text_quote((const char *)event->data.alias.anchor, shown));
  if (key_expected(r)) {
    r->gave_up = true;
    return;
  }
  struct document_node *n = new_node(r, DOCUMENT_BROKEN, event->start_mark);
  if (n) attach(r, n);
}

static void take(struct reader *r, const yaml_event_t *event) {
  switch (event->type) {
    case YAML_DOCUMENT_START_EVENT:
      if (r->d->root) give_up(r, event->start_mark, "a second document begins here; a file holds one configuration");
      break;
    case YAML_ALIAS_EVENT:
      read_alias(r, event);
      break;
    case YAML_SCALAR_EVENT:
      refuse_decoration(r, event->start_mark, event->data.scalar.anchor, event->data.scalar.tag);
      read_scalar(r, event);
      break;
    case YAML_SEQUENCE_START_EVENT:
      refuse_decoration(r, event->start_mark, event->data.sequence_start.anchor, event->data.sequence_start.tag);
      open_collection(r, DOCUMENT_LIST, event);
      break;
    case YAML_MAPPING_START_EVENT:
      refuse_decoration(r, event->start_mark, event->data.mapping_start.anchor, event->data.mapping_start.tag);
      open_collection(r, DOCUMENT_MAPPING, event);
      break;
    case YAML_SEQUENCE_END_EVENT:
    case YAML_MAPPING_END_EVENT:
      r->depth--;
      break;
    default:
      break;
  }
}

/* libyaml's reader gives a byte offset, its scanner and parser a mark. */
static void yaml_problem(struct reader *r, const yaml_parser_t *y, const char *text, size_t bytes) {
  struct origin at = {.file = r->d->file};
  if (y->error == YAML_READER_ERROR) {
    at.line = at.column = 1;
    for (size_t i = 0; i < y->problem_offset && i < bytes; i++) {
      if (text[i] == '\n') {
        at.line++;
        at.column = 1;
      } else if (((unsigned char)text[i] & 0xC0) != 0x80) {
        at.column++;
      }
    }
    findings_add(r->p, at, NULL, "not text in UTF-8: %s", y->problem ? y->problem : "unreadable");
    return;
  }
  if (y->error == YAML_MEMORY_ERROR) {
    findings_add(r->p, at, NULL, "out of memory");
    return;
  }
  yaml_mark_t mark = y->problem_mark;
  at = place(r, mark);
  /* marks count characters; the byte there says whether a tab is to blame */
  size_t i = 0, line = 0;
  for (; i < bytes && line < mark.line; i++) line += text[i] == '\n';
  const char *end = memchr(text + i, '\n', bytes - i);
  size_t length = end ? (size_t)(end - (text + i)) : bytes - i;
  bool tab = mark.column < length && text[i + mark.column] == '\t';
  findings_add(r->p, at, NULL, "not YAML: %s%s%s%s", y->problem ? y->problem : "cannot be parsed",
               y->context ? ", " : "", y->context ? y->context : "", tab ? " (a tab: indent with spaces)" : "");
}

void document_read(struct document *d, const char *file, const char *text, size_t bytes, struct findings *p) {
  *d = (struct document){.file = file};
  struct reader r = {.d = d, .p = p};
  yaml_parser_t y;
  if (!yaml_parser_initialize(&y)) {
    findings_add(p, (struct origin){.file = file}, NULL, "out of memory");
    return;
  }
  if (bytes >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) { /* a byte order mark is no character */
    text += 3;
    bytes -= 3;
  }
  yaml_parser_set_encoding(&y, YAML_UTF8_ENCODING);
  yaml_parser_set_input_string(&y, (const unsigned char *)text, bytes);
  for (bool more = true; more && !r.gave_up;) {
    yaml_event_t event;
    if (!yaml_parser_parse(&y, &event)) {
      yaml_problem(&r, &y, text, bytes);
      r.gave_up = true;
      break;
    }
    more = event.type != YAML_STREAM_END_EVENT;
    take(&r, &event);
    yaml_event_delete(&event);
  }
  yaml_parser_delete(&y);
  for (int i = 0; i < r.depth; i++) free(r.open[i].key);
  bool empty = !d->root || (d->root->kind == DOCUMENT_SCALAR && !d->root->quoted && d->root->text && !d->root->text[0]);
  if (!r.gave_up && empty) findings_add(p, (struct origin){.file = file}, NULL, "is empty");
  if (empty) d->root = NULL;
  d->whole = !r.gave_up && d->root;
}

void document_free(struct document *d) {
  for (struct document_node *n = d->allocated, *next; n; n = next) {
    next = n->allocated;
    free(n->text);
    free(n->key);
    free(n);
  }
  *d = (struct document){0};
}

struct origin document_origin(const struct document *d, const struct document_node *n) {
  return (struct origin){.file = d->file, .line = n->line, .column = n->column};
}

struct origin document_key_origin(const struct document *d, const struct document_node *n) {
  return (struct origin){.file = d->file, .line = n->key_line, .column = n->key_column};
}

const char *document_kind_name(enum document_kind kind) {
  return kind == DOCUMENT_LIST ? "a list" : kind == DOCUMENT_MAPPING ? "a mapping" : "a single value";
}
