/* The resolved configuration as YAML. */
#include <stdlib.h>
#include <string.h>

#include "trainer/options.h"

static void write_encoding(const struct encoding *e, FILE *out) {
  struct encoding plain = *e;
  char text[ENCODING_TEXT];
  plain.hadamard = HADAMARD_NONE; /* has its own key */
  option_write_text(encoding_text(&plain, text, sizeof text), out);
}

/* fprop, dgrad and wgrad of a linear, a line each behind `indent`. */
static void write_linear(const struct linear_route *linear, const char *indent, FILE *out) {
  static const struct {
    bool line;
    const char *before;
    enum operand_role role;
  } parts[] = {{true, "fprop: {x: ", FPROP_X}, {false, ", w: ", FPROP_W},    {true, "dgrad: {dy: ", DGRAD_DY},
               {false, ", w: ", DGRAD_W},      {true, "wgrad: {x: ", WGRAD_X}, {false, ", dy: ", WGRAD_DY}};
  for (size_t p = 0; p < sizeof parts / sizeof parts[0]; p++) {
    fprintf(out, "%s%s%s", parts[p].line && p > 0 ? "}\n" : "", parts[p].line ? indent : "", parts[p].before);
    write_encoding(&linear->operand[parts[p].role], out);
  }
  fprintf(out, ", hadamard: %s}\n", hadamard_name(linear->operand[WGRAD_X].hadamard));
}

/* Written out, not by name: a saved configuration says what was computed even
 * where a later program has other routes. */
static void write_route(const struct route *r, FILE *out) {
  fprintf(out, "route:\n  name: \"%s\"\n  linears:\n", r->name);
  for (int i = 0; i < r->n_spans; i++) {
    const struct route_span *s = &r->span[i];
    fprintf(out, "    - layers: %d-%d\n", s->first, s->last);
    char sites[LINEAR_SITES_TEXT];
    if (strcmp(linear_sites_text(s->sites, sites), "all") != 0) fprintf(out, "      sites: %s\n", sites);
    write_linear(&s->linear, "      ", out);
  }
  fprintf(out, "  attention: {qk: %s", format_name(r->attention_qk));
  fprintf(out, ", pv: %s", format_name(r->attention_pv));
  fprintf(out, ", do: %s", format_name(r->attention_d_out));
  if (r->attention_p_slope > 0) fprintf(out, ", p_slope: %.17g, p_offset: %.17g", r->attention_p_slope, r->attention_p_offset);
  if (r->attention_d_out_lift > 0) fprintf(out, ", do_lift: %.17g", r->attention_d_out_lift);
  fprintf(out, "}\n");
  fprintf(out, "  head:\n");
  write_linear(&r->head, "    ", out);
  fprintf(out, "  forward_bf16_tail: %.17g\n", r->forward_tail);
  fprintf(out, "  activations: %s\n", dtype_name(r->activations));
}

static void write_section(const struct config *c, const struct option_section *s, FILE *out) {
  const char *indent = s->name[0] ? "  " : "";
  if (s->name[0]) fprintf(out, "%s:\n", s->name);
  size_t group = 0; /* length of the nested mapping's name that we are in */
  bool skip = false;
  const char *group_key = "";
  for (int i = 0; i < s->n_rows; i++) {
    const struct option *o = &s->rows[i];
    const char *dot = strchr(o->key, '.');
    if (o->type == OPTION_ROUTE) {
      write_route(&c->route, out);
      continue;
    }
    if (dot && group && strncmp(group_key, o->key, group + 1) == 0) {
      if (skip) continue;
    } else if (dot) {
      group_key = o->key;
      group = (size_t)(dot - o->key);
      fprintf(out, "%s%.*s:\n", indent, (int)group, o->key);
    } else if (o->type == OPTION_NONE) { /* its mapping follows where it is not `none` */
      bool enabled;
      memcpy(&enabled, (const char *)c + o->offset, sizeof enabled);
      skip = !enabled;
      group = skip ? strlen(o->key) : 0;
      group_key = skip && i + 1 < s->n_rows ? s->rows[i + 1].key : "";
      if (!skip) continue;
    }
    if (dot)
      fprintf(out, "%s  %s: ", indent, dot + 1);
    else
      fprintf(out, "%s%s: ", indent, o->key);
    option_write(o, c, out);
    fputc('\n', out);
  }
}

char *config_dump(const struct config *c) {
  char *text = NULL;
  size_t bytes = 0;
  FILE *out = open_memstream(&text, &bytes);
  if (!out) return NULL;
  for (int i = 1; i < option_section_number; i++)
    if (option_sections[i].base == OPTION_OF_CONFIG) write_section(c, &option_sections[i], out);
  write_section(c, &option_sections[0], out);
  if (fclose(out) != 0) {
    free(text);
    return NULL;
  }
  return text;
}
