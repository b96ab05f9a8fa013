/* `fp4d prepare`: token streams from text, once. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "data/data.h"
#include "trainer/command.h"
#include "trainer/config.h"

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

/* Is a usable stream there?  False with e->code ERROR_NONE: no file. */
static bool existing(const struct config *c, const char *path, struct error *e) {
  e->code = ERROR_NONE;
  if (!file_exists(path)) return false;
  struct stream *s = stream_open(path, (int32_t)c->model.shape.vocab_size, e);
  if (!s) return error_hint(e, "--force makes it anew");
  const struct stream_info *info = stream_info(s);
  printf("%s exists: %" PRId64 " tokens in %" PRId64 " documents\n", path, info->tokens, info->documents);
  stream_close(s);
  return true;
}

static bool prepare(const struct config *c, struct error *e) {
  if (c->data.n_sources == 0) return error_set(e, ERROR_CONFIG, "data.sources is empty: nothing to prepare from");
  bool validate = c->data.validation[0] != 0;
  struct data_prepare p = {.sources = c->data.source,
                           .n_sources = (int)c->data.n_sources,
                           .train_path = c->data.train,
                           .validation_path = validate ? c->data.validation : NULL,
                           .validation_fraction = validate ? c->data.validation_fraction : 0,
                           .seed = (uint64_t)c->data.seed};
  struct data_prepared done;
  /* Before all of the text is read. */
  if (!file_make_parent(c->data.train, ERROR_DATA, e) || (validate && !file_make_parent(c->data.validation, ERROR_DATA, e)))
    return false;
  if (!data_prepare(&p, &done, e)) return false;
  printf("%s: %" PRId64 " tokens in %" PRId64 " documents\n", c->data.train, done.tokens[0], done.documents[0]);
  if (validate)
    printf("%s: %" PRId64 " tokens in %" PRId64 " documents\n", c->data.validation, done.tokens[1], done.documents[1]);
  return true;
}

int command_prepare(int argc, char **argv) {
  struct prepare_arguments a = {0};
  struct error e = {0};
  static struct config c;
  if (!arguments_parse(command_prepare_arguments, argc, argv, &a, &e)) return command_fail(&e);
  if (!config_load(&c, a.config, a.sets.item, a.sets.n, &e)) return command_fail(&e);
  if (!a.force) {
    bool validate = c.data.validation[0] != 0, train = existing(&c, c.data.train, &e);
    if (!train && e.code != ERROR_NONE) return command_fail(&e);
    bool validation = validate && existing(&c, c.data.validation, &e);
    if (validate && !validation && e.code != ERROR_NONE) return command_fail(&e);
    if (train && (validation || !validate)) {
      printf("nothing to do; --force makes them anew\n");
      return ERROR_NONE;
    }
    if (train || validation) { /* making both would change a stream that a run may have read */
      error_set(&e, ERROR_DATA, "%s exists and %s does not", train ? c.data.train : c.data.validation,
                train ? c.data.validation : c.data.train);
      error_hint(&e, "--force makes both anew");
      return command_fail(&e);
    }
  }
  return prepare(&c, &e) ? ERROR_NONE : command_fail(&e);
}
