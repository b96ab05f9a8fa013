/* tokenizer.json of Hugging Face tokenizers: byte-level BPE.
 *
 * Everything in it that decides ids is either followed or refused by name. */
#include <inttypes.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "data/utf8.h"
#include "data/vocabulary.h"

struct reader {
  struct vocabulary *v;
  const char *path;
  const json_t *vocab;  /* token text, in the byte-level alphabet: id */
  const json_t *added;  /* array */
  struct error *e;
};

static bool wrong(const struct reader *r, const char *format, ...) __attribute__((format(printf, 2, 3)));

static bool wrong(const struct reader *r, const char *format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return error_set(r->e, ERROR_DATA, "%s: %s", r->path, text);
}

/* Adds "PATH: WHERE: " to what vocabulary_add and its like said. */
static bool at(const struct reader *r, const char *format, int64_t index) {
  char where[64];
  snprintf(where, sizeof where, format, index);
  return error_context(r->e, "%s: %s", r->path, where);
}

static const char *text_of(const json_t *object, const char *key) {
  const char *text = json_string_value(json_object_get(object, key));
  return text ? text : "";
}

static bool is_true(const json_t *object, const char *key) { return json_is_true(json_object_get(object, key)); }

static bool is_nothing(const json_t *value) {
  return !value || json_is_null(value) || json_is_false(value) || (json_is_string(value) && json_string_length(value) == 0) ||
         (json_is_number(value) && json_number_value(value) == 0);
}

/* ---- the byte-level alphabet ------------------------------------------------------------ */

/* GPT-2's: a byte that Latin-1 prints is that character, the others are U+0100 on, in order. */
enum { ALPHABET = 256 + 68 };

static void make_alphabet(int16_t byte_of[ALPHABET]) {
  int next = 256;
  for (int i = 0; i < ALPHABET; i++) byte_of[i] = -1;
  for (int b = 0; b < 256; b++) {
    const bool printed = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
    byte_of[printed ? b : next++] = (int16_t)b;
  }
}

/* Bytes written to out[TOKEN_BYTES]; -1: a character is not of the alphabet, or there are too many. */
static int64_t decode(const int16_t byte_of[ALPHABET], const char *text, unsigned char *out) {
  int64_t n = 0;
  for (const unsigned char *s = (const unsigned char *)text; *s;) {
    int length;
    const uint32_t c = utf8_character(s, &length);
    if (c >= ALPHABET || byte_of[c] < 0 || n == TOKEN_BYTES) return -1;
    out[n++] = (unsigned char)byte_of[c];
    s += length;
  }
  return n;
}

/* ---- tokens -------------------------------------------------------------------------------- */

static bool read_added(struct reader *r) {
  static const char *const ways[] = {"single_word", "lstrip", "rstrip", NULL};
  size_t i;
  json_t *token;
  if (r->added && !json_is_array(r->added)) return wrong(r, "added_tokens is not a list");
  json_array_foreach(r->added, i, token) {
    const json_t *id = json_object_get(token, "id"), *content = json_object_get(token, "content");
    if (!json_is_integer(id) || !json_is_string(content)) return wrong(r, "added_tokens[%zu] has no id and content", i);
    for (int k = 0; ways[k]; k++)
      if (is_true(token, ways[k])) return wrong(r, "added_tokens[%zu], %s: %s is not supported", i, json_string_value(content), ways[k]);
    if (!vocabulary_add(r->v, json_integer_value(id), json_string_value(content), (int64_t)json_string_length(content),
                        is_true(token, "special") ? TOKEN_SPECIAL : TOKEN_ADDED, r->e))
      return at(r, "added_tokens[%" PRId64 "]", (int64_t)i);
  }
  return true;
}

static bool is_added(const struct reader *r, int64_t id, const char *text) {
  const struct vocabulary *v = r->v;
  return id >= 0 && id < v->n && v->token[id].kind >= TOKEN_ADDED && v->token[id].bytes == (int64_t)strlen(text) &&
         memcmp(v->text + v->token[id].at, text, strlen(text)) == 0;
}

static bool read_vocab(struct reader *r) {
  int16_t byte_of[ALPHABET];
  unsigned char bytes[TOKEN_BYTES];
  make_alphabet(byte_of);
  void *i = json_object_iter((json_t *)r->vocab);
  for (; i; i = json_object_iter_next((json_t *)r->vocab, i)) {
    const char *text = json_object_iter_key(i);
    const json_t *id = json_object_iter_value(i);
    if (!json_is_integer(id)) return wrong(r, "model.vocab, '%.100s': its id is not a whole number", text);
    if (is_added(r, json_integer_value(id), text)) continue;
    const int64_t n = decode(byte_of, text, bytes);
    if (n < 0) return wrong(r, "model.vocab, '%.100s': not 1 to %d characters of the byte-level alphabet", text, TOKEN_BYTES);
    if (!vocabulary_add(r->v, json_integer_value(id), bytes, n, TOKEN_TEXT, r->e)) {
      error_context(r->e, "%s: model.vocab, '%.100s'", r->path, text);
      return false;
    }
  }
  return true;
}

/* ---- merges --------------------------------------------------------------------------------- */

/* The id of left[0..n) followed by right; -1. */
static int32_t id_of(const struct reader *r, const char *left, size_t n, const char *right) {
  char text[8 * TOKEN_BYTES];
  if (n + strlen(right) >= sizeof text) return -1;
  memcpy(text, left, n);
  strcpy(text + n, right);
  const json_t *id = json_object_get(r->vocab, text);
  return id ? (int32_t)json_integer_value(id) : -1;
}

static bool read_merge(struct reader *r, size_t i, const json_t *merge) {
  const char *left = json_string_value(json_array_get(merge, 0)), *right = json_string_value(json_array_get(merge, 1));
  size_t n = left ? strlen(left) : 0;
  if (json_is_array(merge) && (json_array_size(merge) != 2 || !left || !right)) return wrong(r, "model.merges[%zu] is not two texts", i);
  if (json_is_string(merge)) {
    left = json_string_value(merge);
    n = strcspn(left, " ");
    right = left[n] ? left + n + 1 : NULL;
    if (!right || strchr(right, ' ')) return wrong(r, "model.merges[%zu], '%.100s', is not two texts with a space between", i, left);
  } else if (!json_is_array(merge)) {
    return wrong(r, "model.merges[%zu] is neither a text nor a list of two", i);
  }
  const int32_t a = id_of(r, left, n, ""), b = id_of(r, "", 0, right), both = id_of(r, left, n, right);
  if (a < 0 || b < 0 || both < 0) return wrong(r, "model.merges[%zu], '%.*s' and '%.100s': not in the vocabulary, or what they make is not", i, (int)(n < 100 ? n : 100), left, right);
  return vocabulary_merge(r->v, a, b, both, r->e);
}

static bool read_merges(struct reader *r, const json_t *merges) {
  size_t i;
  json_t *merge;
  if (!json_is_array(merges)) return wrong(r, "model.merges is not a list");
  json_array_foreach(merges, i, merge)
    if (!read_merge(r, i, merge)) return false;
  return true;
}

/* ---- model ------------------------------------------------------------------------------------ */

static bool read_model(struct reader *r, const json_t *model) {
  /* What changes ids where it is something. */
  static const char *const nothing[] = {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", NULL};
  if (!json_is_object(model)) return wrong(r, "model is missing: not a tokenizer.json");
  const json_t *type = json_object_get(model, "type");
  if (type ? strcmp(text_of(model, "type"), "BPE") != 0 : !json_object_get(model, "merges"))
    return wrong(r, "model.type is %.40s; only BPE is supported", type ? text_of(model, "type") : "not given");
  for (int i = 0; nothing[i]; i++)
    if (!is_nothing(json_object_get(model, nothing[i]))) return wrong(r, "model.%s is not supported: only byte-level BPE is", nothing[i]);
  r->vocab = json_object_get(model, "vocab");
  if (!json_is_object(r->vocab)) return wrong(r, "model.vocab is not a mapping");
  r->v->whole_first = is_true(model, "ignore_merges");
  return read_added(r) && read_vocab(r) && read_merges(r, json_object_get(model, "merges"));
}

/* ---- pre-tokenisation ---------------------------------------------------------------------------- */

static const char gpt2[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

static bool cut(struct reader *r, const char *regex, int64_t n, bool drop_gaps) {
  return vocabulary_cut(r->v, regex, n, drop_gaps, r->e) || at(r, "pre_tokenizer", 0);
}

static bool read_split(struct reader *r, const json_t *p) {
  const json_t *pattern = json_object_get(p, "pattern"), *regex = json_object_get(pattern, "Regex"), *literal = json_object_get(pattern, "String");
  const char *behavior = text_of(p, "behavior");
  const bool invert = is_true(p, "invert"), isolated = strcmp(behavior, "Isolated") == 0, removed = strcmp(behavior, "Removed") == 0;
  if (!isolated && !(removed && invert))
    return wrong(r, "pre_tokenizer Split with behavior %.40s%s is not supported", behavior, invert ? ", inverted," : "");
  if (json_is_string(regex)) return cut(r, json_string_value(regex), (int64_t)json_string_length(regex), removed);
  if (!json_is_string(literal) || json_string_length(literal) == 0) return wrong(r, "pre_tokenizer Split has neither a Regex nor a String");
  char *escaped = malloc(2 * json_string_length(literal) + 1);
  size_t n = 0;
  if (!escaped) return error_set(r->e, ERROR_SYSTEM, "out of memory reading %s", r->path);
  for (const char *s = json_string_value(literal); *s; s++) {
    if (strchr("\\^$.[]|()?*+{}", *s)) escaped[n++] = '\\';
    escaped[n++] = *s;
  }
  const bool good = cut(r, escaped, (int64_t)n, removed);
  free(escaped);
  return good;
}

static bool read_byte_level(struct reader *r, const json_t *p) {
  if (!json_is_false(json_object_get(p, "add_prefix_space"))) return wrong(r, "pre_tokenizer ByteLevel with add_prefix_space is not supported");
  const json_t *use_regex = json_object_get(p, "use_regex");
  return (use_regex && !json_is_true(use_regex)) || cut(r, gpt2, (int64_t)strlen(gpt2), false);
}

static bool read_pre_tokenizer(struct reader *r, const json_t *p, bool *byte_level) {
  const char *type = text_of(p, "type");
  if (*byte_level) return wrong(r, "pre_tokenizer %.40s after ByteLevel is not supported", type);
  if (strcmp(type, "Sequence") == 0) {
    size_t i;
    json_t *part;
    json_array_foreach(json_object_get(p, "pretokenizers"), i, part) {
      if (strcmp(text_of(part, "type"), "Sequence") == 0) return wrong(r, "pre_tokenizer: a Sequence in a Sequence is not supported");
      if (!read_pre_tokenizer(r, part, byte_level)) return false;
    }
    return true;
  }
  if (strcmp(type, "Split") == 0) return read_split(r, p);
  if (strcmp(type, "Digits") == 0) {
    const char *digits = is_true(p, "individual_digits") ? "\\p{N}" : "\\p{N}+";
    return cut(r, digits, (int64_t)strlen(digits), false);
  }
  if (strcmp(type, "ByteLevel") == 0) {
    *byte_level = true;
    return read_byte_level(r, p);
  }
  return wrong(r, "pre_tokenizer %.40s is not supported: there are Split, Digits and ByteLevel", type[0] ? type : "without a type");
}

static bool read_cutting(struct reader *r, const json_t *root) {
  const json_t *normalizer = json_object_get(root, "normalizer"), *p = json_object_get(root, "pre_tokenizer");
  const json_t *list = json_object_get(normalizer, "normalizers");
  if (!is_nothing(normalizer) && !(json_is_array(list) && json_array_size(list) == 0))
    return wrong(r, "normalizer %.40s is not supported: text is encoded as it stands", text_of(json_is_array(list) ? json_array_get(list, 0) : normalizer, "type"));
  bool byte_level = false;
  if (!json_is_object(p)) return wrong(r, "pre_tokenizer is missing: only byte-level BPE is supported");
  if (!read_pre_tokenizer(r, p, &byte_level)) return false;
  return byte_level || wrong(r, "pre_tokenizer has no ByteLevel: only byte-level BPE is supported");
}

/* ---- begin and end of text ------------------------------------------------------------------------- */

static int32_t id_named(const struct reader *r, const char *name) {
  size_t i;
  json_t *token;
  json_array_foreach(r->added, i, token)
    if (strcmp(text_of(token, "content"), name) == 0) return (int32_t)json_integer_value(json_object_get(token, "id"));
  return id_of(r, name, strlen(name), "");
}

/* Of tokenizer_config.json: a text, or a mapping with `content`, or null. */
static bool take_named(const struct reader *r, const json_t *config, const char *path, const char *key, int32_t *id) {
  const json_t *value = json_object_get(config, key), *text = json_is_object(value) ? json_object_get(value, "content") : value;
  *id = -1;
  if (!value || json_is_null(value)) return true;
  if (!json_is_string(text)) return error_set(r->e, ERROR_DATA, "%s: %s is not a text", path, key);
  *id = id_named(r, json_string_value(text));
  return *id >= 0 || error_set(r->e, ERROR_DATA, "%s: %s '%.100s' is no token of %s", path, key, json_string_value(text), r->path);
}

/* tokenizer_config.json beside the file says; without it the first pair of these that are both tokens. */
static bool find_ends(struct reader *r) {
  static const char *const usual[][2] = {{"<|begin_of_text|>", "<|end_of_text|>"}, {"<s>", "</s>"}, {"<bos>", "<eos>"}, {"<|endoftext|>", "<|endoftext|>"}};
  char *path = file_beside(r->path, "tokenizer_config.json");
  if (!path) return error_set(r->e, ERROR_SYSTEM, "out of memory reading %s", r->path);
  bool good = true;
  if (file_exists(path)) {
    json_error_t why;
    /* transformers writes model_max_length 10^30 for "unknown"; numbers are not looked at */
    json_t *config = json_load_file(path, JSON_REJECT_DUPLICATES | JSON_DECODE_INT_AS_REAL, &why);
    good = config ? take_named(r, config, path, "bos_token", &r->v->bos) && take_named(r, config, path, "eos_token", &r->v->eos)
                  : error_set(r->e, ERROR_DATA, "%s:%d:%d: %s", path, why.line, why.column, why.text);
    json_decref(config);
  } else {
    for (size_t i = 0; i < sizeof usual / sizeof *usual && r->v->eos < 0; i++) {
      const int32_t bos = id_named(r, usual[i][0]), eos = id_named(r, usual[i][1]);
      if (bos < 0 || eos < 0) continue;
      r->v->bos = bos;
      r->v->eos = eos;
    }
  }
  free(path);
  return good;
}

bool vocabulary_read_json(struct vocabulary *v, const char *path, const char *text, int64_t bytes, struct error *e) {
  json_error_t why;
  json_t *root = json_loadb(text, (size_t)bytes, JSON_REJECT_DUPLICATES, &why);
  if (!root) return error_set(e, ERROR_DATA, "%s:%d:%d: %s", path, why.line, why.column, why.text);
  struct reader r = {.v = v, .path = path, .added = json_object_get(root, "added_tokens"), .e = e};
  const bool good = read_model(&r, json_object_get(root, "model")) && read_cutting(&r, root) && find_ends(&r);
  json_decref(root);
  return good;
}
