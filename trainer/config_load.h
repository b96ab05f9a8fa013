/* What the files that make a configuration share (config*.c only). */
#ifndef FP4D_TRAINER_CONFIG_LOAD_H
#define FP4D_TRAINER_CONFIG_LOAD_H

#include "trainer/document.h"
#include "trainer/options.h"

enum option_state {
  OPTION_DEFAULT,
  OPTION_GIVEN,
  OPTION_BROKEN /* a problem is on record: say nothing more about this key */
};

struct option_record {
  enum option_state state;
  struct origin at;
};

enum { CONFIG_FILES = 16, CONFIG_INCLUDE_DEPTH = 8 };

struct config_file {
  char *path;
  char *text; /* NULL where the caller owns it */
  int parent; /* index of the file that includes this one; -1 for the outermost */
  struct document document;
};

struct config_loader {
  struct config *config;
  struct route_draft route;
  struct findings problems;
  const char *name; /* of the outermost file, for problems of no place */
  struct option_record record[OPTION_SECTIONS][OPTION_ROWS]; /* by section and row */
  struct config_file file[CONFIG_FILES]; /* the outermost first */
  int n_files;
  bool whole; /* every file was read to its end */
};

/* By "section.key". The key must exist. */
struct option_record *config_record(struct config_loader *l, const char *key);

/* Is the value of every key (NULL-terminated list) free of problems so far? */
bool config_sound(struct config_loader *l, const char *const *keys);
#define CONFIG_SOUND(l, ...) config_sound(l, (const char *const[]){__VA_ARGS__, NULL})

/* A problem of "section.key", at the place where it was given. */
void config_problem(struct config_loader *l, const char *key, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Defaults; what a document gives; what one --set gives (config_take.c). */
void config_take_defaults(struct config_loader *l);
void config_take_document(struct config_loader *l, struct document *d);
void config_take_set(struct config_loader *l, const char *set);

/* Derived defaults, then every check that needs more than one key. */
void config_resolve(struct config_loader *l);

/* config->route from the words of l->route, for n_layers blocks. */
void config_resolve_route(struct config_loader *l, int n_layers);

#endif
