/* Routes from words, and whether a backend executes them. */
#include "model/route.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/linears.h"

/* ---- the words ---------------------------------------------------------- */

struct word {
  const char *word;
  int value;
};

static const struct word format_words[] = {
    {"fp32", FORMAT_F32},   {"bf16", FORMAT_BF16},   {"e4m3", FORMAT_E4M3},
    {"fp8", FORMAT_E4M3},   {"e5m2", FORMAT_E5M2},   {"mxfp4", FORMAT_MXFP4},
    {"nvfp4", FORMAT_NVFP4}, {"nvfp4-local", FORMAT_NVFP4_LOCAL}, {NULL, 0}};

static const struct word block_words[] = {
    {"1x16", BLOCK_1X16}, {"1x32", BLOCK_1X32}, {"2d16", BLOCK_2D16}, {"2d32", BLOCK_2D32}, {NULL, 0}};

static const struct word scale_words[] = {
    {"encode", SCALE_MX_ENCODE},     {"decode", SCALE_MX_DECODE}, {"floor", SCALE_MX_FLOOR},
    {"adaptive", SCALE_MX_ADAPTIVE}, {"tensor", SCALE_TENSOR},    {"faithful", SCALE_LOCAL_FAITHFUL},
    {"pow2", SCALE_LOCAL_POW2},      {NULL, 0}};

static const struct word hadamard_words[] = {{"none", HADAMARD_NONE},
                                             {"plain-16", HADAMARD_PLAIN_16},
                                             {"signed-16", HADAMARD_SIGNED_16},
                                             {"signed-32", HADAMARD_SIGNED_32},
                                             {NULL, 0}};

static int word_value(const struct word *words, const char *text) {
  for (const struct word *w = words; w->word; w++)
    if (strcmp(w->word, text) == 0) return w->value;
  return -1;
}

static const char *word_of(const struct word *words, int value) {
  for (const struct word *w = words; w->word; w++)
    if (w->value == value) return w->word;
  return "?";
}

/* "a, b, c" for a message. */
static const char *word_list(const struct word *words, char *text, size_t size) {
  size_t used = 0;
  text[0] = '\0';
  for (const struct word *w = words; w->word && used < size; w++)
    used += (size_t)snprintf(text + used, size - used, "%s%s", w == words ? "" : ", ", w->word);
  return text;
}

bool format_parse(const char *word, enum format *out, struct error *e) {
  char known[160];
  int value = word_value(format_words, word);
  if (value < 0)
    return error_set(e, ERROR_CONFIG, "\"%s\" is no format (%s)", word,
                     word_list(format_words, known, sizeof known));
  *out = (enum format)value;
  return true;
}

const char *format_name(enum format f) { return word_of(format_words, (int)f); }

const char *const operand_role_names[OPERAND_ROLE_COUNT] = {"fprop x",  "fprop w",  "dgrad dy",
                                                            "dgrad w", "wgrad dy", "wgrad x"};

/* ---- one encoding -------------------------------------------------------- */

static bool role_is_weight(enum operand_role role) { return role == FPROP_W || role == DGRAD_W; }
static bool role_is_gradient(enum operand_role role) { return role == DGRAD_DY || role == WGRAD_DY; }

int block_size(enum block_geometry b) {
  switch (b) {
    case BLOCK_1X16:
    case BLOCK_2D16: return 16;
    case BLOCK_1X32:
    case BLOCK_2D32: return 32;
    case BLOCK_NONE: break;
  }
  return 1;
}

bool block_is_2d(enum block_geometry b) { return b == BLOCK_2D16 || b == BLOCK_2D32; }

/* Elements that share a scale; 0 where the format has no blocks. */
static int format_block_size(enum format f) {
  switch (f) {
    case FORMAT_MXFP4: return 32;
    case FORMAT_NVFP4:
    case FORMAT_NVFP4_LOCAL: return 16;
    case FORMAT_F32:
    case FORMAT_BF16:
    case FORMAT_E4M3:
    case FORMAT_E5M2: break;
  }
  return 0;
}

static bool scale_fits(enum format f, enum scale_rule s) {
  switch (f) {
    case FORMAT_MXFP4: return s >= SCALE_MX_ENCODE && s <= SCALE_MX_ADAPTIVE;
    case FORMAT_NVFP4: return s == SCALE_TENSOR;
    case FORMAT_NVFP4_LOCAL: return s == SCALE_LOCAL_FAITHFUL || s == SCALE_LOCAL_POW2;
    case FORMAT_F32:
    case FORMAT_BF16:
    case FORMAT_E4M3:
    case FORMAT_E5M2: break;
  }
  return s == SCALE_NONE;
}

/* Weights are encoded in square tiles so that both orientations decode alike
 * (the reports' Eq. 8); everything else along its contraction axis. */
static struct encoding format_default(enum format f, enum operand_role role) {
  struct encoding e = {.format = f};
  bool weight = role_is_weight(role);
  switch (f) {
    case FORMAT_MXFP4:
      e.block = weight ? BLOCK_2D32 : BLOCK_1X32;
      break;
    case FORMAT_NVFP4:
      e.block = weight ? BLOCK_2D16 : BLOCK_1X16;
      e.scale = SCALE_TENSOR;
      break;
    case FORMAT_NVFP4_LOCAL:
      e.block = weight ? BLOCK_2D16 : BLOCK_1X16;
      e.scale = SCALE_LOCAL_FAITHFUL;
      break;
    case FORMAT_F32:
    case FORMAT_BF16:
    case FORMAT_E4M3:
    case FORMAT_E5M2: break;
  }
  return e;
}

bool encoding_parse(const char *words, enum operand_role role, struct encoding *out, struct error *e) {
  char text[ENCODING_TEXT * 2], known[160];
  if (strlen(words) >= sizeof text) return error_set(e, ERROR_CONFIG, "\"%.40s...\" is no encoding", words);
  strcpy(text, words);
  char *rest = text;
  char *word = strsep(&rest, "/");
  enum format f = FORMAT_F32;
  if (strcmp(word, "same") == 0)
    return error_set(e, ERROR_CONFIG, "\"same\" (the encoding of fprop w) is for dgrad w alone");
  if (!format_parse(word, &f, e)) return false;
  struct encoding result = format_default(f, role);

  bool block_said = false, scale_said = false;
  while ((word = strsep(&rest, "/"))) {
    int value;
    if (result.rounding != ROUND_NEAREST)
      return error_set(e, ERROR_CONFIG, "\"%s\": nothing may follow \"sr\"", words);
    if ((value = word_value(block_words, word)) >= 0) {
      if (block_said || scale_said)
        return error_set(e, ERROR_CONFIG, "\"%s\": \"%s\" stands where no block may: FORMAT[/BLOCK][/SCALE-RULE][/sr]",
                         words, word);
      block_said = true;
      result.block = (enum block_geometry)value;
      if (block_size(result.block) != format_block_size(f))
        return error_set(e, ERROR_CONFIG, "\"%s\": %s has no %s blocks", words, format_name(f), word);
    } else if ((value = word_value(scale_words, word)) >= 0) {
      if (scale_said) return error_set(e, ERROR_CONFIG, "\"%s\" names two scale rules", words);
      scale_said = true;
      result.scale = (enum scale_rule)value;
      if (!scale_fits(f, result.scale))
        return error_set(e, ERROR_CONFIG, "\"%s\": \"%s\" is no scale rule of %s", words, word, format_name(f));
    } else if (strcmp(word, "sr") == 0) {
      if (format_block_size(f) == 0)
        return error_set(e, ERROR_CONFIG, "\"%s\": %s is not rounded stochastically", words, format_name(f));
      if (!role_is_gradient(role))
        return error_set(e, ERROR_CONFIG, "\"%s\": only dy is rounded stochastically, not %s", words,
                         operand_role_names[role]);
      result.rounding = ROUND_STOCHASTIC;
    } else {
      return error_set(e, ERROR_CONFIG, "\"%s\": \"%s\" is no block, scale rule or \"sr\" (%s, ...)", words, word,
                       word_list(block_words, known, sizeof known));
    }
  }
  if (f == FORMAT_MXFP4 && !scale_said)
    result.scale = block_is_2d(result.block) ? SCALE_MX_ADAPTIVE : SCALE_MX_ENCODE;
  *out = result;
  return true;
}

/* ---- spans --------------------------------------------------------------- */

/* "N" at *text, up to `end`; moves *text behind it. */
static bool number_parse(const char **text, long *out) {
  if (**text < '0' || **text > '9') return false;
  char *end;
  *out = strtol(*text, &end, 10);
  *text = end;
  return *out <= 1000000;
}

static bool layers_parse(const char *layers, int n_layers, int *first, int *last, struct error *e) {
  const char *text = layers;
  long a = 0, b = 0;
  bool good = true;
  if (strcmp(text, "all") == 0) {
    a = 1;
    b = n_layers;
  } else if (strncmp(text, "last-", 5) == 0) {
    text += 5;
    good = number_parse(&text, &b) && *text == '\0' && b > 0;
    a = n_layers - b + 1;
    b = n_layers;
  } else if (strncmp(text, "all-but-last-", 13) == 0) {
    text += 13;
    good = number_parse(&text, &b) && *text == '\0' && b > 0;
    a = 1;
    b = n_layers - b;
  } else {
    good = number_parse(&text, &a);
    b = a;
    if (good && *text == '-') {
      text++;
      good = number_parse(&text, &b);
    }
    good = good && *text == '\0';
  }
  if (!good)
    return error_set(e, ERROR_CONFIG,
                     "layers \"%s\": not \"all\", \"5\", \"1-27\", \"last-4\" or \"all-but-last-4\"", layers);
  if (a < 1 || b > n_layers || a > b)
    return error_set(e, ERROR_CONFIG, "layers \"%s\": outside the model's blocks 1-%d", layers, n_layers);
  *first = (int)a;
  *last = (int)b;
  return true;
}

static bool span_operand(const char *words, enum operand_role role, const char *layers, struct linear_route *linear,
                         struct error *e) {
  if (!words)
    return error_set(e, ERROR_CONFIG, "layers \"%s\": no encoding for %s", layers, operand_role_names[role]);
  struct encoding *out = &linear->operand[role];
  if (role == DGRAD_W && strcmp(words, "same") == 0) {
    *out = linear->operand[FPROP_W];
    return true;
  }
  if (!encoding_parse(words, role, out, e))
    return error_context(e, "layers \"%s\": %s", layers, operand_role_names[role]);
  return true;
}

bool route_add_span(struct route *r, const struct route_words *w, int n_layers, struct error *e) {
  if (!w->layers) return error_set(e, ERROR_CONFIG, "a span of a route says no layers");
  struct route_span span;
  memset(&span, 0, sizeof span);
  if (!layers_parse(w->layers, n_layers, &span.first, &span.last, e)) return false;

  const char *words[OPERAND_ROLE_COUNT] = {
      [FPROP_X] = w->fprop_x, [FPROP_W] = w->fprop_w,   [DGRAD_DY] = w->dgrad_dy,
      [DGRAD_W] = w->dgrad_w, [WGRAD_DY] = w->wgrad_dy, [WGRAD_X] = w->wgrad_x};
  for (int role = 0; role < OPERAND_ROLE_COUNT; role++)
    if (!span_operand(words[role], (enum operand_role)role, w->layers, &span.linear, e)) return false;

  if (w->hadamard) {
    char known[64];
    int value = word_value(hadamard_words, w->hadamard);
    if (value < 0)
      return error_set(e, ERROR_CONFIG, "layers \"%s\": \"%s\" is no hadamard transform (%s)", w->layers, w->hadamard,
                       word_list(hadamard_words, known, sizeof known));
    for (int i = 0; i < 2 && value != HADAMARD_NONE; i++) {
      enum operand_role role = i == 0 ? WGRAD_DY : WGRAD_X;
      struct encoding *operand = &span.linear.operand[role];
      if (encoding_is_plain(operand))
        return error_set(e, ERROR_CONFIG, "layers \"%s\": hadamard %s needs a quantised %s, not %s", w->layers,
                         w->hadamard, operand_role_names[role], format_name(operand->format));
      operand->hadamard = (enum hadamard)value;
    }
  }

  for (int i = 0; i < r->n_spans; i++) {
    const struct route_span *other = &r->span[i];
    if (span.first <= other->last && other->first <= span.last)
      return error_set(e, ERROR_CONFIG, "layers \"%s\" overlap the span of blocks %d-%d", w->layers, other->first,
                       other->last);
  }
  if (r->n_spans == ROUTE_SPANS)
    return error_set(e, ERROR_CONFIG, "layers \"%s\": a route has at most %d spans", w->layers, ROUTE_SPANS);
  r->span[r->n_spans++] = span;
  return true;
}

const struct linear_route *route_linear(const struct route *r, int layer) {
  for (int i = 0; i < r->n_spans; i++)
    if (layer + 1 >= r->span[i].first && layer + 1 <= r->span[i].last) return &r->span[i].linear;
  return NULL;
}
