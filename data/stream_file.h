/* The file format of a token stream (docs/formats.md, "Token stream"), shared
 * by its writer and its reader. */
#ifndef FP4D_DATA_STREAM_FILE_H
#define FP4D_DATA_STREAM_FILE_H

#include "data/data.h"
#include "data/frame.h"
#include "data/little_endian.h"

#define STREAM_MAGIC "\x89" "FP4DTK\n" /* 8 bytes, no zero stored */
enum { STREAM_VERSION = 2 };

/* What the header says. */
struct stream_header {
  int32_t vocab_size;
  int32_t bos, eos; /* -1: none */
  int n_sources;    /* 1..STREAM_SOURCES */
  int64_t tokens, documents;
  char tokenizer[STREAM_TOKENIZER]; /* zero-terminated, zeros after it */
};

/* Where things lie.  Payload: ids, zeros up to a multiple of 8 bytes,
 * documents + 1 offsets (u64, in tokens), a source (u8) for each document. */
struct stream_layout {
  int token_bytes;     /* 2 when every id fits 16 bits, else 4 */
  int64_t offsets_at;  /* of the document offsets, in the payload */
  int64_t sources_at;  /* of the documents' sources, in the payload */
  int64_t payload;     /* bytes */
};

/* False when the counts are negative or the file would pass 2^63 bytes. */
bool stream_layout_of(const struct stream_header *h, struct stream_layout *l);

void stream_header_encode(const struct stream_header *h, unsigned char bytes[FRAME_HEADER]);

/* Refuses a wrong magic, version, width, block size and counts that no file can
 * have; messages begin with `path`. */
bool stream_header_decode(const char *path, const unsigned char bytes[FRAME_HEADER], struct stream_header *h,
                          struct error *e);

/* A line of the sources' text: NAME, documents and tokens, with tabs between; what comes
 * after a third tab says where the source came from. One line more may say "settings", a tab and
 * how the stream was made. Fills info->source and info->settings from it; refuses other text and
 * counts that do not add up to info->documents and tokens. */
bool stream_sources_decode(const char *path, const char *text, struct stream_info *info, struct error *e);
/* The text; notes[i] (may be NULL, as notes may, and settings) comes last on line i. malloc'ed; NULL: out of memory. */
char *stream_sources_encode(const struct stream_source *source, int n_sources, const char *const *notes, const char *settings);

/* ---- writing ----------------------------------------------------------- */
struct stream_writer; /* opaque */

/* What is known before the first token. */
struct stream_start {
  int32_t vocab_size, bos, eos; /* bos, eos: -1 where documents have none */
  const char *tokenizer;        /* printable ASCII without spaces, below STREAM_TOKENIZER bytes */
  const char *const *names;     /* [n_sources], 1..STREAM_SOURCES of them; below STREAM_NAME bytes */
  int n_sources;
  const char *settings;         /* one line: how the stream is made; NULL: not said. Lives until the writer finishes */
};

/* Starts PATH under a temporary name beside it; removes, and logs, what killed writers
 * of PATH left. NULL with *e filled. */
struct stream_writer *stream_writer_open(const char *path, const struct stream_start *start, struct error *e);
/* The next token begins a document of source number `source`. */
bool stream_writer_document(struct stream_writer *w, int source, struct error *e);
bool stream_writer_tokens(struct stream_writer *w, const int32_t *ids, int64_t count, struct error *e);
int64_t stream_writer_count(const struct stream_writer *w); /* tokens so far */
/* Writes what is left and makes it durable, still under the temporary name. notes[n_sources]:
 * where each source came from, one line without tabs; NULL, or NULL for one: nothing. */
bool stream_writer_finish(struct stream_writer *w, const char *const *notes, struct error *e);
/* Renames the finished file to PATH, durably. */
bool stream_writer_publish(struct stream_writer *w, struct error *e);
/* Frees; removes the temporary file unless it was published. NULL is fine. */
void stream_writer_close(struct stream_writer *w);

#endif
