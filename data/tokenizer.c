/* Tokenizers: opening them, encoding a text, decoding a token. */
#include "data/tokenizer.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "data/added.h"
#include "data/bpe.h"
#include "data/pieces.h"
#include "data/utf8.h"
#include "data/vocabulary.h"

enum { FILE_LIMIT = 1 << 28 }; /* bytes of a tokenizer's file */

/* Meta's lengths: a call encodes at most so many characters, a run of white space or of
 * anything else has at most so many (Llama 3's tokenizer.py). */
enum { CALL_CHARACTERS = 400000, RUN_CHARACTERS = 25000 };

struct tokenizer {
  struct tokenizer_info info;
  bool bytes; /* the byte tokenizer: nothing below but the text of tokens */
  struct vocabulary v;
  struct bpe *bpe;
  struct pieces *pieces;
  struct added *added;
};

struct tokenizer_scratch {
  struct bpe_scratch *bpe;
  struct pieces_scratch *pieces;
};

/* ---- opening ------------------------------------------------------------------------------- */

static bool no_memory(const char *what, struct error *e) { return error_set(e, ERROR_SYSTEM, "out of memory for the tokenizer %s", what); }

static bool open_bytes(struct tokenizer *t, struct error *e) {
  t->bytes = t->info.any_bytes = true;
  for (int i = 0; i < 256; i++) {
    const unsigned char byte = (unsigned char)i;
    if (!vocabulary_add(&t->v, i, &byte, 1, TOKEN_TEXT, e)) return false;
  }
  return vocabulary_add_specials(&t->v, e) && (t->added = added_create(&t->v, e));
}

static bool read_file(struct tokenizer *t, const char *path, struct error *e) {
  char *text;
  size_t bytes;
  if (!file_exists(path)) {
    error_set(e, ERROR_DATA, "there is no tokenizer %s", path);
    return error_hint(e, "a tokenizer is \"bytes\" or the path of a rank file or of a tokenizer.json");
  }
  if (!file_read(path, FILE_LIMIT, ERROR_DATA, &text, &bytes, e)) return false;
  const bool json = text[strspn(text, " \t\r\n")] == '{';
  const bool good = json ? vocabulary_read_json(&t->v, path, text, (int64_t)bytes, e) : vocabulary_read_ranks(&t->v, path, text, (int64_t)bytes, e);
  free(text);
  if (!good) return false;
  if (!(t->bpe = bpe_create(&t->v, e)) || !(t->pieces = pieces_create(&t->v, e)) || !(t->added = added_create(&t->v, e)))
    return error_context(e, "%s", path);
  return true;
}

/* The stem of the file's name, cut, without what a stream's header does not take; then the digest's first digits. */
static void make_name(struct tokenizer_info *info, const char *path) {
  enum { DIGITS = 12, STEM = TOKENIZER_NAME - DIGITS - 2 };
  char digest[HASH_TEXT];
  const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path, *dot = strrchr(name, '.');
  const size_t n = dot && dot > name ? (size_t)(dot - name) : strlen(name);
  size_t used = 0;
  for (; used < n && used < STEM; used++) info->name[used] = name[used] > ' ' && name[used] <= '~' ? name[used] : '_';
  hash_text(info->digest, digest);
  snprintf(info->name + used, sizeof info->name - used, "-%.*s", DIGITS, digest);
}

struct tokenizer *tokenizer_open(const char *what, struct error *e) {
  struct tokenizer *t = calloc(1, sizeof *t);
  if (!t) {
    no_memory(what, e);
    return NULL;
  }
  t->v.bos = t->v.eos = -1;
  const bool bytes = strcmp(what, "bytes") == 0;
  if (!(bytes ? open_bytes(t, e) : read_file(t, what, e)) || !vocabulary_digest(&t->v, &t->info.digest, e)) {
    tokenizer_close(t);
    return NULL;
  }
  t->info.vocab_size = t->v.n;
  t->info.bos = t->v.bos;
  t->info.eos = t->v.eos;
  if (bytes)
    snprintf(t->info.name, sizeof t->info.name, "bytes");
  else
    make_name(&t->info, what);
  return t;
}

void tokenizer_close(struct tokenizer *t) {
  if (!t) return;
  vocabulary_free(&t->v);
  bpe_destroy(t->bpe);
  pieces_destroy(t->pieces);
  added_destroy(t->added);
  free(t);
}

const struct tokenizer_info *tokenizer_info(const struct tokenizer *t) { return &t->info; }

struct tokenizer_scratch *tokenizer_scratch_open(const struct tokenizer *t, struct error *e) {
  struct tokenizer_scratch *s = calloc(1, sizeof *s);
  if (!s) {
    no_memory(t->info.name, e);
    return NULL;
  }
  if (t->bytes || ((s->bpe = bpe_scratch_create(e)) && (s->pieces = pieces_scratch_create(t->pieces, e)))) return s;
  tokenizer_scratch_close(s);
  return NULL;
}

void tokenizer_scratch_close(struct tokenizer_scratch *s) {
  if (!s) return;
  bpe_scratch_destroy(s->bpe);
  pieces_scratch_destroy(s->pieces);
  free(s);
}

/* ---- ids -------------------------------------------------------------------------------------- */

void tokenizer_ids_free(struct tokenizer_ids *ids) {
  free(ids->id);
  *ids = (struct tokenizer_ids){0};
}

static bool grow(struct tokenizer_ids *ids, int64_t more, struct error *e) {
  int64_t room = ids->room ? 2 * ids->room : 4096;
  if (room < ids->n + more) room = ids->n + more;
  int32_t *id = realloc(ids->id, (size_t)room * sizeof *id);
  if (!id) return error_set(e, ERROR_SYSTEM, "out of memory for %" PRId64 " token ids", room);
  ids->id = id;
  ids->room = room;
  return true;
}

static inline bool has_room(struct tokenizer_ids *ids, int64_t more, struct error *e) {
  return ids->room - ids->n >= more || grow(ids, more, e);
}

/* ---- encoding ---------------------------------------------------------------------------------- */

enum { AHEAD = 16 }; /* pieces that wait for their memory; a power of two */

struct encoding {
  const struct tokenizer *t;
  struct tokenizer_scratch *s;
  struct tokenizer_ids *ids;
  const unsigned char *readable; /* the end of the text */
  enum tokenizer_specials specials;
  struct bpe_piece waiting[AHEAD];
  unsigned taken, done; /* pieces; those between them wait */
};

static bool encode_piece(struct encoding *c, struct error *e) {
  const struct bpe_piece *p = c->waiting + c->done++ % AHEAD;
  if (!has_room(c->ids, p->bytes, e)) return false;
  const int64_t n = bpe_encode(c->t->bpe, c->s->bpe, p, c->readable, c->ids->id + c->ids->n);
  if (n < 0) return error_set(e, ERROR_SYSTEM, "out of memory merging a piece of %" PRId64 " bytes", p->bytes);
  c->ids->n += n;
  return true;
}

static bool take_piece(void *context, const unsigned char *piece, int64_t bytes, struct error *e) {
  struct encoding *c = context;
  if (bytes > BPE_PIECE) return error_set(e, ERROR_DATA, "a text has a piece of %" PRId64 " bytes; a tokenizer takes at most %d", bytes, BPE_PIECE);
  if (c->taken - c->done == AHEAD && !encode_piece(c, e)) return false;
  bpe_prepare(c->t->bpe, c->s->bpe, piece, bytes, c->readable, c->waiting + c->taken++ % AHEAD);
  return true;
}

static bool encode_text(struct encoding *c, const unsigned char *text, int64_t bytes, struct error *e) {
  if (!pieces_walk(c->t->pieces, c->s->pieces, text, bytes, take_piece, c, e)) return false;
  while (c->taken != c->done)
    if (!encode_piece(c, e)) return false;
  return true;
}

static bool take_bytes(struct tokenizer_ids *ids, const unsigned char *text, int64_t bytes, struct error *e) {
  if (!has_room(ids, bytes, e)) return false;
  for (int64_t i = 0; i < bytes; i++) ids->id[ids->n + i] = text[i];
  ids->n += bytes;
  return true;
}

/* A text, added tokens and specials in it. */
static bool encode_span(struct encoding *c, const unsigned char *text, int64_t bytes, struct error *e) {
  const bool specials = c->specials == TOKENIZER_SPECIALS;
  while (bytes > 0) {
    int64_t at, length;
    const int32_t id = added_find(c->t->added, text, bytes, specials, &at, &length);
    const int64_t plain = id < 0 ? bytes : at;
    if (!(c->t->bytes ? take_bytes(c->ids, text, plain, e) : encode_text(c, text, plain, e))) return false;
    if (id < 0) break;
    if (!has_room(c->ids, 1, e)) return false;
    c->ids->id[c->ids->n++] = id;
    text += at + length;
    bytes -= at + length;
  }
  return true;
}

/* What Python's str.isspace says: White_Space, and four separators that it does not have. */
static bool is_space(uint32_t c) {
  if (c < 0x80) return (c >= 9 && c <= 13) || (c >= 28 && c <= 32);
  return c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f ||
         c == 0x205f || c == 0x3000;
}

/* Meta's wrapper: calls of CALL_CHARACTERS, and within each a cut where a run would go on too long.  A run that
 * is cut, or that ends and is followed by others, does not cut anything else: only the count begins again. */
static bool encode_limited(struct encoding *c, const unsigned char *text, int64_t bytes, struct error *e) {
  int64_t start = 0, call = 0, run = 0;
  bool space = false;
  for (int64_t at = 0; at < bytes;) {
    int length;
    const bool now = is_space(utf8_character(text + at, &length));
    const bool new_call = call == CALL_CHARACTERS;
    if (call == 0 || new_call) {
      call = run = 0;
      space = now;
    }
    run = now == space ? run + 1 : 1;
    space = now;
    if (new_call || run > RUN_CHARACTERS) {
      if (!encode_span(c, text + start, at - start, e)) return false;
      start = at;
      run = 1;
    }
    call++;
    at += length;
  }
  return encode_span(c, text + start, bytes - start, e);
}

bool tokenizer_encode(const struct tokenizer *t, struct tokenizer_scratch *s, const void *text, int64_t bytes,
                      enum tokenizer_specials specials, struct tokenizer_ids *ids, struct error *e) {
  const unsigned char *byte = text;
  if (!t->info.any_bytes) {
    const int64_t good = utf8_valid(text, bytes);
    if (good < bytes) return error_set(e, ERROR_DATA, "byte %" PRId64 " of a text (0x%02x) is not UTF-8", good, byte[good]);
  }
  struct encoding c = {.t = t, .s = s, .ids = ids, .readable = byte + bytes, .specials = specials};
  return t->v.limits && bytes > RUN_CHARACTERS ? encode_limited(&c, byte, bytes, e) : encode_span(&c, byte, bytes, e);
}

/* ---- decoding ---------------------------------------------------------------------------------- */

const char *tokenizer_token(const struct tokenizer *t, int32_t id, int64_t *bytes) {
  *bytes = 0;
  if (id < 0 || id >= t->v.n || t->v.token[id].kind == TOKEN_NONE) return NULL;
  *bytes = t->v.token[id].bytes;
  return t->v.text + t->v.token[id].at;
}

bool tokenizer_is_special(const struct tokenizer *t, int32_t id) {
  return id >= 0 && id < t->v.n && t->v.token[id].kind == TOKEN_SPECIAL;
}
