#include "trainer/changes.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"

/* One entry of a dump: its key with the sections that it is in, and its value.
 * A route's value is all of its lines. */
struct entry {
  char key[160];
  const char *value;
  size_t bytes;
};

/* Where a reader of a dump is: the text that is left, the names above it. */
struct reader {
  const char *at;
  char section[64], group[64];
};

static bool next_entry(struct reader *r, struct entry *out) {
  while (*r->at) {
    const char *line = r->at;
    const size_t length = strcspn(line, "\n"), indent = strspn(line, " ");
    const size_t name = strcspn(line + indent, ":\n");
    r->at += length + (line[length] == '\n');
    const char *value = line + indent + name + 1;
    if (indent + name + 1 >= length) { /* a name alone: what it holds follows */
      if (indent == 0) {
        snprintf(r->section, sizeof r->section, "%.*s.", (int)name, line);
        r->group[0] = 0;
      } else {
        snprintf(r->group, sizeof r->group, "%.*s.", (int)name, line + indent);
      }
      if (indent > 0 || strcmp(r->section, "route.") != 0) continue;
      out->value = r->at;
      while (*r->at == ' ') {
        r->at += strcspn(r->at, "\n");
        r->at += *r->at == '\n';
      }
      out->bytes = (size_t)(r->at - out->value);
      snprintf(out->key, sizeof out->key, "route");
      return true;
    }
    if (indent == 0) r->section[0] = 0;
    if (indent <= 2) r->group[0] = 0;
    snprintf(out->key, sizeof out->key, "%s%s%.*s", r->section, r->group, (int)name, line + indent);
    out->value = value + (*value == ' ');
    out->bytes = (size_t)(line + length - out->value);
    return true;
  }
  return false;
}

static bool find(const char *text, const char *key, struct entry *out) {
  struct reader r = {.at = text};
  while (next_entry(&r, out))
    if (strcmp(out->key, key) == 0) return true;
  return false;
}

/* A value as it is shown: a route by the name in its first line. */
static int shown(const struct entry *e, const char **text) {
  *text = e->value;
  if (strcmp(e->key, "route") != 0) return (int)e->bytes;
  *text += strcspn(*text, "\"");
  return (int)strcspn(*text, "\n");
}

struct listener {
  void (*line)(void *context, const char *key, const char *text);
  void *context;
};

static void say(const struct listener *to, const struct entry *was, const struct entry *is) {
  const char *before = "absent", *after = "absent";
  char text[1400];
  int n = was ? shown(was, &before) : 6, m = is ? shown(is, &after) : 6;
  const bool same_name = n == m && strncmp(before, after, (size_t)n) == 0; /* a route's other content */
  snprintf(text, sizeof text, "%s: %.*s -> %.*s%s", is ? is->key : was->key, n, before, m, after,
           same_name ? " of another content" : "");
  to->line(to->context, is ? is->key : was->key, text);
}

void changes_list(const char *was, const char *is, void (*line)(void *context, const char *key, const char *text),
                  void *context) {
  const struct listener to = {line, context};
  struct entry before, after;
  for (struct reader r = {.at = is}; next_entry(&r, &after);) {
    const bool there = find(was, after.key, &before);
    if (!there || before.bytes != after.bytes || memcmp(before.value, after.value, after.bytes) != 0)
      say(&to, there ? &before : NULL, &after);
  }
  for (struct reader r = {.at = was}; next_entry(&r, &before);)
    if (!find(is, before.key, &after)) say(&to, &before, NULL);
}

static void log_line_of(void *context, const char *key, const char *text) {
  (void)context, (void)key;
  log_info("configuration changed since the checkpoint: %s", text);
}

void changes_log(const char *was, const char *is) { changes_list(was, is, log_line_of, NULL); }
