/* Words of a text and their hashes. */
#include "data/words.h"

#include "base/hash.h"

static const unsigned char space[256] = {[' '] = 1, ['\t'] = 1, ['\n'] = 1, ['\v'] = 1, ['\f'] = 1, ['\r'] = 1};

static void close_piece(struct words *w) {
  w->hash = hash_word(w->piece, (size_t)w->used, w->hash);
  w->used = 0;
}

int words_end(struct words *w, uint64_t *out) {
  if (!w->inside) return 0;
  if (w->used) close_piece(w);
  *out = w->hash;
  w->hash = 0;
  w->inside = false;
  return 1;
}

int words_feed(struct words *w, const void *text, int64_t bytes, uint64_t out[WORDS_ROOM]) {
  const unsigned char *t = text;
  int count = 0;
  for (int64_t i = 0; i < bytes; i++) {
    unsigned char c = t[i];
    if (space[c]) {
      count += words_end(w, out + count);
      continue;
    }
    if (w->used == WORDS_PIECE) close_piece(w);
    w->piece[w->used++] = (unsigned char)(c + ((unsigned)c - 'A' < 26 ? 'a' - 'A' : 0));
    w->inside = true;
  }
  return count;
}
