/* The tables of options: what is documented is what happens. */
#include "tests/config_rig.h"

static char *printed(bool markdown) {
  char *text = NULL;
  size_t bytes;
  FILE *out = open_memstream(&text, &bytes);
  if (!out) return NULL;
  options_print(out, markdown);
  return fclose(out) == 0 ? text : NULL;
}

TEST(documentation) {
  char *page = printed(true), *file = NULL;
  size_t bytes;
  if (!file_read("docs/config.md", 1 << 20, ERROR_SYSTEM, &file, &bytes, &failure)) {
    FAIL("%s", failure.message);
    free(page);
    return;
  }
  if (strcmp(page, file) != 0) FAIL("docs/config.md is old: fp4d help config --markdown > docs/config.md");

  /* Every documented key with its documented default (or, where that is words,
   * some value) is accepted; the same key misspelt is not. */
  int keys = 0;
  char section[64] = "";
  for (char *save, *line = strtok_r(file, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
    char key[64], type[200], fallback[100], set[400];
    if (sscanf(line, "## `%63[^`]`", section) == 1) continue;
    if (strcmp(line, "## Top level") == 0) section[0] = 0;
    if (sscanf(line, "| `%63[^`]` | %199[^|]| %99[^|]|", key, type, fallback) != 3) continue;
    keys++;
    if (strncmp(section, "route", 5) == 0 || strstr(section, "[]")) continue; /* trainer_config_test.c has them */
    char *value = fallback;
    if (value[0] == '`') {
      value++;
      value[strcspn(value, "`")] = 0;
      if (value[0] == '"' || value[0] == '[') value[0] = 0;
    } else {
      value = strcmp(key, "rope_scaling") == 0 ? "none" : strncmp(type, "integer", 7) == 0 ? "512" :
              strncmp(type, "number", 6) == 0 ? (strcmp(key, "norm_eps") == 0 ? "1e-6" : "2") : strncmp(type, "bool", 4) == 0 ? "true" : "some";
      if (strcmp(key, "n_heads") == 0) value = "32";
      if (strcmp(key, "n_kv_heads") == 0) value = "8";
      if (strcmp(key, "n_layers") == 0) value = "3";
    }
    if (strcmp(key, "preset") == 0) value = "tiny"; /* without one the shape must be given */
    snprintf(set, sizeof set, "%s%s%s=%s", section, section[0] ? "." : "", key, value);
    const char *const sets[] = {"model.preset=llama3.1-8b", set};
    if (!parse(GOOD, sets, 2)) FAIL("%s: %s", set, failure.message);
    snprintf(set, sizeof set, "%s%s%sx=%s", section, section[0] ? "." : "", key, value);
    CHECK(!parse(GOOD, sets, 2));
    CHECK(strstr(failure.message, "unknown key"));
  }
  int rows = 0;
  for (int i = 0; i < option_section_number; i++) rows += option_sections[i].n_rows;
  CHECK_EQ_I64(keys, rows);
  free(page);
  free(file);
  char *plain = printed(false);
  CHECK(strstr(plain, "warmup_updates"));
  free(plain);
}

/* The tables themselves: defaults in range, help there, no key twice. */
TEST(tables) {
  static union {
    struct config c;
    struct route_draft r;
    struct span_draft s;
    struct data_source source;
    struct data_stage stage;
    struct data_skip skip;
  } base;
  char why[OPTION_WHY];
  CHECK(option_section_number <= OPTION_SECTIONS);
  for (int i = 0; i < option_section_number; i++) {
    const struct option_section *s = &option_sections[i];
    CHECK(s->n_rows <= OPTION_ROWS);
    for (int j = 0; j < s->n_rows; j++) {
      const struct option *o = &s->rows[j];
      CHECK(o->help && o->help[0] && o->help[strlen(o->help) - 1] == '.');
      CHECK((o->fallback != NULL) != (o->fallback_words != NULL));
      CHECK(option_find(s, o->key) == o);
      memset(&base, 0, sizeof base);
      if (o->fallback && !option_parse(o, &base, o->fallback, why)) FAIL("%s.%s: %s", s->name, o->key, why);
      if (o->type == OPTION_INTEGER) CHECK(o->size == sizeof(int64_t) && o->low < o->high);
      if (o->type == OPTION_NUMBER) CHECK(o->size == sizeof(double) && o->lower < o->upper);
      if (o->type == OPTION_BOOL || o->type == OPTION_NONE) CHECK(o->size == sizeof(bool));
      if (o->type == OPTION_WORD) CHECK(o->size == sizeof(unsigned) && o->words);
    }
  }
}

int main(void) {
  RUN(documentation);
  RUN(tables);
  return test_report();
}
