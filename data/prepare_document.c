/* One record of a source: text, tokens, hashes, and what the sort is given of them. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "data/json_text.h"
#include "data/little_endian.h"
#include "data/minhash.h"
#include "data/prepare_parts.h"
#include "data/utf8.h"

static void store_big(unsigned char *p, uint64_t x) {
  for (int i = 0; i < 8; i++) p[i] = (unsigned char)(x >> (56 - 8 * i));
}

static void store_hash_big(unsigned char *p, struct hash h) {
  store_big(p, h.high);
  store_big(p + 8, h.low);
}

static uint64_t load_big(const unsigned char *p) {
  uint64_t x = 0;
  for (int i = 0; i < 8; i++) x = x << 8 | p[i];
  return x;
}

uint64_t prepare_ordinal(const unsigned char *key) { return load_big(key + PREPARE_AT_ORDINAL); }

void prepare_order(const struct preparation *p, int side, int64_t pass, unsigned char *key) {
  struct hash order = {.high = 0, .low = prepare_ordinal(key)};
  if (!p->request->in_file_order) {
    const struct hash content = {load_big(key + PREPARE_AT_CONTENT), load_big(key + PREPARE_AT_CONTENT + 8)};
    order = mixture_key(side == PREPARE_VALIDATION ? 0 : p->request->seed, (uint64_t)pass, content);
  }
  store_hash_big(key + PREPARE_AT_ORDER, order);
}

/* ---- room ------------------------------------------------------------------ */

static bool no_memory(struct error *e) { return error_set(e, ERROR_SYSTEM, "out of memory for a document"); }

static bool text_room(struct prepare_worker *w, int64_t bytes, struct error *e) {
  if (bytes <= w->room) return true;
  const int64_t room = bytes + bytes / 4 + 4096;
  char *text = realloc(w->text, (size_t)room);
  if (!text) return no_memory(e);
  w->text = text;
  w->room = room;
  return true;
}

/* A record for the sort, its payload of `bytes` yet to be filled in; NULL with *e filled. */
static unsigned char *make(struct prepare_output *o, const unsigned char key[PREPARE_KEY], int64_t bytes, struct error *e) {
  if (o->n == o->made_room) {
    const int64_t room = o->made_room ? 2 * o->made_room : 256;
    struct prepare_made *made = realloc(o->made, (size_t)room * sizeof *made);
    if (!made) return no_memory(e), NULL;
    o->made = made;
    o->made_room = room;
  }
  if (o->used + bytes > o->room) {
    const int64_t room = o->used + bytes + o->used / 2 + 65536;
    unsigned char *out = realloc(o->out, (size_t)room);
    if (!out) return no_memory(e), NULL;
    o->out = out;
    o->room = room;
  }
  struct prepare_made *m = &o->made[o->n++];
  memcpy(m->key, key, PREPARE_KEY);
  m->at = o->used;
  m->bytes = bytes;
  o->used += bytes;
  return o->out + m->at;
}

/* ---- text ------------------------------------------------------------------ */

static bool refuse_invalid(const struct preparation *p, const struct prepare_input *in, bool half, int64_t byte, struct error *e) {
  const char *path = p->files.file[in->file].path;
  if (half)
    error_set(e, ERROR_DATA, "%s:%" PRId64 ": its text has an escape of half a surrogate pair", path, in->line);
  else if (in->line > 0)
    error_set(e, ERROR_DATA, "%s:%" PRId64 ": its text is no valid UTF-8 (byte %" PRId64 " of the text)", path, in->line, byte);
  else
    error_set(e, ERROR_DATA, "%s: no valid UTF-8 (byte %" PRId64 ")", path, byte);
  return error_hint(e, "data.invalid_utf8: replace or drop goes on");
}

/* A JSON line's text, in w->text. */
static bool decode(const struct preparation *p, struct prepare_worker *w, const struct prepare_input *in, int64_t *bytes,
                   int64_t *lone, struct error *e) {
  const char *set = p->request->sources[p->files.file[in->file].source].text_key, *key = set[0] ? set : "text";
  if (!text_room(w, in->length, e)) return false;
  struct json_text found = {.text = w->text};
  if (!json_text_find(in->bytes, in->length, key, &found)) {
    const char *path = p->files.file[in->file].path;
    error_set(e, ERROR_DATA, "%s:%" PRId64 ": %s (byte %" PRId64 " of the line)", path, in->line, found.problem, found.at);
    return error_hint(e, "every line is a JSON object with a text under the key \"%s\" (text_key of the source)", key);
  }
  *bytes = found.length;
  *lone = found.lone;
  return true;
}

/* Applies the policy to text[0..*bytes), which may come to lie in w->text.  *dropped: the document is. */
static bool apply_policy(const struct preparation *p, struct prepare_worker *w, const struct prepare_input *in, const char **text,
                         int64_t *bytes, int64_t lone, struct data_prepared_source *counts, bool *dropped, struct error *e) {
  const int64_t valid = utf8_valid(*text, *bytes);
  if (valid == *bytes && lone == 0) return true;
  switch (p->request->invalid_utf8) {
    case DATA_UTF8_ERROR:
      return refuse_invalid(p, in, valid == *bytes, valid, e);
    case DATA_UTF8_DROP:
      counts->invalid_dropped++;
      *dropped = true;
      return true;
    case DATA_UTF8_REPLACE: break;
  }
  counts->invalid++;
  counts->replacements += lone;
  if (valid == *bytes || tokenizer_info(p->tokenizer)->any_bytes) return true;
  int64_t replacements = 0;
  const int64_t size = utf8_repaired_size(*text, *bytes, &replacements);
  /* The repaired text comes after the text that is repaired, which may be in the same memory. */
  const bool inside = *text == w->text;
  const int64_t keep = inside ? *bytes : 0;
  if (!text_room(w, keep + size, e)) return false;
  utf8_repair(inside ? w->text : *text, *bytes, w->text + keep);
  counts->replacements += replacements;
  *text = w->text + keep;
  *bytes = size;
  return true;
}

/* The hash of a text whose case and white space do not count: ASCII letters as small ones, runs of ASCII
 * white space as one space, none at the ends. */
static bool hash_normalised(struct prepare_worker *w, const char *text, int64_t bytes, struct hash *hash, struct error *e) {
  const bool inside = w->text && text >= w->text && text < w->text + w->room;
  const int64_t begin = inside ? text - w->text + bytes : 0, offset = inside ? text - w->text : 0;
  if (!text_room(w, begin + bytes, e)) return false;
  const unsigned char *from = (const unsigned char *)(inside ? w->text + offset : text);
  unsigned char *to = (unsigned char *)w->text + begin, *first = to;
  bool blank = false;
  for (int64_t i = 0; i < bytes; i++) {
    const unsigned char c = from[i];
    if (c == ' ' || (c >= '\t' && c <= '\r')) {
      blank = true;
      continue;
    }
    if (blank && to > first) *to++ = ' ';
    blank = false;
    *to++ = c >= 'A' && c <= 'Z' ? (unsigned char)(c + 32) : c;
  }
  *hash = hash_bytes(first, (size_t)(to - first));
  return true;
}

/* ---- records --------------------------------------------------------------- */

static bool add_id(struct tokenizer_ids *ids, int32_t id, struct error *e) {
  if (ids->n == ids->room) {
    const int64_t room = ids->room ? 2 * ids->room : 1024;
    int32_t *more = realloc(ids->id, (size_t)room * sizeof *more);
    if (!more) return no_memory(e);
    ids->id = more;
    ids->room = room;
  }
  ids->id[ids->n++] = id;
  return true;
}

static bool encode(const struct preparation *p, struct prepare_worker *w, const struct prepare_input *in, const char *text,
                   int64_t bytes, struct error *e) {
  w->ids.n = 0;
  if (p->bos >= 0 && !add_id(&w->ids, p->bos, e)) return false;
  if (!tokenizer_encode(p->tokenizer, w->scratch, text, bytes, TOKENIZER_PLAIN, &w->ids, e))
    return in->line > 0 ? error_context(e, "%s:%" PRId64, p->files.file[in->file].path, in->line)
                        : error_context(e, "%s", p->files.file[in->file].path);
  return p->eos < 0 || add_id(&w->ids, p->eos, e);
}

/* What a duplicate's record says: what is to be subtracted. */
static void store_loss(unsigned char *payload, int side, int source, int64_t tokens) {
  payload[0] = (unsigned char)side;
  payload[1] = (unsigned char)source;
  store_u64(payload + 2, (uint64_t)tokens);
}

static bool add_document(const struct preparation *p, const struct prepare_worker *w, unsigned char key[PREPARE_KEY], int source,
                         struct prepare_output *out, int *side_out, struct error *e) {
  const struct data_prepare *r = p->request;
  /* Content: the ids as little-endian u32, which is how they lie in memory. */
  const struct hash content = hash_bytes(w->ids.id, (size_t)w->ids.n * 4);
  const int side = r->validation_path && mixture_held_out(content, r->validation_fraction) ? PREPARE_VALIDATION : PREPARE_TRAIN;
  key[0] = (unsigned char)(PREPARE_DOCUMENTS + DATA_SOURCES * side + (p->pool ? 0 : source));
  store_hash_big(key + PREPARE_AT_CONTENT, content);
  prepare_order(p, side, 0, key);
  unsigned char *ids = make(out, key, w->ids.n * p->token_bytes, e);
  if (!ids) return false;
  for (int64_t i = 0; i < w->ids.n; i++, ids += p->token_bytes) {
    if (p->token_bytes == 2)
      store_u16(ids, (uint32_t)w->ids.id[i]);
    else
      store_u32(ids, (uint32_t)w->ids.id[i]);
  }
  *side_out = side;
  return true;
}

bool prepare_document(const struct preparation *p, struct prepare_worker *w, const struct prepare_input *in,
                      struct prepare_output *out, struct data_prepared_source *counts, struct error *e) {
  const int source = p->files.file[in->file].source;
  const char *text = in->bytes;
  int64_t bytes = in->length, lone = 0;
  bool dropped = false;
  if (in->line > 0) {
    if (!decode(p, w, in, &bytes, &lone, e)) return false;
    text = w->text;
  }
  counts->documents++;
  counts->bytes += bytes;
  if (bytes == 0) {
    counts->empty++;
    return true;
  }
  if (!apply_policy(p, w, in, &text, &bytes, lone, counts, &dropped, e)) return false;
  if (dropped) return true;
  if (!encode(p, w, in, text, bytes, e)) return false;
  if (w->ids.n == 0) { /* a tokenizer may know text without a token */
    counts->empty++;
    return true;
  }

  unsigned char key[PREPARE_KEY] = {0};
  key[PREPARE_AT_SOURCE] = (unsigned char)source;
  store_big(key + PREPARE_AT_ORDINAL, (uint64_t)in->ordinal);
  int side;
  if (!add_document(p, w, key, source, out, &side, e)) return false;
  counts->side[side].documents++;
  counts->side[side].tokens += w->ids.n;
  if (p->request->dedup == DATA_DEDUP_NONE) return true;

  memset(key + PREPARE_AT_ORDER, 0, PREPARE_AT_ORDINAL - PREPARE_AT_ORDER);
  if (p->request->dedup == DATA_DEDUP_MINHASH) {
    struct minhash_signature signature;
    minhash_sign(text, bytes, &signature);
    key[0] = PREPARE_SIGNATURES;
    unsigned char *payload = make(out, key, PREPARE_LOSS + (int64_t)sizeof signature, e);
    if (!payload) return false;
    store_loss(payload, side, source, w->ids.n);
    memcpy(payload + PREPARE_LOSS, &signature, sizeof signature);
  }
  struct hash same;
  if (!hash_normalised(w, text, bytes, &same, e)) return false; /* last: it may move the text */
  key[0] = PREPARE_TEXTS;
  store_hash_big(key + PREPARE_AT_ORDER, same);
  unsigned char *payload = make(out, key, PREPARE_LOSS, e);
  if (!payload) return false;
  store_loss(payload, side, source, w->ids.n);
  return true;
}
