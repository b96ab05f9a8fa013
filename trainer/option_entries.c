/* Options that are lists: of numbers, of mappings. */
#include <inttypes.h>
#include <stdarg.h>
#include <string.h>

#include "trainer/options.h"

static int64_t count_of(const struct option *o, const void *base) {
  int64_t n;
  memcpy(&n, (const char *)base + o->count, sizeof n);
  return n;
}

static void set_count(const struct option *o, void *base, int64_t n) { memcpy((char *)base + o->count, &n, sizeof n); }

void option_list_clear(const struct option *o, void *base) {
  memset((char *)base + o->offset, 0, o->size);
  set_count(o, base, 0);
}

static void *next_item(const struct option *o, void *base, char why[OPTION_WHY]) {
  const int64_t n = count_of(o, base);
  if (n == (int64_t)(o->size / o->each)) {
    snprintf(why, OPTION_WHY, "more than %zu items", o->size / o->each);
    return NULL;
  }
  set_count(o, base, n + 1);
  return (char *)base + o->offset + (size_t)n * o->each;
}

void *option_entry_add(const struct option *o, void *base, char why[OPTION_WHY]) {
  const struct option_section *s = option_section(o->entries);
  void *entry = next_item(o, base, why);
  if (entry) option_take_defaults(s, entry);
  return entry;
}

bool option_number_add(const struct option *o, void *base, const char *text, char why[OPTION_WHY]) {
  struct option one = *o;
  double value;
  one.type = OPTION_NUMBER;
  one.offset = 0;
  if (!option_parse(&one, &value, text, why)) return false;
  void *to = next_item(o, base, why);
  if (to) memcpy(to, &value, sizeof value);
  return to != NULL;
}

static bool add_text(const struct option *o, void *base, const char *text, char why[OPTION_WHY]) {
  if (*text == 0) {
    snprintf(why, OPTION_WHY, "an item is empty");
    return false;
  }
  if (o->type == OPTION_NUMBERS) return option_number_add(o, base, text, why);
  void *entry = option_entry_add(o, base, why);
  return entry && option_parse(option_find(option_section(o->entries), o->single), entry, text, why);
}

bool option_list_parse(const struct option *o, void *base, const char *text, char why[OPTION_WHY]) {
  if (o->type == OPTION_ENTRIES && !o->single && (*text || !o->fallback)) {
    snprintf(why, OPTION_WHY, "a list of mappings is wanted");
    return false;
  }
  option_list_clear(o, base);
  for (const char *s = text; *s;) {
    const size_t length = strcspn(s, ",");
    char item[2 * CONFIG_TEXT];
    snprintf(item, sizeof item, "%.*s", (int)(length < sizeof item ? length : sizeof item - 1), s);
    if (!add_text(o, base, item, why)) return false;
    s += length + (s[length] == ',');
  }
  return true;
}

void option_list_write(const struct option *o, const void *base, FILE *out) {
  const struct option_section *s = o->type == OPTION_ENTRIES ? option_section(o->entries) : NULL;
  struct option number = *o;
  number.type = OPTION_NUMBER;
  number.offset = 0;
  fputc('[', out);
  for (int64_t i = 0; i < count_of(o, base); i++) {
    const char *item = (const char *)base + o->offset + (size_t)i * o->each;
    if (i > 0) fputs(", ", out);
    if (!s) {
      option_write(&number, item, out);
      continue;
    }
    for (int j = 0; j < s->n_rows; j++) {
      fprintf(out, "%s%s: ", j == 0 ? "{" : ", ", s->rows[j].key);
      option_write(&s->rows[j], item, out);
    }
    fputc('}', out);
  }
  fputc(']', out);
}
