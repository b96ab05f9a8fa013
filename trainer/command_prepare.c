/* `fp4d prepare`: token streams from text, once. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/file.h"
#include "data/data.h"
#include "data/prepare.h"
#include "data/tokenizer.h"
#include "trainer/command.h"
#include "trainer/config.h"
#include "trainer/indexing.h"
#include "trainer/table.h"

struct prepare_arguments {
  const char *config;
  struct argument_list sets;
  bool force;
};

const struct argument command_prepare_arguments[] = {
    ARGUMENT_CONFIG(struct prepare_arguments, config),
    ARGUMENT_SETS(struct prepare_arguments, sets),
    {.name = "--force", .type = ARGUMENT_FLAG, .offset = offsetof(struct prepare_arguments, force),
     .help = "make the streams anew although they exist"},
    {0},
};

/* By name, for their files may have moved; a configuration without sources asks for nothing. */
static bool same_sources(const struct config *c, const char *path, const struct stream_info *info, struct error *e) {
  int i = 0;
  while (i < info->n_sources && i < c->data.n_sources && strcmp(info->source[i].name, c->data.source[i].name) == 0) i++;
  if (c->data.n_sources == 0 || (i == info->n_sources && i == c->data.n_sources)) return true;
  error_set(e, ERROR_DATA, "%s was made of other sources: number %d of its %d is %s, of the %" PRId64 " in data.sources %s", path, i + 1,
            info->n_sources, i < info->n_sources ? info->source[i].name : "absent", c->data.n_sources,
            i < c->data.n_sources ? c->data.source[i].name : "absent");
  return error_hint(e, "--force makes it anew; or name other files in data.train and data.validation");
}

/* The request that a configuration makes. */
static struct data_prepare request_of(const struct config *c, bool go_on) {
  const bool validate = c->data.validation[0] != 0;
  return (struct data_prepare){.sources = c->data.source,
                               .n_sources = (int)c->data.n_sources,
                               .train_path = c->data.train,
                               .validation_path = validate ? c->data.validation : NULL,
                               .validation_fraction = validate ? c->data.validation_fraction : 0,
                               .seed = (uint64_t)c->data.seed,
                               .stages = c->data.stage,
                               .n_stages = (int)c->data.n_stages,
                               .tokens = c->data.tokens,
                               .tokenizer = c->data.tokenizer,
                               .bos = c->data.bos,
                               .eos = c->data.eos,
                               .in_file_order = !c->data.shuffle_documents,
                               .invalid_utf8 = c->data.invalid_utf8,
                               .dedup = c->data.dedup,
                               .minhash_threshold = c->data.minhash_threshold,
                               .overlap_report = c->data.overlap_report,
                               .memory = c->data.prepare_memory,
                               .threads = (int)c->run.threads,
                               .go_on = go_on};
}

/* Both streams carry the settings that made them; the training stream's are compared. */
static bool same_settings(const struct config *c, const char *path, const struct stream_info *info, struct error *e) {
  const struct data_prepare p = request_of(c, false);
  if (c->data.n_sources == 0 || !info->settings[0]) return true;
  char *wanted = data_prepare_settings(&p);
  if (!wanted) return error_set(e, ERROR_SYSTEM, "out of memory");
  const char *was = info->settings, *is = wanted;
  for (;;) {
    const size_t n = strcspn(was, " \n"), m = strcspn(is, " \n");
    if (n != m || memcmp(was, is, n) != 0) {
      error_set(e, ERROR_DATA, "%s was made with other settings: %.*s, now %.*s", path, (int)n, n ? was : "nothing more", (int)m,
                m ? is : "nothing more");
      error_hint(e, "--force makes it anew; or name other files in data.train and data.validation");
      break;
    }
    was += n + (was[n] == ' ');
    is += m + (is[m] == ' ');
    if (*is == 0 && (*was == 0 || *was == '\n')) break;
  }
  free(wanted);
  return e->code == ERROR_NONE;
}

static bool same_tokenizer(const struct config *c, const char *path, const struct stream_info *info, struct error *e) {
  struct tokenizer *t = tokenizer_open(c->data.tokenizer, e);
  if (!t) return false;
  if (strcmp(tokenizer_info(t)->name, info->tokenizer) != 0) {
    error_set(e, ERROR_DATA, "%s was made with tokenizer %s, data.tokenizer is %s", path, info->tokenizer, tokenizer_info(t)->name);
    error_hint(e, "--force makes it anew; or name other files in data.train and data.validation");
  }
  tokenizer_close(t);
  return e->code == ERROR_NONE;
}

/* Is a usable stream there?  False with e->code ERROR_NONE: no file. */
static bool existing(const struct config *c, const char *path, struct error *e) {
  e->code = ERROR_NONE;
  if (!file_exists(path)) return false;
  struct stream *s = stream_open(path, (int32_t)c->model.shape.vocab_size, e);
  if (!s) return error_hint(e, "--force makes it anew");
  const struct stream_info *info = stream_info(s);
  const bool same = same_sources(c, path, info, e) && same_tokenizer(c, path, info, e) &&
                    (strcmp(path, c->data.train) != 0 || same_settings(c, path, info, e));
  if (same) printf("%s exists: %" PRId64 " tokens in %" PRId64 " documents\n", path, info->tokens, info->documents);
  stream_close(s);
  return same;
}

/* ---- what became of the sources -------------------------------------------- */

/* Sources one a row, from numbers that `fill` adds; with several, their sums below. */
static void print_table(const struct config *c, const struct data_prepared *done, const char *const *head, int cols,
                        void (*fill)(struct table *t, const struct data_prepared_source *s, double whole, int side), int side,
                        double whole) {
  struct table t = table_new(cols);
  struct data_prepared_source all = {0};
  for (int i = 0; i < cols; i++) table_add(&t, "%s", head[i]);
  for (int64_t i = 0; i < c->data.n_sources; i++) {
    const struct data_prepared_source *s = &done->source[i];
    table_add(&t, "%.40s", c->data.source[i].name);
    fill(&t, s, whole, side);
    all.files += s->files, all.bytes += s->bytes, all.documents += s->documents, all.empty += s->empty;
    all.invalid += s->invalid, all.replacements += s->replacements, all.invalid_dropped += s->invalid_dropped;
    all.duplicates += s->duplicates, all.near += s->near;
    overlap_total_add(&all.overlap, &s->overlap);
    for (int k = 0; k < 2; k++) {
      all.side[k].documents += s->side[k].documents, all.side[k].tokens += s->side[k].tokens;
      all.side[k].written_documents += s->side[k].written_documents;
      all.side[k].written_tokens += s->side[k].written_tokens, all.side[k].unused_tokens += s->side[k].unused_tokens;
    }
  }
  if (c->data.n_sources > 1) {
    table_add(&t, "together");
    fill(&t, &all, whole, side);
  }
  table_print(&t, stdout, false);
  table_free(&t);
}

static void fill_read(struct table *t, const struct data_prepared_source *s, double whole, int side) {
  (void)whole, (void)side;
  const int64_t numbers[] = {s->files, s->documents, s->empty, s->invalid, s->replacements, s->invalid_dropped,
                             s->duplicates, s->near, s->side[PREPARE_VALIDATION].documents};
  table_add(t, "%.2f", (double)s->bytes / 1e6);
  for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) table_add(t, "%" PRId64, numbers[i]);
}

static void fill_written(struct table *t, const struct data_prepared_source *s, double whole, int side) {
  const int64_t tokens = s->side[side].tokens, written = s->side[side].written_tokens;
  table_add(t, "%" PRId64, s->side[side].written_documents);
  table_add(t, "%" PRId64, written);
  table_add(t, "%.2f %%", whole > 0 ? 100 * (double)written / whole : 0);
  table_add(t, "%.3f", tokens > 0 ? (double)written / (double)tokens : 0);
  table_add(t, "%" PRId64, s->side[side].unused_tokens);
}

static void fill_overlap(struct table *t, const struct data_prepared_source *s, double whole, int side) {
  (void)whole, (void)side;
  const struct overlap_total *o = &s->overlap;
  table_add(t, "%" PRId64, o->documents);
  table_add(t, "%" PRId64, o->touched);
  table_add(t, "%.3f %%", o->documents > 0 ? 100 * (double)o->touched / (double)o->documents : 0);
  table_add(t, "%" PRId64, o->grams);
  table_add(t, "%" PRId64, o->shared);
  table_add(t, "%.4f %%", o->grams > 0 ? 100 * (double)o->shared / (double)o->grams : 0);
}

static void print_stream(const struct config *c, const struct data_prepared *done, const char *path, int side) {
  static const char *const head[] = {"source", "documents", "tokens", "share", "passes", "unused tokens"};
  printf("\n%s: %" PRId64 " tokens in %" PRId64 " documents\n", path, done->tokens[side], done->documents[side]);
  print_table(c, done, head, 6, fill_written, side, (double)done->tokens[side]);
  if (done->exhausted[side] >= 0) {
    const struct data_source *s = &c->data.source[done->exhausted[side]];
    if (side == PREPARE_VALIDATION)
      printf("%s had no more, and so ended it\n", s->name);
    else
      printf("%s had no more within max_repetition %g, and so ended it\n", s->name, s->max_repetition);
  }
}

static void print_result(const struct config *c, const struct data_prepared *done, double seconds) {
  static const char *const read[] = {"source", "MB of text", "files", "documents", "empty", "invalid UTF-8", "U+FFFD put",
                                     "dropped for it", "duplicates", "near", "held out"};
  static const char *const overlap[] = {"source", "documents", "share a 13-gram", "", "13-grams", "shared", ""};
  int64_t bytes = 0;
  for (int64_t i = 0; i < c->data.n_sources; i++) bytes += done->source[i].bytes;
  print_table(c, done, read, 11, fill_read, 0, 0);
  print_stream(c, done, c->data.train, PREPARE_TRAIN);
  if (c->data.validation[0]) print_stream(c, done, c->data.validation, PREPARE_VALIDATION);
  if (done->overlap_path[0]) {
    const struct overlap_side *v = &done->overlap;
    printf("\n%s: of %" PRId64 " distinct 13-grams in %" PRId64 " validation documents, training has %" PRId64 "\n",
           done->overlap_path, v->distinct, v->documents, v->met);
    print_table(c, done, overlap, 7, fill_overlap, 0, 0);
  }
  printf("\n%.1f s%s, %.2f MB/s of text\n", seconds, done->resumed ? " since it was started again" : "", (double)bytes / 1e6 / seconds);
}

/* ---- the command ----------------------------------------------------------- */

/* What the model could not take is said before hours of work. */
static bool fits_the_model(const struct config *c, struct error *e) {
  struct tokenizer *t = tokenizer_open(c->data.tokenizer, e);
  if (!t) return false;
  const int32_t ids = tokenizer_info(t)->vocab_size;
  tokenizer_close(t);
  if (ids <= c->model.shape.vocab_size) return true;
  error_set(e, ERROR_CONFIG, "model.vocab_size: %" PRId64 " is less than the %d ids of data.tokenizer %s", c->model.shape.vocab_size, ids,
            c->data.tokenizer);
  return error_hint(e, "set model.vocab_size to %d or more", ids);
}

static bool prepare(const struct config *c, bool go_on, struct error *e) {
  if (c->data.n_sources == 0) return error_set(e, ERROR_CONFIG, "data.sources is empty: nothing to prepare from");
  if (!fits_the_model(c, e)) return false;
  if (indexing_is_wanted(c)) {
    error_set(e, ERROR_CONFIG, "data.train is %s, which is the name of an index: of token files, by `fp4d index`", c->data.train);
    return error_hint(e, "give a stream of text another ending, as train.tokens");
  }
  const struct data_prepare p = request_of(c, go_on);
  static struct data_prepared done;
  const double began = clock_seconds();
  if (!data_prepare(&p, &done, e)) return false;
  print_result(c, &done, clock_seconds() - began);
  return true;
}

/* True: there is something to make; *go_on: what was being published when it was ended. */
static bool wanted(const struct config *c, bool *go_on, struct error *e) {
  const bool validate = c->data.validation[0] != 0;
  const enum data_prepare_left left = data_prepare_left(c->data.train);
  const bool train = existing(c, c->data.train, e);
  if (!train && e->code != ERROR_NONE) return false;
  const bool validation = validate && existing(c, c->data.validation, e);
  if (validate && !validation && e->code != ERROR_NONE) return false;
  *go_on = left == PREPARE_PUBLISHING_LEFT;
  if (*go_on) return true;
  if (train && (validation || !validate)) {
    printf("nothing to do; --force makes them anew\n");
    if (left != PREPARE_NOTHING_LEFT)
      printf("%s.work is left of a preparation that was ended: --force goes on from it\n", c->data.train);
    return false;
  }
  if (train || validation) { /* making both would change a stream that a run may have read */
    error_set(e, ERROR_DATA, "%s exists and %s does not", train ? c->data.train : c->data.validation,
              train ? c->data.validation : c->data.train);
    return error_hint(e, "--force makes both anew");
  }
  return true;
}

int command_prepare(int argc, char **argv) {
  struct prepare_arguments a = {0};
  struct error e = {0};
  static struct config c;
  if (!arguments_parse(command_prepare_arguments, argc, argv, &a, &e)) return command_fail(&e);
  if (!config_load(&c, a.config, a.sets.item, a.sets.n, &e)) return command_fail(&e);
  bool go_on = false;
  if (!a.force && !wanted(&c, &go_on, &e)) return e.code == ERROR_NONE ? ERROR_NONE : command_fail(&e);
  return prepare(&c, go_on, &e) ? ERROR_NONE : command_fail(&e);
}
