/* Pass 2 of `prepare`: which documents are an earlier one's text again, or nearly so. */
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/log.h"
#include "data/little_endian.h"
#include "data/minhash.h"
#include "data/prepare_parts.h"

/* Marks the document and takes it from what its side has. */
static void drop(struct preparation *p, uint64_t ordinal, const unsigned char *loss, bool near) {
  p->dropped[ordinal / 64] |= (uint64_t)1 << ordinal % 64;
  struct data_prepared_source *s = &p->done->source[loss[1]];
  s->side[loss[0]].documents--;
  s->side[loss[0]].tokens -= (int64_t)load_u64(loss + 2);
  if (near)
    s->near++;
  else
    s->duplicates++;
}

static struct sort_merge *open_group(struct preparation *p, int group, struct error *e) {
  return sort_merge_open(p->sort, group, group, p->memory / 4, e);
}

/* Records of equal texts stand together, the earliest first. */
static bool drop_equal(struct preparation *p, struct error *e) {
  struct sort_merge *m = open_group(p, PREPARE_TEXTS, e);
  struct sort_record record;
  unsigned char before[16];
  bool any = false;
  int more = m ? 1 : -1;
  while (more > 0 && (more = sort_merge_next(m, &record, e)) > 0) {
    const unsigned char *text = record.key + PREPARE_AT_ORDER;
    if (any && memcmp(text, before, sizeof before) == 0) drop(p, prepare_ordinal(record.key), record.payload, false);
    memcpy(before, text, sizeof before);
    any = true;
  }
  sort_merge_close(m);
  return more == 0;
}

/* Signatures of what is left, in order, in a file without a name: n of them. */
static bool spill_signatures(struct preparation *p, FILE *file, int64_t *n, struct error *e) {
  struct sort_merge *m = open_group(p, PREPARE_SIGNATURES, e);
  struct sort_record record;
  int more = m ? 1 : -1;
  while (more > 0 && (more = sort_merge_next(m, &record, e)) > 0) {
    if (prepare_is_dropped(p, prepare_ordinal(record.key))) continue;
    if (fwrite(record.payload + PREPARE_LOSS, sizeof(struct minhash_signature), 1, file) != 1) {
      error_errno(e, ERROR_DATA, "cannot write signatures in %s", p->work);
      more = -1;
    }
    ++*n;
  }
  sort_merge_close(m);
  if (more == 0 && fflush(file) != 0) return error_errno(e, ERROR_DATA, "cannot write signatures in %s", p->work);
  return more == 0;
}

static bool drop_by(struct preparation *p, const uint64_t *survivors, struct error *e) {
  struct sort_merge *m = open_group(p, PREPARE_SIGNATURES, e);
  struct sort_record record;
  int64_t i = 0;
  int more = m ? 1 : -1;
  while (more > 0 && (more = sort_merge_next(m, &record, e)) > 0) {
    const uint64_t ordinal = prepare_ordinal(record.key);
    if (prepare_is_dropped(p, ordinal)) continue;
    if (!(survivors[i / 64] >> i % 64 & 1)) drop(p, ordinal, record.payload, true);
    i++;
  }
  sort_merge_close(m);
  return more == 0;
}

static bool group_signatures(struct preparation *p, FILE *file, int64_t n, uint64_t *survivors, struct error *e) {
  const int64_t bytes = n * (int64_t)sizeof(struct minhash_signature);
  struct threads *t = threads_create(p->threads, e);
  if (!t) return false;
  void *mapped = mmap(NULL, (size_t)bytes, PROT_READ, MAP_PRIVATE, fileno(file), 0);
  struct minhash_groups groups;
  const bool ok = mapped != MAP_FAILED ? minhash_group(mapped, n, p->request->minhash_threshold, t, survivors, &groups, e)
                                       : error_errno(e, ERROR_SYSTEM, "cannot map the signatures in %s", p->work);
  if (mapped != MAP_FAILED) munmap(mapped, (size_t)bytes);
  threads_destroy(t);
  return ok;
}

static bool drop_near(struct preparation *p, struct error *e) {
  char *path = NULL;
  if (asprintf(&path, "%s/signatures", p->work) < 0) return error_set(e, ERROR_SYSTEM, "out of memory");
  FILE *file = fopen(path, "w+be");
  bool ok = file || error_errno(e, ERROR_DATA, "cannot create %s", path);
  if (file) unlink(path);
  free(path);
  int64_t n = 0;
  ok = ok && spill_signatures(p, file, &n, e);
  const int64_t need = minhash_group_bytes(n) + n / 8;
  if (ok && need > p->memory) {
    error_set(e, ERROR_DATA, "data.dedup: minhash needs %" PRId64 " bytes for %" PRId64 " documents", need, n);
    ok = error_hint(e, "raise data.prepare_memory to as much: what is read already is kept");
  }
  uint64_t *survivors = ok ? calloc((size_t)(n / 64 + 1), sizeof *survivors) : NULL;
  if (ok && !survivors) ok = error_set(e, ERROR_SYSTEM, "out of memory for %" PRId64 " documents", n);
  ok = ok && (n == 0 || (group_signatures(p, file, n, survivors, e) && drop_by(p, survivors, e)));
  free(survivors);
  if (file) fclose(file);
  return ok;
}

bool prepare_drop(struct preparation *p, struct error *e) {
  const enum data_dedup dedup = p->request->dedup;
  for (int i = 0; i < p->request->n_sources; i++) p->done->source[i] = p->state.source[i];
  if (dedup == DATA_DEDUP_NONE) return true;
  p->dropped = calloc((size_t)(p->state.ordinal / 64 + 1), sizeof *p->dropped);
  if (!p->dropped) return error_set(e, ERROR_SYSTEM, "out of memory for %" PRId64 " documents", p->state.ordinal);
  if (!p->request->quiet) log_info("looking for duplicates among %" PRId64 " documents", p->state.ordinal);
  return drop_equal(p, e) && (dedup != DATA_DEDUP_MINHASH || drop_near(p, e));
}
