/* Tokenizers: text to token ids and back.
 *
 * Three kinds, told apart by what they are given (docs/formats.md, "Tokenizers"):
 *   "bytes"           256 byte values, then <|begin_of_text|> and <|end_of_text|>;
 *   a rank file       byte-level BPE as tiktoken and Llama 3 have it: BASE64 SPACE RANK lines;
 *   a tokenizer.json  byte-level BPE of Hugging Face tokenizers.
 * Ids are those of the reference encoders: tiktoken with Meta's splitting of long
 * texts for a rank file, Hugging Face tokenizers for a tokenizer.json, on text of
 * characters that Unicode 14 knows (PCRE2's tables decide what is a letter).
 *
 * A tokenizer is read-only once open; each thread that encodes has a scratch.
 */
#ifndef FP4D_DATA_TOKENIZER_H
#define FP4D_DATA_TOKENIZER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/hash.h"

enum { TOKENIZER_BYTES_BOS = 256, TOKENIZER_BYTES_EOS = 257, TOKENIZER_BYTES_VOCAB = 258 };

enum { TOKENIZER_NAME = 32 }; /* the final zero included */

struct tokenizer_info {
  char name[TOKENIZER_NAME]; /* "bytes", or the file's stem, '-' and the first 12 digits of the digest:
                              * printable ASCII, what a token stream's header keeps */
  int32_t vocab_size;        /* every id is below it */
  int32_t bos, eos;          /* -1: none; equal where one token is both */
  struct hash digest;        /* of all that decides ids: equal digests, equal ids */
  bool any_bytes;            /* text may be any bytes; else it must be valid UTF-8 (data/utf8.h) */
};

struct tokenizer;         /* opaque */
struct tokenizer_scratch; /* opaque */

/* "bytes", or a file's path.  ERROR_DATA (file, line and what is wrong), or ERROR_SYSTEM. */
struct tokenizer *tokenizer_open(const char *what, struct error *e);
void tokenizer_close(struct tokenizer *t);
const struct tokenizer_info *tokenizer_info(const struct tokenizer *t);

struct tokenizer_scratch *tokenizer_scratch_open(const struct tokenizer *t, struct error *e);
void tokenizer_scratch_close(struct tokenizer_scratch *s);

/* Ids that grow: begin with {0}, free with tokenizer_ids_free; n may be set back to 0 to use it again. */
struct tokenizer_ids {
  int32_t *id;
  int64_t n, room;
};
void tokenizer_ids_free(struct tokenizer_ids *ids);

enum tokenizer_specials {
  TOKENIZER_PLAIN,   /* "<|end_of_text|>" in the text is text like any other */
  TOKENIZER_SPECIALS /* it is the token */
};

/* Appends the ids of text[0..bytes) to *ids; no BOS or EOS is put around it.  The
 * text is one document: where it is cut, ids would change.  ERROR_DATA names the
 * byte where text is not valid UTF-8. */
bool tokenizer_encode(const struct tokenizer *t, struct tokenizer_scratch *s, const void *text, int64_t bytes,
                      enum tokenizer_specials specials, struct tokenizer_ids *ids, struct error *e);

/* The bytes of a token (not zero-terminated), which live as long as the tokenizer: a
 * special's are its name.  NULL for an id that names no token. */
const char *tokenizer_token(const struct tokenizer *t, int32_t id, int64_t *bytes);
bool tokenizer_is_special(const struct tokenizer *t, int32_t id);

#endif
