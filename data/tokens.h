/* Token files that others made, read where they lie (docs/formats.md): Megatron-LM
 * .bin with .idx, llm.c .bin, bare u16 or u32 (nanoGPT; OLMo, whose .npy have no
 * header; torchtitan, with offsets.npy beside), and true .npy arrays.
 *
 * A file is `tokens` ids of `width` bytes from byte `data_at` on.  Its documents are
 * those that the format names; where it names none, they begin at `bos` and end
 * after `eos`; without these the file is one document.
 */
#ifndef FP4D_DATA_TOKENS_H
#define FP4D_DATA_TOKENS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "data/source.h"

/* ---- finding ------------------------------------------------------------- */
struct tokens_list {
  char **path;
  int64_t count, room;
};

/* Adds the token files of a source, in byte order of names: its path as it is, or as a
 * pattern (* ? [), or as a folder searched for names of the format. None at all is an error.
 * A Megatron pair is listed once, by its .idx. */
bool tokens_find(struct tokens_list *list, const struct data_source *source, struct error *e);
void tokens_list_free(struct tokens_list *list);

/* Is this a source of token files? One of text is not; a source that is not there is neither. */
bool tokens_is_source(const struct data_source *source);

/* ---- one file ------------------------------------------------------------ */
struct tokens_file {
  char *path; /* of the file with the ids */
  int fd;
  int64_t size;    /* bytes of that file */
  int64_t beside;  /* bytes of the .idx or offsets.npy that came with it; 0: none */
  int64_t data_at; /* its byte where ids begin */
  int width;       /* bytes of an id: 1, 2, 4, 8 */
  bool is_signed;
  int64_t tokens;     /* at least 1 */
  int64_t *ends;      /* [documents]: where each ends, ascending, the last at `tokens`; NULL: by bos and eos */
  int64_t documents;
  int64_t bos, eos; /* -1: none */
};

/* Opens and checks: header, sizes, documents; ids are checked as they are decoded. */
bool tokens_open(struct tokens_file *f, const char *path, const struct data_source *source, struct error *e);
void tokens_close(struct tokens_file *f);

/* ids[count] from the bytes of tokens first..first+count-1. An id below 0, or `limit` or more, is
 * refused: file, token, byte and id named. */
bool tokens_decode(const struct tokens_file *f, const unsigned char *raw, int64_t first, int64_t count, int64_t limit,
                   int32_t *ids, struct error *e);

#endif
