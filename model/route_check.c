/* Does a backend execute a route for these extents?  Everything that stands
 * against it is listed, by blocks, linear and operand. */
#include <stdio.h>
#include <string.h>

#include "kernels/hadamard.h"
#include "model/linears.h"
#include "model/problems.h"

/* One contraction's matrices, for messages and for sums: a linear of a block, or the head. */
struct site {
  const char *name;
  struct linear_shape shape;
  const char *n_axis, *k_axis; /* what the sizes are called; NULL: rows or columns of the operand's source */
  int64_t arm;                 /* > 0: n is two outputs of this width, each with its own outer factors */
};

static bool is_local(const struct encoding *e) { return e->format == FORMAT_NVFP4_LOCAL; }

/* The contraction axis is made of whole blocks and transforms, of 16 elements at least. */
static int contraction_unit(const struct encoding *e) {
  if (encoding_is_plain(e)) return 1;
  return block_size(e->block) == 32 || hadamard_width(e->hadamard) == 32 ? 32 : 16;
}

/* One axis against the size of the groups along it. */
static void check_axis(struct problems *p, const char *where, const struct site *site, const char *axis, int64_t size,
                       int unit) {
  if (unit <= 1 || size % unit == 0) return;
  problems_add(p, "%s: %s: %s %lld %s not a multiple of %d", where, site->name, axis, (long long)size,
               strcmp(axis, "columns") == 0 ? "are" : "is", unit);
}

/* The axes of one operand's source against its groups. */
static void check_sizes(struct problems *p, const char *where, const struct extent *x, const struct site *site,
                        enum operand_role role, const struct encoding *encoding) {
  bool weight = operand_role_tensor(role) == TENSOR_W, gradient = operand_role_tensor(role) == TENSOR_DY;
  int64_t rows = weight ? site->shape.n : x->attention.seq_len, cols = gradient ? site->shape.n : site->shape.k;
  const char *row_axis = !weight ? "seq_len" : site->n_axis ? site->n_axis : "rows";
  const char *col_axis = gradient ? site->n_axis : site->k_axis;
  if (!col_axis) col_axis = "columns";

  /* The axis that is not contracted is made of whole blocks where those are
   * square or the source is transposed in squares. */
  int block = block_size(encoding->block), along = contraction_unit(encoding);
  bool along_rows = operand_role_view(role) == VIEW_COLUMN;
  int across = block_is_2d(encoding->block) || along_rows ? block : 1;
  check_axis(p, where, site, row_axis, rows, along_rows ? along : across);
  check_axis(p, where, site, col_axis, cols, along_rows ? across : along);
  if (site->arm > 0 && is_local(encoding) && (weight || gradient)) {
    /* Strips along n start again with the second arm. */
    bool strips_along_n = weight ? operand_role_view(role) == VIEW_ROW : role == WGRAD_DY;
    int unit = strips_along_n && encoding->strip > 0 ? encoding->strip : block;
    check_axis(p, where, site, "ffn_size", site->arm, unit);
  }
}

/* Both add what the backend cannot do to *refused, beside what is wrong. */
static void check_linear(struct problems *p, int *refused, const struct route *r, const struct linear_route *linear,
                         const char *subject, const struct site *sites, int n_sites, const struct extent *x,
                         const struct device *d) {
  for (int role = 0; role < OPERAND_ROLE_COUNT; role++) {
    const struct encoding *encoding = &linear->operand[role];
    char text[ENCODING_TEXT], where[ENCODING_TEXT + 64];
    (void)snprintf(where, sizeof where, "%s %s %s", subject, operand_role_names[role],
                   encoding_text(encoding, text, (int)sizeof text));
    const char *why = d->k->refuse_encoding(d, encoding, operand_role_view((enum operand_role)role));
    if (why) {
      problems_add(p, "%s: %s (backend %s)", where, why, d->k->backend);
      (*refused)++;
      continue;
    }
    if (encoding_is_plain(encoding)) {
      if (encoding->format != route_plain_format(r))
        problems_add(p, "%s: activations are %s", where, dtype_name(r->activations));
      continue;
    }
    for (int i = 0; i < n_sites; i++) check_sizes(p, where, x, &sites[i], (enum operand_role)role, encoding);
  }
}

static void check_span(struct problems *p, int *refused, const struct route *r, const struct route_span *span,
                       const struct extent *x, const struct device *d) {
  struct site sites[LINEAR_SITES];
  int n = 0;
  char subject[64];
  for (int i = 0; i < LINEAR_SITES; i++)
    if (span->sites >> i & 1u)
      sites[n++] = (struct site){.name = linear_name((enum linear_site)i), .shape = linear_shape(x, (enum linear_site)i),
                                 .arm = linear_arm(x, (enum linear_site)i)};
  (void)snprintf(subject, sizeof subject, "blocks %d-%d", span->first, span->last);
  check_linear(p, refused, r, &span->linear, subject, sites, n, x, d);
}

/* The head contracts head_chunk tokens at a time: groups of tokens lie inside
 * a chunk, and a chunk that draws begins with a sample. */
static void check_head(struct problems *p, int *refused, const struct route *r, const struct extent *x,
                       const struct device *d) {
  const struct site site = {.name = "output", .shape = {x->vocab_size, x->hidden_size}, .n_axis = "vocab_size",
                            .k_axis = "hidden_size"};
  check_linear(p, refused, r, &r->head, "head", &site, 1, x, d);
  if ((r->head.operand[DGRAD_DY].rounding == ROUND_STOCHASTIC || r->head.operand[WGRAD_DY].rounding == ROUND_STOCHASTIC) &&
      x->vocab_size / 16 > UINT32_MAX / x->attention.seq_len)
    problems_add(p, "head: a sample of seq_len %lld has more than 2^32 blocks to draw for", (long long)x->attention.seq_len);
  if (x->head_chunk >= x->tokens) return;
  for (int role = 0; role < OPERAND_ROLE_COUNT; role++) {
    const struct encoding *e = &r->head.operand[role];
    int64_t unit = 1;
    if (operand_role_tensor((enum operand_role)role) != TENSOR_W && operand_role_view((enum operand_role)role) == VIEW_COLUMN)
      unit = contraction_unit(e);
    if (e->rounding == ROUND_STOCHASTIC) unit = x->attention.seq_len;
    if (x->head_chunk % unit != 0)
      problems_add(p, "head %s: head_chunk %lld is not a multiple of %lld", operand_role_names[role],
                   (long long)x->head_chunk, (long long)unit);
  }
}

static void check_tail(struct problems *p, const struct route *r) {
  if (!(r->forward_tail >= 0 && r->forward_tail < 1))
    problems_add(p, "forward_bf16_tail %g: a share of the updates, from 0 to below 1", r->forward_tail);
  else if (r->forward_tail > 0 && r->activations != DTYPE_BF16)
    problems_add(p, "forward_bf16_tail %g: activations are %s", r->forward_tail, dtype_name(r->activations));
}

static void check_extent(struct problems *p, int *refused, const struct route *r, const struct extent *x, const struct device *d) {
  const struct attention_shape *s = &x->attention;
  const char *why = d->k->refuse_extent(d, x, r->activations);
  if (!why) return;
  problems_add(p, "local_batch %lld, seq_len %lld, n_heads %lld, n_kv_heads %lld, head_dim %lld: backend %s does not execute %s", (long long)s->batch,
               (long long)s->seq_len, (long long)s->n_heads, (long long)s->n_kv_heads, (long long)s->head_dim, d->k->backend, why);
  (*refused)++;
}

static void check_attention(struct problems *p, int *refused, const struct route *r, const struct extent *x,
                            const struct device *d) {
  static const char *const part_name[ATTENTION_PARTS] = {"qk", "pv", "do"};
  const struct attention_formats f = route_attention(r);
  const enum format format[ATTENTION_PARTS] = {f.qk, f.pv, f.d_out};
  for (int part = 0; part < ATTENTION_PARTS; part++) {
    const enum format own = format[part];
    if (own == route_plain_format(r)) continue;
    if (attention_format_plain(own) || r->activations != DTYPE_BF16) {
      problems_add(p, "attention %s %s: activations are %s", part_name[part], format_name(own), dtype_name(r->activations));
      continue;
    }
    if (part == ATTENTION_PART_QK && own == FORMAT_NVFP4 && x->attention.head_dim % 16 != 0) { /* blocks of 16 along it */
      problems_add(p, "attention %s %s: head_dim %lld is not a multiple of 16", part_name[part], format_name(own),
                   (long long)x->attention.head_dim);
      continue;
    }
    const char *why = d->k->refuse_attention(d, &f, (enum attention_part)part, &x->attention);
    if (!why) continue;
    problems_add(p, "attention %s %s: %s", part_name[part], format_name(own), why);
    (*refused)++;
  }
}

bool route_check(const struct route *r, int n_layers, const struct extent *x, const struct device *d,
                 struct error *e) {
  struct problems p = {.error = e, .code = ERROR_CONFIG};
  int refused = 0;
  for (int layer = 0; layer < n_layers; layer++) {
    const unsigned without = route_sites_without(r, layer);
    if (without == 0) continue;
    int last = layer;
    char text[LINEAR_SITES_TEXT];
    while (last + 1 < n_layers && route_sites_without(r, last + 1) == without) last++;
    problems_add(&p, "blocks %d-%d have no formats in route %s (%s linears)", layer + 1, last + 1, r->name,
                 linear_sites_text(without, text));
    layer = last;
  }
  for (int i = 0; i < r->n_spans; i++) {
    const struct route_span *span = &r->span[i];
    if (span->last > n_layers)
      problems_add(&p, "blocks %d-%d: the model has %d", span->first, span->last, n_layers);
    check_span(&p, &refused, r, span, x, d);
  }
  check_extent(&p, &refused, r, x, d);
  check_attention(&p, &refused, r, x, d);
  check_head(&p, &refused, r, x, d);
  check_tail(&p, r);
  if (problems_none(&p)) return true;
  if (e && refused == p.found) e->code = ERROR_DEVICE;
  return error_hint(e, "choose another route or other shapes");
}
