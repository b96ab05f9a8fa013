/* A sample of the run: its tokens, and what of them the documents decide. */
#include <inttypes.h>
#include <string.h>

#include "data/data.h"

/* Marks what documents decide of the sample that begins at token `first`: a walk over the
 * documents that its seq_len + 1 tokens lie in. */
static bool mark_documents(const struct data_order *o, int64_t first, const struct data_sample *out, struct error *e) {
  const int64_t last = first + o->seq_len; /* the last target */
  struct stream_document d;
  if (!stream_document_at(o->stream, first, &d, e)) return false;
  for (;;) {
    const int64_t begin = d.first > first ? d.first : first, end = d.end <= last ? d.end : last + 1;
    for (int64_t t = begin; out->starts && t < end && t < last; t++) out->starts[t - first] = (int32_t)(begin - first);
    /* Token t is the target of position t - 1. */
    for (int64_t t = begin > first ? begin : first + 1; out->source && t < end; t++) out->source[t - 1 - first] = (uint8_t)d.source;
    if (o->boundary == DATA_BOUNDARY_MASK && d.first > first && d.first <= last) out->targets[d.first - 1 - first] = -1;
    if (d.end > last) return true;
    if (!stream_document(o->stream, d.number + 1, &d, e)) return false;
  }
}

bool data_sample(const struct data_order *o, int64_t index, const struct data_sample *out, struct error *e) {
  if (index < 0) return error_set(e, ERROR_INTERNAL, "sample %" PRId64, index);
  const int64_t s = o->seq_len, position = data_order_position(o, index), first = position * s;
  if (position < 0) {
    error_set(e, ERROR_DATA, "there is no sample %" PRId64 ": data.skip leaves out all that are left", index);
    return error_hint(e, "let the last range of data.skip end sooner");
  }
  bool good = stream_read(o->stream, first, s, out->inputs, e) && stream_read(o->stream, first + s, 1, &out->targets[s - 1], e);
  if (good) {
    memcpy(out->targets, out->inputs + 1, (size_t)(s - 1) * sizeof *out->targets);
    if (out->starts || out->source || o->boundary == DATA_BOUNDARY_MASK) good = mark_documents(o, first, out, e);
  }
  return good || error_context(e, "sample %" PRId64, index);
}

struct hash data_sample_hash(int64_t index, const int32_t *inputs, const int32_t *targets, int64_t seq_len) {
  size_t bytes = (size_t)seq_len * sizeof *inputs;
  struct hash i = hash_bytes(inputs, bytes), t = hash_bytes(targets, bytes);
  uint64_t all[6] = {(uint64_t)index, (uint64_t)seq_len, i.high, i.low, t.high, t.low};
  return hash_bytes(all, sizeof all);
}
