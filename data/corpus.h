/* A corpus of text: finding its files and reading their records one after the
 * other, in memory that the longest record bounds. */
#ifndef FP4D_DATA_CORPUS_H
#define FP4D_DATA_CORPUS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "data/source.h"

/* What a record of a file is. */
enum corpus_kind {
  CORPUS_DOCUMENT, /* the whole file */
  CORPUS_LINES     /* a line: JSON */
};

struct corpus_file {
  char *path;
  int source;
  enum corpus_kind kind;
  int64_t bytes;     /* as it lies on the disk */
  int64_t changed_s; /* time of its last change */
  int64_t changed_ns;
};

/* Files in the order found. */
struct corpus_files {
  struct corpus_file *file;
  int64_t count, room;
};

/* Adds the file `path`, or the files of the folder `path`: all levels, in byte
 * order of names, without names that begin with a dot and links to folders.
 *   DATA_AUTO   .txt, .md, .rst: a document; .jsonl, .ndjson: lines
 *   DATA_TEXT   a file that is named, whatever its name; in folders as DATA_AUTO
 *   DATA_JSONL  lines: a file that is named, whatever its name; in folders .jsonl, .ndjson and .json
 * each also with .gz or .zst.  A source without files is an error. */
bool corpus_find(struct corpus_files *files, const char *path, enum data_format format, int source, struct error *e);
void corpus_files_free(struct corpus_files *files);

struct corpus_reader; /* a file that is being read */

struct corpus_record {
  const char *bytes; /* live until the next call */
  int64_t length;
  int64_t line; /* from 1; 0: the file is the record */
};

/* Records longer than `most` bytes are refused, by file and line.  NULL with *e filled. */
struct corpus_reader *corpus_reader_open(const struct corpus_file *file, int64_t most, struct error *e);
/* 1: a record; 0: the end; -1: *e is filled.  A byte order mark at the start of the
 * file, line ends and lines of white space alone are no part of a record. */
int corpus_reader_next(struct corpus_reader *r, struct corpus_record *record, struct error *e);
/* Bytes of the file (as it lies on the disk) that have been read. */
int64_t corpus_reader_position(const struct corpus_reader *r);
void corpus_reader_close(struct corpus_reader *r); /* NULL is fine */

#endif
