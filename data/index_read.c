/* An index as a stream: tokens come from the token files of others, in the order
 * that the index says. A block of a token file is checked against its digest when
 * it is first touched; a file that is not the one indexed is refused. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/index_parts.h"
#include "data/stream_file.h"
#include "data/stream_parts.h"
#include "data/tokens_parts.h"

enum { SLOTS = 64, PIECE = 8192 };

/* Files share slots, each with one of them open: a process has few of thousands open. */
struct slot {
  pthread_mutex_t mutex; /* guards all of it */
  int64_t file;          /* -1: none is open */
  int fd;
  unsigned char *buffer; /* INDEX_BLOCK */
};

/* Which file a path named when it was opened last. */
struct seen {
  bool any;
  dev_t device;
  ino_t number;
  struct timespec changed;
};

struct index {
  struct frame frame;
  struct index_header header;
  struct index_layout layout;
  struct index_file *file;
  struct tokens_file *tokens; /* for decoding and messages; paths lie in `paths` */
  struct seen *seen;          /* by token file, guarded by its slot's mutex */
  char *paths;
  atomic_uchar *checked; /* by block of token files */
  struct slot slot[SLOTS];
  int slots; /* made */
};

static bool no_memory(const struct stream *s, struct error *e) { return error_set(e, ERROR_SYSTEM, "%s: out of memory", s->path); }

static bool damaged(const struct stream *s, const char *what, int64_t number, struct error *e) {
  error_set(e, ERROR_DATA, "%s: damaged: %s %" PRId64 " is impossible", s->path, what, number);
  return error_hint(e, "make the index again with `fp4d index CONFIG --force`");
}

static bool is_changed(const char *path, const char *what, struct error *e) {
  error_set(e, ERROR_DATA, "%s %s", path, what);
  return error_hint(e, "bring the file back, or make the index again with `fp4d index CONFIG --force`: that is another dataset");
}

/* ---- opening ------------------------------------------------------------------ */

static bool check_file(const struct stream *s, int64_t i, const char *path, struct error *e) {
  const struct index_file *f = &((struct index *)s->part)->file[i];
  struct stat st;
  char what[128];
  if (stat(path, &st) != 0) {
    snprintf(what, sizeof what, "was indexed by %.60s and cannot be used now: %s", s->path, strerror(errno));
    return is_changed(path, what, e);
  }
  if (st.st_size == f->size) return true;
  snprintf(what, sizeof what, "has %" PRId64 " bytes, it had %" PRId64 " when it was indexed", (int64_t)st.st_size, f->size);
  return is_changed(path, what, e);
}

/* The table of token files, each of which must be there. */
static bool read_files(struct stream *s, struct index *x, struct error *e) {
  const int64_t n = x->header.files;
  x->file = malloc((size_t)n * sizeof *x->file);
  x->tokens = calloc((size_t)n, sizeof *x->tokens);
  x->seen = calloc((size_t)n, sizeof *x->seen);
  x->paths = malloc((size_t)x->header.path_bytes + 1);
  if (!x->file || !x->tokens || !x->seen || !x->paths) return no_memory(s, e);
  if (!frame_read(&x->frame, x->paths, x->layout.paths_at, x->header.path_bytes, e)) return false;
  x->paths[x->header.path_bytes] = 0;
  char *path = x->paths, *end = x->paths + x->header.path_bytes;
  int64_t blocks = 0;
  for (int64_t i = 0; i < n; i++) {
    unsigned char bytes[INDEX_FILE];
    if (!frame_read(&x->frame, bytes, x->layout.files_at + i * INDEX_FILE, INDEX_FILE, e)) return false;
    struct index_file *f = &x->file[i];
    index_file_decode(bytes, f);
    const bool width = f->width == 1 || f->width == 2 || f->width == 4 || f->width == 8;
    if (!width || f->size < 1 || f->data_at < 0 || f->data_at > f->size || f->tokens < 1 || f->tokens > (f->size - f->data_at) / f->width ||
        f->first_block != blocks || index_blocks(f->size) > x->header.blocks - blocks || f->source < 0 || f->source >= x->header.n_sources ||
        path >= end)
      return damaged(s, "token file", i, e);
    blocks += index_blocks(f->size);
    x->tokens[i] = (struct tokens_file){.path = path, .fd = -1, .size = f->size, .data_at = f->data_at, .width = f->width,
                                        .is_signed = f->is_signed, .tokens = f->tokens};
    if (!check_file(s, i, path, e)) return false;
    path += strlen(path) + 1;
  }
  return (blocks == x->header.blocks && path == end) || damaged(s, "the number of blocks", blocks, e);
}

static bool make_slots(struct stream *s, struct index *x, struct error *e) {
  x->checked = malloc((size_t)x->header.blocks * sizeof *x->checked);
  if (!x->checked) return no_memory(s, e);
  for (int64_t b = 0; b < x->header.blocks; b++) atomic_init(&x->checked[b], 0);
  for (; x->slots < SLOTS && x->slots < x->header.files; x->slots++) {
    struct slot *slot = &x->slot[x->slots];
    *slot = (struct slot){.file = -1, .fd = -1, .buffer = malloc(INDEX_BLOCK)};
    if (!slot->buffer || pthread_mutex_init(&slot->mutex, NULL) != 0) {
      free(slot->buffer);
      return no_memory(s, e);
    }
  }
  return true;
}

bool stream_index_open(struct stream *s, int64_t size, struct error *e) {
  unsigned char bytes[FRAME_HEADER];
  if (size < FRAME_HEADER) {
    error_set(e, ERROR_DATA, "%s: %" PRId64 " bytes are too few for an index", s->path, size);
    return error_hint(e, "make it again with `fp4d index CONFIG --force`");
  }
  struct index *x = s->part = calloc(1, sizeof *x);
  if (!x) return no_memory(s, e);
  const struct index_header *h = &x->header;
  if (!frame_read_at(s->fd, s->path, bytes, FRAME_HEADER, 0, e) || !index_header_decode(s->path, bytes, &x->header, e)) return false;
  if (!index_layout_of(h, &x->layout)) return error_set(e, ERROR_INTERNAL, "%s: layout", s->path);
  x->frame.path = s->path;
  x->frame.fd = s->fd;
  x->frame.again = "make the index again with `fp4d index CONFIG --force`";
  if (!frame_open(&x->frame, bytes, x->layout.payload, size, e)) return false;
  s->info = (struct stream_info){.tokens = h->tokens,
                                 .documents = h->documents,
                                 .vocab_size = h->vocab_size,
                                 .bos = h->bos,
                                 .eos = h->eos,
                                 .digest = h->content,
                                 .blocks = x->frame.blocks,
                                 .token_files = h->files,
                                 .n_sources = h->n_sources,
                                 .sources = x->frame.text};
  return stream_sources_decode(s->path, x->frame.text, &s->info, e) && read_files(s, x, e) && make_slots(s, x, e);
}

static void close_index(struct stream *s) {
  struct index *x = s->part;
  if (!x) return;
  for (int i = 0; i < x->slots; i++) {
    if (x->slot[i].fd >= 0) close(x->slot[i].fd);
    free(x->slot[i].buffer);
    pthread_mutex_destroy(&x->slot[i].mutex);
  }
  frame_close(&x->frame);
  free(x->checked);
  free(x->file);
  free(x->tokens);
  free(x->seen);
  free(x->paths);
  free(x);
}

/* ---- token files -------------------------------------------------------------- */

/* What was checked of a file is forgotten when another has its name. */
static bool recognise(struct index *x, const struct slot *slot, int64_t file, struct error *e) {
  struct stat st;
  struct seen *seen = &x->seen[file];
  if (fstat(slot->fd, &st) != 0) return error_errno(e, ERROR_DATA, "cannot examine %s", x->tokens[file].path);
  const bool same = seen->device == st.st_dev && seen->number == st.st_ino && seen->changed.tv_sec == st.st_mtim.tv_sec &&
                    seen->changed.tv_nsec == st.st_mtim.tv_nsec;
  const struct index_file *f = &x->file[file];
  for (int64_t b = 0; seen->any && !same && b < index_blocks(f->size); b++) atomic_store(&x->checked[f->first_block + b], 0);
  *seen = (struct seen){true, st.st_dev, st.st_ino, st.st_mtim};
  return true;
}

static bool open_in_slot(struct index *x, struct slot *slot, int64_t file, struct error *e) {
  if (slot->file == file) return true;
  if (slot->fd >= 0) close(slot->fd);
  slot->file = -1;
  const struct tokens_file *f = &x->tokens[file];
  int64_t size = 0;
  slot->fd = tokens_open_file(f->path, &size, e);
  if (slot->fd < 0) return false;
  if (size == f->size) {
    if (!recognise(x, slot, file, e)) return false;
    slot->file = file;
    return true;
  }
  char what[128];
  snprintf(what, sizeof what, "has %" PRId64 " bytes, it had %" PRId64 " when it was indexed", size, f->size);
  return is_changed(f->path, what, e);
}

/* Checks block b of the slot's file against the index. */
static bool check_block(const struct stream *s, struct index *x, struct slot *slot, int64_t b, struct error *e) {
  const struct index_file *f = &x->file[slot->file];
  const int64_t at = b * INDEX_BLOCK, left = f->size - at, bytes = left < INDEX_BLOCK ? left : INDEX_BLOCK;
  const char *path = x->tokens[slot->file].path;
  unsigned char wanted[16];
  if (!frame_read_at(slot->fd, path, slot->buffer, bytes, at, e) ||
      !frame_read(&x->frame, wanted, x->layout.digests_at + 16 * (f->first_block + b), 16, e))
    return false;
  const struct hash have = hash_bytes(slot->buffer, (size_t)bytes);
  if (hash_equal(have, load_hash(wanted))) {
    atomic_store_explicit(&x->checked[f->first_block + b], 1, memory_order_release);
    return true;
  }
  char now[HASH_TEXT], then[HASH_TEXT], what[256];
  hash_text(have, now);
  hash_text(load_hash(wanted), then);
  snprintf(what, sizeof what, "has changed since it was indexed: bytes %" PRId64 " to %" PRId64 " have digest %s, %.80s says %s", at, at + bytes - 1,
           now, s->path, then);
  return is_changed(path, what, e);
}

static bool check_bytes(const struct stream *s, struct index *x, struct slot *slot, int64_t at, int64_t bytes, struct error *e) {
  const int64_t first = x->file[slot->file].first_block;
  for (int64_t b = at / INDEX_BLOCK; b <= (at + bytes - 1) / INDEX_BLOCK; b++)
    if (!atomic_load_explicit(&x->checked[first + b], memory_order_acquire) && !check_block(s, x, slot, b, e)) return false;
  return true;
}

/* Tokens of one file. */
static bool read_file(const struct stream *s, struct index *x, int64_t file, int64_t first, int64_t count, int32_t *ids, struct error *e) {
  const struct tokens_file *f = &x->tokens[file];
  struct slot *slot = &x->slot[file % x->slots];
  unsigned char raw[PIECE];
  const int64_t most = PIECE / f->width;
  pthread_mutex_lock(&slot->mutex);
  bool ok = open_in_slot(x, slot, file, e);
  for (int64_t done = 0; ok && done < count;) {
    const int64_t n = count - done < most ? count - done : most, at = f->data_at + (first + done) * f->width;
    ok = check_bytes(s, x, slot, at, n * f->width, e) && frame_read_at(slot->fd, f->path, raw, n * f->width, at, e) &&
         tokens_decode(f, raw, first + done, n, s->info.vocab_size, ids + done, e);
    done += n;
  }
  pthread_mutex_unlock(&slot->mutex);
  return ok;
}

/* ---- documents ------------------------------------------------------------------ */

/* Document `number`, and in *end where it ends in the stream. */
static bool read_record(const struct stream *s, int64_t number, struct index_record *r, int64_t *end, struct error *e) {
  struct index *x = s->part;
  unsigned char bytes[2 * INDEX_RECORD];
  if (!frame_read(&x->frame, bytes, number * INDEX_RECORD, sizeof bytes, e)) return false;
  struct index_record next;
  index_record_decode(bytes, r);
  index_record_decode(bytes + INDEX_RECORD, &next);
  *end = next.first;
  if (r->first < 0 || next.first <= r->first || next.first > s->info.tokens || r->file < 0 || r->file >= x->header.files || r->place < 0 ||
      next.first - r->first > x->file[r->file].tokens - r->place || x->file[r->file].tokens < r->place)
    return damaged(s, "document", number, e);
  return true;
}

static bool read_document(const struct stream *s, int64_t number, struct stream_document *d, struct error *e) {
  struct index_record r;
  int64_t end;
  if (!read_record(s, number, &r, &end, e)) return false;
  *d = (struct stream_document){.first = r.first, .end = end, .source = ((struct index *)s->part)->file[r.file].source, .number = number};
  return true;
}

static bool read_index(const struct stream *s, int64_t first, int64_t count, int32_t *ids, struct error *e) {
  struct stream_document d;
  if (!stream_document_at(s, first, &d, e)) return false;
  for (int64_t number = d.number, done = 0; done < count; number++) {
    struct index_record r;
    int64_t end;
    if (number >= s->info.documents) return damaged(s, "document", number, e);
    if (!read_record(s, number, &r, &end, e)) return false;
    const int64_t skip = first + done - r.first, left = end - (first + done);
    if (skip < 0 || left < 1) return damaged(s, "document", number, e);
    const int64_t n = count - done < left ? count - done : left;
    if (!read_file(s, s->part, r.file, r.place + skip, n, ids + done, e)) return false;
    done += n;
  }
  return true;
}

/* ---- verification ---------------------------------------------------------------- */

static bool look_at_nothing(void *context, const unsigned char *bytes, int64_t at, int64_t count, struct error *e) {
  (void)context, (void)bytes, (void)at, (void)count, (void)e;
  return true;
}

static bool verify_index(struct stream *s, struct error *e) {
  struct index *x = s->part;
  struct stream_source sum[STREAM_SOURCES] = {0};
  if (!frame_verify(&x->frame, look_at_nothing, NULL, e)) return false;
  int64_t end = 0;
  for (int64_t n = 0; n < s->info.documents; n++) {
    struct index_record r;
    const int64_t before = end;
    if (!read_record(s, n, &r, &end, e)) return false;
    if (r.first != before) return damaged(s, "document", n, e);
    sum[x->file[r.file].source].documents++;
    sum[x->file[r.file].source].tokens += end - r.first;
  }
  if (end != s->info.tokens) return damaged(s, "the number of tokens", end, e);
  for (int i = 0; i < s->info.n_sources; i++)
    if (sum[i].documents != s->info.source[i].documents || sum[i].tokens != s->info.source[i].tokens) return damaged(s, "source", i, e);
  int32_t ids[PIECE];
  for (int64_t i = 0; i < x->header.files; i++)
    for (int64_t at = 0; at < x->file[i].tokens; at += PIECE) {
      const int64_t left = x->file[i].tokens - at;
      if (!read_file(s, x, i, at, left < PIECE ? left : PIECE, ids, e)) return false;
    }
  return true;
}

const struct stream_kind stream_kind_index = {read_index, read_document, verify_index, close_index};

/* ---- is it what is asked for? ------------------------------------------------------ */

static bool same_files(const struct index *x, const struct tokens_list *found, const char *path, struct error *e) {
  for (int64_t i = 0; i < found->count || i < x->header.files; i++) {
    char *now = i < found->count ? found->path[i] : NULL;
    const char *then = i < x->header.files ? x->tokens[i].path : NULL;
    /* A Megatron pair is found by any of its names and known by the .bin. */
    char *bin = now ? tokens_sibling(now, ".idx", ".bin") : NULL;
    const bool same = now && then && (strcmp(now, then) == 0 || (bin && strcmp(bin, then) == 0) || (strncmp(now, then, strlen(now)) == 0 && strcmp(then + strlen(now), ".bin") == 0));
    free(bin);
    if (same) continue;
    error_set(e, ERROR_DATA, "%s was made of %" PRId64 " token files, data.sources has %" PRId64 " now: %s is %s", path, x->header.files, found->count,
              now ? now : then, now ? "new" : "gone");
    return error_hint(e, "`fp4d index CONFIG --force` makes it anew: that is another dataset");
  }
  return true;
}

bool data_index_current(const struct data_index *request, const char *path, struct error *e) {
  struct stream *s = stream_open(path, 0, e);
  if (!s) return false;
  bool ok = true;
  if (s->kind != &stream_kind_index) {
    ok = error_set(e, ERROR_DATA, "%s is a token stream of `fp4d prepare`, not an index", path);
    error_hint(e, "name another file in data.train or data.validation");
  }
  const struct index *x = s->part;
  if (ok && !hash_equal(x->header.settings, index_settings(request))) {
    ok = error_set(e, ERROR_DATA, "%s was made with other data settings (sources, weights, stages, tokens, seed, validation_fraction)", path);
    error_hint(e, "`fp4d index CONFIG --force` makes it anew: that is another dataset");
  }
  struct tokens_list found = {0};
  for (int i = 0; ok && i < request->n_sources; i++) ok = tokens_find(&found, &request->sources[i], e);
  ok = ok && same_files(x, &found, path, e);
  tokens_list_free(&found);
  stream_close(s);
  return ok;
}
