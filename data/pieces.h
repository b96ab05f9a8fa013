/* Pre-tokenisation: cutting text into the pieces that BPE merges within. */
#ifndef FP4D_DATA_PIECES_H
#define FP4D_DATA_PIECES_H

#include "data/vocabulary.h"

struct pieces;         /* opaque: compiled patterns; read-only once made */
struct pieces_scratch; /* opaque; a thread's */

/* Compiles v's patterns (PCRE2, UTF and UCP).  They are written for other engines, so what
 * PCRE2 reads otherwise is either rewritten (\s, \S and \uXXXX) or refused by name.
 * ERROR_DATA without the file's name. */
struct pieces *pieces_create(const struct vocabulary *v, struct error *e);
void pieces_destroy(struct pieces *p);

struct pieces_scratch *pieces_scratch_create(const struct pieces *p, struct error *e);
void pieces_scratch_destroy(struct pieces_scratch *s);

/* Calls take(context, piece, bytes) for each piece of the valid UTF-8 text, in order, none
 * empty; false from it ends the walk.  False: that, or ERROR_DATA where matching gave up. */
bool pieces_walk(const struct pieces *p, struct pieces_scratch *s, const unsigned char *text, int64_t bytes,
                 bool (*take)(void *context, const unsigned char *piece, int64_t bytes, struct error *e), void *context,
                 struct error *e);

#endif
