/* What a document or --set gives, against the tables of options.
 *
 * A value is checked where it is read, so its problem has a line and column. */
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/config_load.h"
#include "trainer/suggest.h"

enum { LABEL = 160 };

/* ---- records and problems -------------------------------------------------- */

/* "optimizer.lr" to section and row; section "" for the top level. */
static const struct option *find(const char *key, const struct option_section **section) {
  size_t length = strcspn(key, ".");
  for (int i = 0; key[length] == '.' && i < option_section_number; i++) {
    const struct option_section *s = &option_sections[i];
    if (s->base == OPTION_OF_ENTRY || strlen(s->name) != length || strncmp(s->name, key, length) != 0) continue;
    *section = s;
    return option_find(s, key + length + 1);
  }
  *section = &option_sections[0];
  return option_find(*section, key);
}

struct option_record *config_record(struct config_loader *l, const char *key) {
  const struct option_section *s;
  const struct option *o = find(key, &s);
  return &l->record[s - option_sections][o - s->rows];
}

bool config_sound(struct config_loader *l, const char *const *keys) {
  for (; *keys; keys++)
    if (config_record(l, *keys)->state == OPTION_BROKEN) return false;
  return true;
}

void config_problem(struct config_loader *l, const char *key, const char *format, ...) {
  const struct option_record *r = config_record(l, key);
  struct origin at = r->state == OPTION_DEFAULT ? (struct origin){.file = l->name} : r->at;
  char words[4096];
  va_list arguments;
  va_start(arguments, format);
  if (vsnprintf(words, sizeof words, format, arguments) < 0) words[0] = 0;
  va_end(arguments);
  findings_add(&l->problems, at, key, "%s", words);
}

/* ---- a mapping against a section -------------------------------------------- */

/* Where values of a section go. */
struct target {
  const struct option_section *section;
  void *base;
  struct option_record *record; /* [OPTION_ROWS] */
  char prefix[LABEL];           /* of problems: "optimizer.", "route.linears[2].", "" */
};

static struct target target_of(struct config_loader *l, const struct option_section *s) {
  struct target t = {.section = s, .record = l->record[s - option_sections]};
  t.base = s->base == OPTION_OF_ROUTE ? (void *)&l->route : (void *)l->config;
  snprintf(t.prefix, sizeof t.prefix, "%s%s", s->name, s->name[0] ? "." : "");
  return t;
}

static void *base_of(struct config_loader *l, const struct target *t, const struct option *o) {
  return o->type == OPTION_ROUTE ? (void *)&l->route : t->base;
}

static void apply_defaults(struct config_loader *l, const struct target *t) {
  char why[OPTION_WHY];
  for (int i = 0; i < t->section->n_rows; i++) {
    const struct option *o = &t->section->rows[i];
    t->record[i] = (struct option_record){0};
    if (o->fallback) option_parse(o, base_of(l, t, o), o->fallback, why);
  }
}

/* Is `key` a mapping in this section: the beginning of dotted rows? */
static bool is_group(const struct option_section *s, const char *key) {
  size_t length = strlen(key);
  for (int i = 0; i < s->n_rows; i++)
    if (strncmp(s->rows[i].key, key, length) == 0 && s->rows[i].key[length] == '.') return true;
  return false;
}

static bool same_tail(const char *key, const char *word) {
  size_t n = strlen(key), m = strlen(word);
  return n >= m && strcmp(key + n - m, word) == 0 && (n == m || key[n - m - 1] == '.');
}

/* An unknown key: the same word elsewhere, else the nearest here, else anywhere. */
static void unknown_key(struct config_loader *l, struct origin at, const struct option_section *here, const char *key,
                        const char *label) {
  static const char all[] = "`fp4d help config` lists them all";
  char full[LABEL] = "";
  for (int i = 0; i < option_section_number; i++) {
    const struct option_section *s = &option_sections[i];
    for (int j = 0; s->base == OPTION_OF_CONFIG && j < s->n_rows; j++)
      if (same_tail(s->rows[j].key, key)) {
        size_t n = strlen(full);
        snprintf(full + n, sizeof full - n, "%s%s%s%s", n ? " or " : "", s->name, s->name[0] ? "." : "", s->rows[j].key);
      }
  }
  if (full[0]) {
    findings_add(&l->problems, at, label, "unknown key; did you mean %s?", full);
    return;
  }
  struct suggestion near = {key, NULL, 0};
  for (int j = 0; j < here->n_rows; j++) suggest_offer(&near, here->rows[j].key);
  if (here->name[0] == 0) {
    for (int i = 0; i < option_section_number; i++)
      if (option_sections[i].base == OPTION_OF_CONFIG) suggest_offer(&near, option_sections[i].name);
    suggest_offer(&near, "include");
  }
  if (near.best) {
    findings_add(&l->problems, at, label, "unknown key; did you mean %s%s%s?", here->name, here->name[0] ? "." : "",
                 near.best);
    return;
  }
  for (int i = 0; i < option_section_number; i++)
    for (int j = 0; option_sections[i].base == OPTION_OF_CONFIG && j < option_sections[i].n_rows; j++) {
      const char *best = near.best;
      suggest_offer(&near, option_sections[i].rows[j].key);
      if (near.best != best)
        snprintf(full, sizeof full, "%s%s%s", option_sections[i].name, option_sections[i].name[0] ? "." : "", near.best);
    }
  if (near.best)
    findings_add(&l->problems, at, label, "unknown key; did you mean %s?", full);
  else
    findings_add(&l->problems, at, label, "unknown key; %s", all);
}

static void walk(struct config_loader *l, struct document *d, struct document_node *mapping, struct target *t,
                 const char *path);
static void take(struct config_loader *l, struct document *d, struct document_node *n, struct target *t,
                 const struct option *o, const char *label);

/* A list of mappings, each against the section of its keys; `single` stands for a mapping of one key. */
static void read_entries(struct config_loader *l, struct document *d, struct document_node *list, struct target *of,
                         const struct option *o, const char *name) {
  const struct option_section *s = option_section(o->entries);
  const struct option *single = o->single ? option_find(s, o->single) : NULL;
  struct option_record *r = &of->record[o - of->section->rows];
  int number = 0;
  option_list_clear(o, of->base);
  for (struct document_node *n = list->child; n; n = n->next) {
    char label[LABEL], why[OPTION_WHY];
    snprintf(label, sizeof label, "%.*s[%d]", LABEL - 32, name, ++number);
    struct origin at = document_origin(d, n);
    const bool mapping = n->kind == DOCUMENT_MAPPING, value = single && n->kind == DOCUMENT_SCALAR;
    void *entry = mapping || value ? option_entry_add(o, of->base, why) : NULL;
    if (!entry) {
      r->state = OPTION_BROKEN;
      if (n->kind == DOCUMENT_BROKEN) continue;
      if (mapping || value) {
        findings_add(&l->problems, at, label, "%s", why);
        return;
      }
      findings_add(&l->problems, at, label, "a mapping%s%s is wanted, not %s", single ? " or a " : "", single ? single->key : "",
                   document_kind_name(n->kind));
      continue;
    }
    struct option_record record[OPTION_ROWS] = {0};
    struct target t = {.section = s, .base = entry, .record = record};
    snprintf(t.prefix, sizeof t.prefix, "%.*s.", LABEL - 2, label);
    if (o->origin) memcpy((char *)entry + o->origin, &at, sizeof at);
    if (value)
      take(l, d, n, &t, single, label);
    else
      walk(l, d, n, &t, "");
    for (int i = 0; i < s->n_rows; i++) {
      if (record[i].state == OPTION_BROKEN) r->state = OPTION_BROKEN;
      if (record[i].state != OPTION_DEFAULT || s->rows[i].fallback || !s->rows[i].fallback_words) continue;
      char key[LABEL + 32];
      snprintf(key, sizeof key, "%s%s", t.prefix, s->rows[i].key);
      findings_add(&l->problems, at, key, "is missing");
      r->state = OPTION_BROKEN;
    }
  }
}

/* A mapping of route parts replaces whatever route was there. */
static void read_route(struct config_loader *l, struct document *d, struct document_node *n) {
  memset(&l->route, 0, sizeof l->route);
  struct target t = target_of(l, option_section("route"));
  apply_defaults(l, &t);
  l->route.mapping = true;
  walk(l, d, n, &t, "");
}

/* One key with its value. */
static void take(struct config_loader *l, struct document *d, struct document_node *n, struct target *t,
                 const struct option *o, const char *label) {
  struct option_record *r = &t->record[o - t->section->rows];
  struct origin at = document_origin(d, n);
  char why[OPTION_WHY] = "";
  bool good = true;
  *r = (struct option_record){OPTION_GIVEN, at};
  if (n->kind == DOCUMENT_BROKEN) {
    r->state = OPTION_BROKEN;
    return;
  }
  if (o->type == OPTION_ROUTE && n->kind == DOCUMENT_MAPPING) {
    read_route(l, d, n);
    return;
  }
  bool list = o->type == OPTION_NUMBERS || o->type == OPTION_ENTRIES;
  if (n->kind != (list ? DOCUMENT_LIST : DOCUMENT_SCALAR)) {
    snprintf(why, sizeof why, "%s is wanted, not %s", list ? "a list" : o->type == OPTION_NONE ? "a mapping or none" : "a single value",
             document_kind_name(n->kind));
    good = false;
  } else if (o->type == OPTION_ENTRIES) {
    read_entries(l, d, n, t, o, label);
    return;
  } else if (o->type == OPTION_NUMBERS) {
    option_list_clear(o, t->base);
    for (struct document_node *item = n->child; item && good; item = item->next) {
      at = document_origin(d, item);
      if (item->kind == DOCUMENT_SCALAR) {
        good = option_number_add(o, t->base, item->text, why);
      } else {
        snprintf(why, sizeof why, "an item must be a number, not %s", document_kind_name(item->kind));
        good = false;
      }
    }
  } else {
    bool text = o->type == OPTION_TEXT || o->type == OPTION_ROUTE || o->type == OPTION_RANGE;
    char shown[QUOTED];
    if (n->quoted && !text && o->type != OPTION_WORD && o->type != OPTION_NONE) {
      char type[32];
      option_type_text(o, type, sizeof type);
      snprintf(why, sizeof why, "%s is text because of its quotes; write the %s without them",
               text_quote(n->text, shown), type);
      good = false;
    } else if (!n->quoted && text && (n->text[0] == 0 || strcmp(n->text, "~") == 0 || strcmp(n->text, "null") == 0)) {
      snprintf(why, sizeof why, "has no value%s", o->type == OPTION_TEXT ? "; write \"\" for an empty text" : "");
      good = false;
    } else {
      good = option_parse(o, base_of(l, t, o), n->text, why);
    }
  }
  if (!good) {
    findings_add(&l->problems, at, label, "%s", why);
    r->state = OPTION_BROKEN;
  }
}

/* A key that is also the name of a mapping, where that mapping is given:
 * rope_scaling is not `none`, head is no single word. */
static void set_to_mapping(struct target *t, const struct option *o, struct origin at) {
  if (o->type == OPTION_NONE) {
    bool enabled = true;
    memcpy((char *)t->base + o->offset, &enabled, sizeof enabled);
  } else {
    memset((char *)t->base + o->offset, 0, o->size);
  }
  t->record[o - t->section->rows] = (struct option_record){OPTION_GIVEN, at};
}

/* Such a key undoes the keys of its mapping, and each of them undoes it. */
static void keep_group_consistent(struct target *t, const struct option *o) {
  const struct option_section *s = t->section;
  size_t length = strcspn(o->key, ".");
  bool inner = o->key[length] == '.';
  for (int i = 0; i < s->n_rows; i++) {
    const struct option *other = &s->rows[i];
    if (strncmp(other->key, o->key, length) != 0) continue;
    const bool mapping = other->type != OPTION_NONE && ((const char *)t->base + other->offset)[0] == 0;
    if (inner && other->key[length] == 0 && !mapping)
      set_to_mapping(t, other, t->record[o - s->rows].at);
    else if (!inner && other->key[length] == '.')
      t->record[i] = (struct option_record){0};
  }
}

static void walk(struct config_loader *l, struct document *d, struct document_node *mapping, struct target *t,
                 const char *path) {
  for (struct document_node *n = mapping->child; n; n = n->next) {
    char key[LABEL], label[LABEL + LABEL];
    snprintf(key, sizeof key, "%s%s", path, n->key);
    snprintf(label, sizeof label, "%s%s", t->prefix, key);
    const struct option *o = strchr(n->key, '.') ? NULL : option_find(t->section, key);
    bool group = !strchr(n->key, '.') && is_group(t->section, key);
    if (group && n->kind == DOCUMENT_MAPPING) {
      snprintf(key, sizeof key, "%s%s.", path, n->key);
      if (o) set_to_mapping(t, o, document_origin(d, n)); /* even an empty one */
      walk(l, d, n, t, key);
    } else if (o) {
      take(l, d, n, t, o, label);
      keep_group_consistent(t, o);
    } else if (group) {
      if (n->kind != DOCUMENT_BROKEN)
        findings_add(&l->problems, document_origin(d, n), label, "a mapping of its keys is wanted, not %s",
                     document_kind_name(n->kind));
    } else if (strchr(n->key, '.')) {
      findings_add(&l->problems, document_key_origin(d, n), label, "unknown key; dots are for --set, a file nests mappings");
    } else {
      unknown_key(l, document_key_origin(d, n), t->section, key, label);
    }
  }
}

/* ---- a document --------------------------------------------------------------- */

static bool is_null(const struct document_node *n) { return n->kind == DOCUMENT_SCALAR && !n->quoted && n->text[0] == 0; }

void config_take_document(struct config_loader *l, struct document *d) {
  struct document_node *root = d->root;
  if (!root) return;
  if (root->kind != DOCUMENT_MAPPING) {
    if (root->kind != DOCUMENT_BROKEN)
      findings_add(&l->problems, document_origin(d, root), NULL, "a mapping of sections is wanted, not %s",
                   document_kind_name(root->kind));
    l->whole = false;
    return;
  }
  for (struct document_node *n = root->child; n; n = n->next) {
    const struct option_section *s = option_section(n->key);
    struct target top = target_of(l, &option_sections[0]);
    const struct option *o = option_find(top.section, n->key);
    if (strcmp(n->key, "include") == 0) continue; /* done before this file */
    if (o) {
      take(l, d, n, &top, o, n->key);
    } else if (s && s->name[0] && s->base == OPTION_OF_CONFIG) {
      struct target t = target_of(l, s);
      if (n->kind == DOCUMENT_MAPPING)
        walk(l, d, n, &t, "");
      else if (n->kind != DOCUMENT_BROKEN && !is_null(n))
        findings_add(&l->problems, document_origin(d, n), n->key, "a section is a mapping of keys, not %s",
                     document_kind_name(n->kind));
    } else if (strchr(n->key, '.')) {
      findings_add(&l->problems, document_key_origin(d, n), n->key, "unknown key; dots are for --set, a file nests mappings");
    } else {
      unknown_key(l, document_key_origin(d, n), &option_sections[0], n->key, n->key);
    }
  }
}

/* ---- --set ------------------------------------------------------------------ */

void config_take_set(struct config_loader *l, const char *set) {
  const struct origin at = {.set = true};
  char key[LABEL], why[OPTION_WHY], shown[QUOTED];
  const char *equals = strchr(set, '=');
  if (!equals || equals == set || equals - set >= LABEL) {
    findings_add(&l->problems, at, NULL, "%s is not of the form section.key=value", text_quote(set, shown));
    return;
  }
  snprintf(key, sizeof key, "%.*s", (int)(equals - set), set);
  const struct option_section *s;
  const struct option *o = find(key, &s);
  if (!o) {
    if (s->name[0] == 0 && option_section(key) && key[0]) {
      findings_add(&l->problems, at, key, "is a section; set one of its keys: %s.%s=...", key, option_section(key)->rows[0].key);
    } else if (strcmp(key, "include") == 0) {
      findings_add(&l->problems, at, key, "is for files only");
    } else {
      text_quote(key, shown);
      shown[strlen(shown) - 1] = 0; /* without the quotes */
      const char *rest = s->name[0] ? key + strlen(s->name) + 1 : strchr(key, '.') ? strchr(key, '.') + 1 : key;
      unknown_key(l, at, s, rest, shown + 1);
    }
    return;
  }
  if (s->base == OPTION_OF_ROUTE && !l->route.mapping) {
    findings_add(&l->problems, at, key, "the route is given by name; parts can be set of a route that is a mapping");
    return;
  }
  struct target t = target_of(l, s);
  struct option_record *r = &t.record[o - s->rows];
  *r = (struct option_record){OPTION_GIVEN, at};
  if (!option_parse(o, base_of(l, &t, o), equals + 1, why)) {
    findings_add(&l->problems, at, key, "%s%s", why, o->type == OPTION_ENTRIES && !o->single ? "; give it in a file" : "");
    r->state = OPTION_BROKEN;
  }
  keep_group_consistent(&t, o);
}

/* ---- defaults ------------------------------------------------------------------ */

void config_take_defaults(struct config_loader *l) {
  for (int i = 0; i < option_section_number; i++) {
    struct target t = target_of(l, &option_sections[i]);
    if (option_sections[i].base == OPTION_OF_CONFIG) apply_defaults(l, &t);
  }
}
