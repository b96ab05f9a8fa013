/* The tables as text for a terminal and as docs/config.md. */
#include <string.h>

#include "trainer/options.h"

static void default_text(const struct option *o, char *text, size_t size, bool markdown) {
  if (o->fallback_words)
    snprintf(text, size, "%s", o->fallback_words);
  else if (!o->fallback)
    text[0] = 0;
  else if (o->type == OPTION_ENTRIES)
    snprintf(text, size, markdown ? "`[%s]`" : "[%s]", o->fallback);
  else if (o->fallback[0] == 0)
    snprintf(text, size, markdown ? "`\"\"`" : "\"\"");
  else
    snprintf(text, size, markdown ? "`%s`" : "%s", o->fallback);
}

static void describe(const struct option *o, char *text, size_t size) {
  char range[120];
  option_type_text(o, text, size);
  option_range_text(o, range, sizeof range);
  if (o->type == OPTION_BOOL) range[0] = 0; /* said by the type */
  size_t n = strlen(text);
  if (range[0]) n += (size_t)snprintf(text + n, size - n, "%s%s", o->type == OPTION_WORD ? ": " : " ", range);
  if (o->unit) snprintf(text + n, size - n, ", %s", o->unit);
}

static void print_section(FILE *out, const struct option_section *s, bool markdown) {
  if (markdown) {
    fprintf(out, "\n## %s%s%s%s\n\n| key | type and range | default | |\n| --- | --- | --- | --- |\n", s->name[0] ? "`" : "",
            s->name, s->name[0] ? "`: " : "", s->title);
  } else {
    fprintf(out, "\n%s%s%s\n", s->name, s->name[0] ? ": " : "", s->title);
  }
  for (int i = 0; i < s->n_rows; i++) {
    const struct option *o = &s->rows[i];
    char type[200], fallback[100];
    describe(o, type, sizeof type);
    default_text(o, fallback, sizeof fallback, markdown);
    if (markdown) {
      fprintf(out, "| `%s` | %s | %s | %s |\n", o->key, type, fallback, o->help);
    } else {
      fprintf(out, "  %-*s  %s", s->name[0] ? 20 : 6, o->key, type);
      if (fallback[0]) fprintf(out, "; default: %s", fallback);
      fprintf(out, "\n      %s\n", o->help);
    }
  }
}

static void print_names(FILE *out, const char *title, const char *const *names, bool markdown) {
  fprintf(out, markdown ? "\n## %s\n\n" : "\n%s\n  ", title);
  for (int i = 0; names[i]; i++) fprintf(out, markdown ? "%s`%s`" : "%s%s", i ? ", " : "", names[i]);
  fputc('\n', out);
}

void options_print(FILE *out, bool markdown) {
  static const char *const notes[] = {
      "A run is one YAML file: a mapping of the sections below.",
      "`--set section.key=value` overrides the file, in order; a list is separated by commas.",
      "`include: other.yaml`, or a list of files, reads those first (paths relative to the file); what the including"
      " file says wins, key by key, so matched runs can share everything but one line.",
      "Every problem is reported at once, as FILE:LINE:COLUMN: key: problem; exit code 78.",
      "Numbers are decimal: 10, 1e6, 1e-5. Text needs quotes only where YAML does.",
      "Other paths are relative to the folder that fp4d is started in.",
  };
  const int n = (int)(sizeof notes / sizeof notes[0]);
  if (markdown) fputs("# Configuration\n\n<!-- made by `fp4d help config --markdown` from trainer/options.c -->\n\n", out);
  for (int i = 0; i < n; i++) fprintf(out, "%s%s\n", markdown ? "- " : "", notes[i]);
  for (int i = 0; i < option_section_number; i++) print_section(out, &option_sections[i], markdown);
  print_names(out, "Values of route", route_names(), markdown);
  print_names(out, "Values of model.preset", model_preset_names(), markdown);
}

void config_print_options(bool markdown) { options_print(stdout, markdown); }
