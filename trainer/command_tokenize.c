/* fp4d tokenize: text to token ids and back, and rank files from text. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "data/bpe_train.h"
#include "data/corpus.h"
#include "data/json_text.h"
#include "data/tokenizer.h"
#include "data/utf8.h"
#include "trainer/command.h"

struct tokenize_arguments {
  const char *tokenizer, *raw, *output;
  struct argument_list files;
  int64_t train;
  bool decode, count, special, replace;
};

const struct argument command_tokenize_arguments[] = {
    {.name = "FILE", .type = ARGUMENT_OPTIONAL_WORDS, .offset = offsetof(struct tokenize_arguments, files),
     .help = "each is one text; none, or -: standard input. With --train: text files, .jsonl, also compressed, and folders of them"},
    {.name = "--tokenizer", .value = "FILE", .type = ARGUMENT_TEXT, .offset = offsetof(struct tokenize_arguments, tokenizer),
     .help = "bytes (the default), a rank file or a tokenizer.json"},
    {.name = "--decode", .type = ARGUMENT_FLAG, .offset = offsetof(struct tokenize_arguments, decode),
     .help = "ids to text; a special is written as its name"},
    {.name = "--raw", .value = "TYPE", .type = ARGUMENT_TEXT, .offset = offsetof(struct tokenize_arguments, raw),
     .help = "ids are u16 or u32, little-endian, instead of decimal numbers with a line a text"},
    {.name = "--count", .type = ARGUMENT_FLAG, .offset = offsetof(struct tokenize_arguments, count),
     .help = "say how many ids there are instead of writing them"},
    {.name = "--special", .type = ARGUMENT_FLAG, .offset = offsetof(struct tokenize_arguments, special),
     .help = "a special's name in the text is that token; without this it is text like any other"},
    {.name = "--replace", .type = ARGUMENT_FLAG, .offset = offsetof(struct tokenize_arguments, replace),
     .help = "bytes that are not UTF-8 become U+FFFD; without this they are an error"},
    {.name = "--train", .value = "N", .type = ARGUMENT_INTEGER, .offset = offsetof(struct tokenize_arguments, train), .low = 258, .high = 1 << 20,
     .help = "learn a vocabulary of N ids (two of them specials) from the files and write it to --output"},
    {.name = "--output", .value = "FILE.tiktoken", .type = ARGUMENT_TEXT, .offset = offsetof(struct tokenize_arguments, output),
     .help = "of --train"},
    {0}};

enum { READ_STEP = 1 << 20 };

/* ---- reading and writing ------------------------------------------------------------- */

static const char *name_of(const char *path) { return strcmp(path, "-") == 0 ? "standard input" : path; }

/* All of a file, a pipe or standard input. */
static bool read_all(const char *path, char **text, int64_t *bytes, struct error *e) {
  const bool standard = strcmp(path, "-") == 0;
  FILE *in = standard ? stdin : fopen(path, "rb");
  int64_t room = 0;
  *text = NULL;
  *bytes = 0;
  if (!in) return error_errno(e, ERROR_DATA, "cannot open %s", path);
  bool good = true;
  while (good) {
    if (room - *bytes < READ_STEP) {
      room = 2 * room + READ_STEP;
      char *grown = realloc(*text, (size_t)room);
      good = grown || error_set(e, ERROR_SYSTEM, "out of memory reading %s", name_of(path));
      if (!good) break;
      *text = grown;
    }
    const size_t got = fread(*text + *bytes, 1, (size_t)(room - *bytes), in);
    *bytes += (int64_t)got;
    if (ferror(in)) good = error_errno(e, ERROR_DATA, "cannot read %s", name_of(path));
    if (got == 0) break;
  }
  if (!standard) fclose(in);
  if (good) return true;
  free(*text);
  *text = NULL;
  return false;
}

static bool written(struct error *e) {
  return (fflush(stdout) == 0 && !ferror(stdout)) || error_errno(e, ERROR_SYSTEM, "cannot write to standard output");
}

/* Puts U+FFFD where *text is not UTF-8. */
static bool repair(char **text, int64_t *bytes, const char *name, struct error *e) {
  int64_t replacements;
  const int64_t size = utf8_repaired_size(*text, *bytes, &replacements);
  if (replacements == 0) return true;
  char *whole = malloc((size_t)size);
  if (!whole) return error_set(e, ERROR_SYSTEM, "out of memory repairing %s", name);
  *bytes = utf8_repair(*text, *bytes, whole);
  free(*text);
  *text = whole;
  fprintf(stderr, "%s: %" PRId64 " times U+FFFD for bytes that are not UTF-8\n", name, replacements);
  return true;
}

/* ---- encoding --------------------------------------------------------------------------- */

struct job {
  const struct tokenize_arguments *a;
  int width; /* bytes of a raw id; 0: text */
  struct tokenizer *t;
  struct tokenizer_scratch *scratch;
  struct tokenizer_ids ids;
  int64_t texts, all_bytes, all_ids;
};

static void write_ids(const struct tokenizer_ids *ids, int width) {
  for (int64_t i = 0; i < ids->n; i++) {
    const uint32_t id = (uint32_t)ids->id[i];
    const unsigned char raw[4] = {(unsigned char)id, (unsigned char)(id >> 8), (unsigned char)(id >> 16), (unsigned char)(id >> 24)};
    if (width)
      fwrite(raw, 1, (size_t)width, stdout);
    else
      printf(i ? " %u" : "%u", id);
  }
  if (!width) putchar('\n');
}

static void say_count(const char *name, int64_t ids, int64_t bytes) {
  printf("%12" PRId64 " ids %14" PRId64 " bytes %6.3f bytes an id  %s\n", ids, bytes, ids ? (double)bytes / (double)ids : 0, name);
}

static bool encode(struct job *j, const char *path, struct error *e) {
  char *text;
  int64_t bytes;
  if (!read_all(path, &text, &bytes, e)) return false;
  const int64_t read = bytes;
  bool good = !j->a->replace || tokenizer_info(j->t)->any_bytes || repair(&text, &bytes, name_of(path), e);
  j->ids.n = 0;
  if (good && !tokenizer_encode(j->t, j->scratch, text, bytes, j->a->special ? TOKENIZER_SPECIALS : TOKENIZER_PLAIN, &j->ids, e)) {
    good = error_context(e, "%s", name_of(path));
    if (e->code == ERROR_DATA && utf8_valid(text, bytes) < bytes) error_hint(e, "--replace puts U+FFFD in the place of such bytes");
  }
  free(text);
  if (!good) return false;
  j->texts++;
  j->all_bytes += read;
  j->all_ids += j->ids.n;
  if (j->a->count)
    say_count(name_of(path), j->ids.n, read);
  else
    write_ids(&j->ids, j->width);
  return written(e);
}

/* ---- decoding ----------------------------------------------------------------------------- */

static bool write_token(const struct job *j, int64_t id, const char *path, struct error *e) {
  const int32_t vocab_size = tokenizer_info(j->t)->vocab_size;
  int64_t bytes;
  const char *token = id < vocab_size ? tokenizer_token(j->t, (int32_t)id, &bytes) : NULL;
  if (!token) return error_set(e, ERROR_DATA, "%s: id %" PRId64 " is no token; the vocabulary has %d ids", name_of(path), id, vocab_size);
  fwrite(token, 1, (size_t)bytes, stdout);
  return true;
}

static bool decode_raw(struct job *j, const char *path, const unsigned char *s, int64_t bytes, struct error *e) {
  if (bytes % j->width)
    return error_set(e, ERROR_DATA, "%s has %" PRId64 " bytes, which are no whole number of ids of %d", name_of(path), bytes, j->width);
  for (int64_t i = 0; i < bytes; i += j->width) {
    uint32_t id = 0;
    for (int k = 0; k < j->width; k++) id |= (uint32_t)s[i + k] << 8 * k;
    if (!write_token(j, id, path, e)) return false;
  }
  return true;
}

static bool decode_text(struct job *j, const char *path, const char *s, int64_t bytes, struct error *e) {
  int64_t line = 1;
  for (int64_t i = 0; i < bytes;) {
    int64_t id = 0, n = 0;
    for (; i + n < bytes && s[i + n] >= '0' && s[i + n] <= '9' && n < 10; n++) id = 10 * id + (s[i + n] - '0');
    const bool ends = i + n == bytes || (s[i + n] && strchr(" \t\r\n", s[i + n]));
    if (n > 0 && ends) {
      if (!write_token(j, id, path, e)) return false;
      i += n;
    } else if (n == 0 && ends) {
      line += s[i++] == '\n';
    } else {
      return error_set(e, ERROR_DATA, "%s:%" PRId64 ": not a list of ids", name_of(path), line);
    }
  }
  return true;
}

static bool decode(struct job *j, const char *path, struct error *e) {
  char *text;
  int64_t bytes;
  if (!read_all(path, &text, &bytes, e)) return false;
  const bool good = j->width ? decode_raw(j, path, (const unsigned char *)text, bytes, e) : decode_text(j, path, text, bytes, e);
  free(text);
  return good && written(e);
}

static bool work(struct job *j, struct error *e) {
  static const struct argument_list standard = {.item = {"-"}, .n = 1};
  const struct argument_list *files = j->a->files.n ? &j->a->files : &standard;
  if (!(j->t = tokenizer_open(j->a->tokenizer ? j->a->tokenizer : "bytes", e)) || !(j->scratch = tokenizer_scratch_open(j->t, e))) return false;
  if (j->width == 2 && tokenizer_info(j->t)->vocab_size > 65536) {
    error_set(e, ERROR_USAGE, "--raw u16: tokenizer %s has %d ids", tokenizer_info(j->t)->name, tokenizer_info(j->t)->vocab_size);
    return error_hint(e, "--raw u32");
  }
  for (int i = 0; i < files->n; i++)
    if (!(j->a->decode ? decode(j, files->item[i], e) : encode(j, files->item[i], e))) return false;
  if (j->a->count && j->texts > 1) say_count("in all", j->all_ids, j->all_bytes);
  return written(e);
}

/* ---- learning -------------------------------------------------------------------------------- */

struct lesson {
  struct bpe_trainer *t;
  char *text; /* of a JSON line, then of what is repaired */
  int64_t room;
  int64_t texts, bytes, replacements;
};

static bool has_room(struct lesson *l, int64_t bytes, struct error *e) {
  if (bytes <= l->room) return true;
  free(l->text);
  l->room = 0;
  l->text = malloc((size_t)bytes);
  if (!l->text) return error_set(e, ERROR_SYSTEM, "out of memory for a text of %" PRId64 " bytes", bytes);
  l->room = bytes;
  return true;
}

static bool learn_text(struct lesson *l, const char *text, int64_t bytes, struct error *e) {
  int64_t replacements;
  const int64_t size = utf8_repaired_size(text, bytes, &replacements);
  l->texts++;
  l->bytes += bytes;
  l->replacements += replacements;
  if (replacements == 0) return bpe_trainer_feed(l->t, text, bytes, e);
  char *whole = malloc((size_t)size);
  if (!whole) return error_set(e, ERROR_SYSTEM, "out of memory for a text of %" PRId64 " bytes", size);
  const bool good = bpe_trainer_feed(l->t, whole, utf8_repair(text, bytes, whole), e);
  free(whole);
  return good;
}

static bool learn_record(struct lesson *l, const struct corpus_file *f, const struct corpus_record *r, struct error *e) {
  if (f->kind == CORPUS_DOCUMENT) return learn_text(l, r->bytes, r->length, e);
  if (!has_room(l, r->length + 1, e)) return false;
  struct json_text found = {.text = l->text};
  if (!json_text_find(r->bytes, r->length, "text", &found))
    return error_set(e, ERROR_DATA, "%s:%" PRId64 ":%" PRId64 ": %s", f->path, r->line, found.at + 1, found.problem);
  return learn_text(l, found.text, found.length, e);
}

static bool learn_file(struct lesson *l, const struct corpus_file *f, struct error *e) {
  struct corpus_reader *reader = corpus_reader_open(f, INT64_C(1) << 32, e);
  if (!reader) return false;
  struct corpus_record record;
  int more;
  while ((more = corpus_reader_next(reader, &record, e)) == 1)
    if (!learn_record(l, f, &record, e)) break;
  corpus_reader_close(reader);
  return more == 0;
}

static bool learn(const struct tokenize_arguments *a, struct error *e) {
  struct corpus_files files = {0};
  struct lesson l = {.t = bpe_trainer_open(e)};
  char *ranks = NULL;
  int64_t bytes = 0, distinct, pieces;
  bool good = l.t != NULL;
  for (int i = 0; good && i < a->files.n; i++) good = corpus_find(&files, a->files.item[i], DATA_AUTO, i, e);
  for (int64_t i = 0; good && i < files.count; i++) good = learn_file(&l, files.file + i, e);
  good = good && bpe_trainer_ranks(l.t, (int32_t)a->train, &ranks, &bytes, e) &&
         file_make_parent(a->output, ERROR_DATA, e) && file_publish(a->output, ranks, (size_t)bytes, ERROR_DATA, e);
  if (good) {
    bpe_trainer_counts(l.t, &distinct, &pieces);
    printf("%s: %" PRId64 " ids learnt from %" PRId64 " texts of %" PRId64 " bytes, %" PRId64 " pieces, %" PRId64 " of them distinct\n", a->output,
           a->train, l.texts, l.bytes, pieces, distinct);
    if (l.replacements) printf("%" PRId64 " times U+FFFD for bytes that are not UTF-8\n", l.replacements);
  }
  free(ranks);
  free(l.text);
  bpe_trainer_close(l.t);
  corpus_files_free(&files);
  return good;
}

/* ---- the command -------------------------------------------------------------------------------- */

/* An argument that would be passed over is refused. */
static bool check_arguments(const struct tokenize_arguments *a, struct job *j, struct error *e) {
  const bool train = a->train > 0;
  const struct {
    bool wrong;
    const char *words;
  } rule[] = {
      {train && !a->output, "--train needs --output"},
      {!train && a->output, "--output goes with --train; redirect standard output"},
      {train && a->files.n == 0, "--train needs text: files or folders"},
      {train && (a->tokenizer || a->decode || a->raw || a->count || a->special || a->replace), "--train goes with --output and files alone"},
      {a->decode && (a->count || a->special || a->replace), "--decode goes with --tokenizer and --raw alone"},
      {a->count && a->raw, "--count writes no ids: --raw does not go with it"},
  };
  for (size_t i = 0; i < sizeof rule / sizeof *rule; i++)
    if (rule[i].wrong) return error_set(e, ERROR_USAGE, "tokenize: %s", rule[i].words);
  j->width = !a->raw ? 0 : strcmp(a->raw, "u16") == 0 ? 2 : strcmp(a->raw, "u32") == 0 ? 4 : -1;
  return j->width >= 0 || error_set(e, ERROR_USAGE, "tokenize: --raw '%.40s': u16 or u32 is wanted", a->raw);
}

int command_tokenize(int argc, char **argv) {
  struct tokenize_arguments a = {0};
  struct job j = {.a = &a};
  struct error e = {0};
  bool good = arguments_parse(command_tokenize_arguments, argc, argv, &a, &e);
  if (good && !check_arguments(&a, &j, &e)) good = error_hint(&e, "`fp4d help tokenize` shows what it takes");
  good = good && (a.train > 0 ? learn(&a, &e) : work(&j, &e));
  tokenizer_ids_free(&j.ids);
  tokenizer_scratch_close(j.scratch);
  tokenizer_close(j.t);
  return good ? ERROR_NONE : command_fail(&e);
}
