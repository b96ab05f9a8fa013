/* The formats behind tokens_open, one file each. */
#ifndef FP4D_DATA_TOKENS_PARTS_H
#define FP4D_DATA_TOKENS_PARTS_H

#include "data/tokens.h"

bool tokens_ends_with(const char *path, const char *ending);
/* A regular file, open for reading, and its size; -1 with *e filled. */
int tokens_open_file(const char *path, int64_t *size, struct error *e);

/* Each fills width, is_signed, data_at, tokens (and ends) of a file that is open. */
bool tokens_open_llmc(struct tokens_file *f, struct error *e);
bool tokens_open_npy(struct tokens_file *f, struct error *e);
/* Any of .idx, .bin or the name without either; opens the .bin itself. */
bool tokens_open_megatron(struct tokens_file *f, const char *path, struct error *e);
/* Documents from offsets.npy or NAME.offsets.npy beside a bare file, where one is. */
bool tokens_take_offsets(struct tokens_file *f, struct error *e);

/* By their first bytes. */
bool tokens_is_llmc(const unsigned char *bytes, int64_t count);
bool tokens_is_npy(const unsigned char *bytes, int64_t count);

/* PATH with its ending `from` replaced by `to`; malloc'ed; NULL: out of memory. */
char *tokens_sibling(const char *path, const char *from, const char *to);

#endif
