/* Merging the runs of an external sort: a heap of the runs' next records. */
#include <stdlib.h>
#include <string.h>

#include "data/sort_parts.h"
#include "data/stream_file.h"

struct segment {
  struct sort_cursor cursor;
  unsigned char key[SORT_KEY_MOST];
  int64_t bytes; /* of the next record's payload, which the cursor stands before */
};

struct sort_merge {
  int key_bytes;
  struct segment *segment;
  int64_t n_segments;
  int64_t *heap; /* segments that have a record, the smallest key first */
  int64_t n;
  unsigned char key[SORT_KEY_MOST]; /* of the record that was given out */
  unsigned char *payload;
  int64_t room;
};

/* Reads the head of the segment's next record; false also at the end (then *ended). */
static bool advance(const struct sort_merge *m, struct segment *s, bool *ended, struct error *e) {
  *ended = s->cursor.at == s->cursor.end;
  if (*ended) return false;
  unsigned char size[8];
  if (!sort_cursor_take(&s->cursor, s->key, m->key_bytes, e) || !sort_cursor_take(&s->cursor, size, 8, e)) return false;
  s->bytes = (int64_t)load_u64(size);
  return s->bytes >= 0 || error_set(e, ERROR_DATA, "%s is damaged: a record of negative size", s->cursor.run->path);
}

/* Equal keys come in the order of the runs. */
static bool before(const struct sort_merge *m, int64_t a, int64_t b) {
  const int order = memcmp(m->segment[a].key, m->segment[b].key, (size_t)m->key_bytes);
  return order ? order < 0 : a < b;
}

static void sift(struct sort_merge *m, int64_t i) {
  const int64_t moved = m->heap[i];
  for (int64_t child; (child = 2 * i + 1) < m->n; i = child) {
    if (child + 1 < m->n && before(m, m->heap[child + 1], m->heap[child])) child++;
    if (!before(m, m->heap[child], moved)) break;
    m->heap[i] = m->heap[child];
  }
  m->heap[i] = moved;
}

struct sort_merge *sort_merge_of(struct sort_run *run, int64_t n, int key_bytes, int first, int last, int64_t memory,
                                 struct error *e) {
  struct sort_merge *m = calloc(1, sizeof *m);
  if (m) *m = (struct sort_merge){.key_bytes = key_bytes, .n_segments = n};
  if (!m || !(m->segment = calloc((size_t)(n ? n : 1), sizeof *m->segment)) || !(m->heap = calloc((size_t)(n ? n : 1), sizeof *m->heap))) {
    error_set(e, ERROR_SYSTEM, "out of memory merging");
    sort_merge_close(m);
    return NULL;
  }
  for (int64_t i = 0; i < n; i++) {
    bool ended;
    if (!sort_cursor_open(&m->segment[i].cursor, &run[i], (int64_t)run[i].group_at[first], (int64_t)run[i].group_at[last + 1],
                          memory / n, e)) {
      sort_merge_close(m);
      return NULL;
    }
    if (advance(m, &m->segment[i], &ended, e)) {
      m->heap[m->n++] = i;
    } else if (!ended) {
      sort_merge_close(m);
      return NULL;
    }
  }
  for (int64_t i = m->n / 2; i-- > 0;) sift(m, i);
  return m;
}

int sort_merge_next(struct sort_merge *m, struct sort_record *record, struct error *e) {
  if (m->n == 0) return 0;
  struct segment *s = &m->segment[m->heap[0]];
  if (s->bytes > m->room) {
    if (s->bytes > s->cursor.end - s->cursor.at) {
      error_set(e, ERROR_DATA, "%s is damaged: a record passes its end", s->cursor.run->path);
      return -1;
    }
    const int64_t room = s->bytes + s->bytes / 4;
    unsigned char *payload = realloc(m->payload, (size_t)room);
    if (!payload) {
      error_set(e, ERROR_SYSTEM, "out of memory for a record of %lld bytes", (long long)s->bytes);
      return -1;
    }
    m->payload = payload;
    m->room = room;
  }
  memcpy(m->key, s->key, (size_t)m->key_bytes);
  *record = (struct sort_record){m->key, m->payload, s->bytes};
  if (!sort_cursor_take(&s->cursor, m->payload, s->bytes, e)) return -1;
  bool ended;
  if (!advance(m, s, &ended, e)) {
    if (!ended) return -1;
    m->heap[0] = m->heap[--m->n];
  }
  if (m->n > 0) sift(m, 0);
  return 1;
}

void sort_merge_close(struct sort_merge *m) {
  if (!m) return;
  for (int64_t i = 0; m->segment && i < m->n_segments; i++) sort_cursor_close(&m->segment[i].cursor);
  free(m->segment);
  free(m->heap);
  free(m->payload);
  free(m);
}
