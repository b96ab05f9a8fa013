/* Added tokens: strings that are found in a text before it is cut into pieces. */
#ifndef FP4D_DATA_ADDED_H
#define FP4D_DATA_ADDED_H

#include "data/vocabulary.h"

struct added; /* opaque; read-only once made */

struct added *added_create(const struct vocabulary *v, struct error *e);
void added_destroy(struct added *a);

/* The leftmost added token in text[0..bytes), the longest of those that begin there: its id,
 * place and length.  -1: none.  Specials count with `specials` only. */
int32_t added_find(const struct added *a, const unsigned char *text, int64_t bytes, bool specials, int64_t *at, int64_t *length);

#endif
