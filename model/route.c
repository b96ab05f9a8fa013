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
    {"adaptive", SCALE_MX_ADAPTIVE}, {"tensor", SCALE_TENSOR},    {"4over6", SCALE_TENSOR_4OVER6},
    {"row", SCALE_ROW},              {"faithful", SCALE_LOCAL_FAITHFUL}, {"pow2", SCALE_LOCAL_POW2},
    {NULL, 0}};

static const struct word hadamard_words[] = {{"none", HADAMARD_NONE},
                                             {"plain-16", HADAMARD_PLAIN_16},
                                             {"signed-16", HADAMARD_SIGNED_16},
                                             {"signed-32", HADAMARD_SIGNED_32},
                                             {NULL, 0}};

enum {
  SITES_ATTENTION = 1 << LINEAR_QKV | 1 << LINEAR_OUT,
  SITES_FFN = 1 << LINEAR_GATE_UP | 1 << LINEAR_DOWN,
  SITES_ALL = SITES_ATTENTION | SITES_FFN
};

static const struct word site_words[] = {{"all", SITES_ALL},
                                         {"attention", SITES_ATTENTION},
                                         {"ffn", SITES_FFN},
                                         {"qkv", 1 << LINEAR_QKV},
                                         {"out", 1 << LINEAR_OUT},
                                         {"gate_up", 1 << LINEAR_GATE_UP},
                                         {"down", 1 << LINEAR_DOWN},
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
const char *hadamard_name(enum hadamard h) { return word_of(hadamard_words, (int)h); }

const char *linear_sites_text(unsigned sites, char text[LINEAR_SITES_TEXT]) {
  size_t used = 0;
  for (const struct word *w = site_words; w->word; w++)
    if ((unsigned)w->value == sites) return strcpy(text, w->word);
  text[0] = '\0';
  for (int site = 0; site < LINEAR_SITES; site++)
    if (sites >> site & 1u)
      used += (size_t)snprintf(text + used, LINEAR_SITES_TEXT - used, "%s%s", used ? ", " : "", linear_name((enum linear_site)site));
  return text;
}

const char *const operand_role_names[OPERAND_ROLE_COUNT] = {"fprop x",  "fprop w",  "dgrad dy",
                                                            "dgrad w", "wgrad dy", "wgrad x"};

/* ---- one encoding -------------------------------------------------------- */

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

static bool scale_fits(enum format f, enum scale_rule s) {
  switch (f) {
    case FORMAT_MXFP4: return s >= SCALE_MX_ENCODE && s <= SCALE_MX_ADAPTIVE;
    case FORMAT_NVFP4: return s == SCALE_TENSOR || s == SCALE_TENSOR_4OVER6;
    case FORMAT_NVFP4_LOCAL: return s == SCALE_LOCAL_FAITHFUL || s == SCALE_LOCAL_POW2;
    case FORMAT_E4M3:
    case FORMAT_E5M2: return s == SCALE_TENSOR || s == SCALE_ROW;
    case FORMAT_F32:
    case FORMAT_BF16: break;
  }
  return s == SCALE_NONE;
}

/* Weights are encoded in square tiles so that both orientations decode alike
 * (the reports' Eq. 8); everything else along its contraction axis.  Rule and
 * strip are chosen by encoding_parse where they are not said. */
static struct encoding format_default(enum format f, enum operand_role role) {
  struct encoding e = {.format = f};
  bool weight = operand_role_tensor(role) == TENSOR_W;
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
    case FORMAT_E4M3:
    case FORMAT_E5M2:
      e.scale = SCALE_TENSOR;
      break;
    case FORMAT_F32:
    case FORMAT_BF16: break;
  }
  return e;
}

/* The words behind the format, in the order in which they may stand. */
enum part { PART_FORMAT, PART_BLOCK, PART_SCALE, PART_STRIP, PART_SR, PART_TRANSFORM };

/* Strips are made of whole chunks of 128x128; 256 rows are the report's. */
enum { STRIP_UNIT = 128, STRIP_DEFAULT = 256, STRIP_LARGEST = 65536 };

/* N of "stripN"; 0: not such a word. */
static int32_t strip_parse(const char *word) {
  if (strncmp(word, "strip", 5) != 0 || word[5] < '1' || word[5] > '9' || strlen(word) > 10) return 0;
  int32_t n = 0;
  for (word += 5; *word >= '0' && *word <= '9'; word++) n = n * 10 + (*word - '0');
  return *word == '\0' ? n : 0;
}

/* One word into *out, when it fits there. */
static bool word_take(const char *words, const char *word, enum operand_role role, struct encoding *out,
                      enum part *last, struct error *e) {
  const char *format = format_name(out->format);
  int value;
  enum part part;
  if ((value = word_value(block_words, word)) >= 0) {
    part = PART_BLOCK;
    out->block = (enum block_geometry)value;
    if (block_size(out->block) != encoding_block_cols(out))
      return error_set(e, ERROR_CONFIG, "\"%s\": %s has no %s blocks", words, format, word);
  } else if ((value = word_value(scale_words, word)) >= 0) {
    part = PART_SCALE;
    out->scale = (enum scale_rule)value;
    if (!scale_fits(out->format, out->scale))
      return error_set(e, ERROR_CONFIG, "\"%s\": \"%s\" is no scale rule of %s", words, word, format);
  } else if ((value = strip_parse(word)) > 0) {
    part = PART_STRIP;
    out->strip = value;
    if (out->format != FORMAT_NVFP4_LOCAL || block_is_2d(out->block))
      return error_set(e, ERROR_CONFIG, "\"%s\": strips are for 1x16 blocks of nvfp4-local alone", words);
    if (value % STRIP_UNIT != 0 || value > STRIP_LARGEST)
      return error_set(e, ERROR_CONFIG, "\"%s\": a strip is a multiple of %d rows, at most %d", words, STRIP_UNIT,
                       STRIP_LARGEST);
  } else if (strcmp(word, "sr") == 0) {
    part = PART_SR;
    out->rounding = ROUND_STOCHASTIC;
    if (encoding_block_cols(out) == 0)
      return error_set(e, ERROR_CONFIG, "\"%s\": %s is not rounded stochastically", words, format);
    if (operand_role_tensor(role) != TENSOR_DY)
      return error_set(e, ERROR_CONFIG, "\"%s\": only dy is rounded stochastically, not %s", words,
                       operand_role_names[role]);
  } else if ((value = word_value(hadamard_words, word)) > HADAMARD_NONE) {
    part = PART_TRANSFORM;
    out->hadamard = (enum hadamard)value;
    if (role != WGRAD_DY && role != WGRAD_X)
      return error_set(e, ERROR_CONFIG, "\"%s\": the operands of wgrad alone are transformed, not %s", words,
                       operand_role_names[role]);
    if (encoding_is_plain(out))
      return error_set(e, ERROR_CONFIG, "\"%s\": a transform needs a quantised operand, not %s", words, format);
  } else {
    return error_set(e, ERROR_CONFIG, "\"%s\": \"%s\" is no block, scale rule, strip, \"sr\" or transform", words, word);
  }
  if (part <= *last)
    return error_set(e, ERROR_CONFIG,
                     "\"%s\": \"%s\" stands where it may not: FORMAT[/BLOCK][/SCALE-RULE][/stripN][/sr][/TRANSFORM]", words,
                     word);
  *last = part;
  return true;
}

bool encoding_parse(const char *words, enum operand_role role, struct encoding *out, struct error *e) {
  char text[ENCODING_TEXT * 2];
  if (strlen(words) >= sizeof text) return error_set(e, ERROR_CONFIG, "\"%.40s...\" is no encoding", words);
  strcpy(text, words);
  char *rest = text;
  char *word = strsep(&rest, "/");
  enum format f = FORMAT_F32;
  if (strcmp(word, "same") == 0)
    return error_set(e, ERROR_CONFIG, "\"same\" (the encoding of fprop w) is for dgrad w alone");
  if (!format_parse(word, &f, e)) return false;
  struct encoding result = format_default(f, role);
  enum part last = PART_FORMAT;
  while ((word = strsep(&rest, "/")))
    if (!word_take(words, word, role, &result, &last, e)) return false;

  if (f == FORMAT_MXFP4 && result.scale == SCALE_NONE)
    result.scale = block_is_2d(result.block) ? SCALE_MX_ADAPTIVE : SCALE_MX_ENCODE;
  if (f == FORMAT_NVFP4_LOCAL && result.strip == 0 && operand_role_tensor(role) != TENSOR_W) {
    if (block_is_2d(result.block))
      return error_set(e, ERROR_CONFIG, "\"%s\": tiles with one outer factor are for weights, not %s", words,
                       operand_role_names[role]);
    result.strip = STRIP_DEFAULT;
  }
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

/* ---- linears --------------------------------------------------------------- */

static bool operand_parse(const char *words, enum operand_role role, struct linear_route *linear, struct error *e) {
  if (!words) return error_set(e, ERROR_CONFIG, "no encoding for %s", operand_role_names[role]);
  struct encoding *out = &linear->operand[role];
  if (role == DGRAD_W && strcmp(words, "same") == 0) {
    *out = linear->operand[FPROP_W];
    return true;
  }
  return encoding_parse(words, role, out, e) || error_context(e, "%s", operand_role_names[role]);
}

/* The transform of both wgrad operands, said in words of its own. */
static bool hadamard_take(const char *word, struct linear_route *linear, struct error *e) {
  char known[64];
  int value = word_value(hadamard_words, word);
  if (value < 0)
    return error_set(e, ERROR_CONFIG, "\"%s\" is no hadamard transform (%s)", word,
                     word_list(hadamard_words, known, sizeof known));
  for (int i = 0; i < 2 && value != HADAMARD_NONE; i++) {
    enum operand_role role = i == 0 ? WGRAD_DY : WGRAD_X;
    struct encoding *operand = &linear->operand[role];
    if (encoding_is_plain(operand))
      return error_set(e, ERROR_CONFIG, "hadamard %s needs a quantised %s, not %s", word, operand_role_names[role],
                       format_name(operand->format));
    if (operand->hadamard != HADAMARD_NONE && operand->hadamard != (enum hadamard)value)
      return error_set(e, ERROR_CONFIG, "hadamard %s, but %s says %s", word, operand_role_names[role],
                       hadamard_name(operand->hadamard));
    operand->hadamard = (enum hadamard)value;
  }
  return true;
}

bool linear_route_parse(const struct route_words *w, struct linear_route *out, struct error *e) {
  struct linear_route linear;
  memset(&linear, 0, sizeof linear);
  const char *words[OPERAND_ROLE_COUNT] = {
      [FPROP_X] = w->fprop_x, [FPROP_W] = w->fprop_w,   [DGRAD_DY] = w->dgrad_dy,
      [DGRAD_W] = w->dgrad_w, [WGRAD_DY] = w->wgrad_dy, [WGRAD_X] = w->wgrad_x};
  for (int role = 0; role < OPERAND_ROLE_COUNT; role++)
    if (!operand_parse(words[role], (enum operand_role)role, &linear, e)) return false;
  if (w->hadamard && !hadamard_take(w->hadamard, &linear, e)) return false;
  enum hadamard dy = linear.operand[WGRAD_DY].hadamard, x = linear.operand[WGRAD_X].hadamard;
  if (dy != x)
    return error_set(e, ERROR_CONFIG, "wgrad dy is transformed by %s and wgrad x by %s: both must be by the same",
                     hadamard_name(dy), hadamard_name(x));
  *out = linear;
  return true;
}

struct route_words route_words_of(const char *word) {
  return (struct route_words){NULL, word, word, word, "same", word, word, NULL, NULL};
}

struct linear_route linear_route_plain(enum format f) {
  struct linear_route linear;
  memset(&linear, 0, sizeof linear);
  for (int role = 0; role < OPERAND_ROLE_COUNT; role++) linear.operand[role].format = f;
  return linear;
}

bool route_add_span(struct route *r, const struct route_words *w, int n_layers, struct error *e) {
  if (!w->layers) return error_set(e, ERROR_CONFIG, "a span of a route says no layers");
  struct route_span span;
  memset(&span, 0, sizeof span);
  if (!layers_parse(w->layers, n_layers, &span.first, &span.last, e)) return false;
  if (!linear_route_parse(w, &span.linear, e)) return error_context(e, "layers \"%s\"", w->layers);
  int sites = word_value(site_words, w->sites ? w->sites : "all");
  if (sites < 0) {
    char known[96];
    return error_set(e, ERROR_CONFIG, "layers \"%s\": sites \"%s\": not of %s", w->layers, w->sites,
                     word_list(site_words, known, sizeof known));
  }
  span.sites = (unsigned)sites;

  for (int i = 0; i < r->n_spans; i++) {
    const struct route_span *other = &r->span[i];
    if (span.first > other->last || other->first > span.last || !(span.sites & other->sites)) continue;
    char twice[LINEAR_SITES_TEXT];
    return error_set(e, ERROR_CONFIG, "layers \"%s\" overlap the span of blocks %d-%d (%s linears)", w->layers,
                     other->first, other->last, linear_sites_text(span.sites & other->sites, twice));
  }
  if (r->n_spans == ROUTE_SPANS)
    return error_set(e, ERROR_CONFIG, "layers \"%s\": a route has at most %d spans", w->layers, ROUTE_SPANS);
  r->span[r->n_spans++] = span;
  return true;
}

const struct linear_route *route_linear(const struct route *r, int layer, enum linear_site site) {
  for (int i = 0; i < r->n_spans; i++) {
    const struct route_span *s = &r->span[i];
    if (layer + 1 >= s->first && layer + 1 <= s->last && (s->sites >> site & 1u)) return &s->linear;
  }
  return NULL;
}

unsigned route_sites_without(const struct route *r, int layer) {
  unsigned sites = 0;
  for (int site = 0; site < LINEAR_SITES; site++)
    if (!route_linear(r, layer, (enum linear_site)site)) sites |= 1u << site;
  return sites;
}

bool route_in_forward_tail(const struct route *r, int64_t update, int64_t updates) {
  int64_t tail = (int64_t)(r->forward_tail * (double)updates + 0.5);
  return tail > 0 && update > updates - tail; /* `update` may lie beyond: a longer run's checkpoint */
}
