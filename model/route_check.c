/* Does a backend execute a route for these extents?  Everything that stands
 * against it is listed, by blocks, linear and operand. */
#include <stdio.h>
#include <string.h>

#include "model/linears.h"
#include "model/problems.h"

static enum view role_view(enum operand_role role) {
  return role == FPROP_X || role == FPROP_W || role == DGRAD_DY ? VIEW_ROW : VIEW_COLUMN;
}

static bool role_is_weight(enum operand_role role) { return role == FPROP_W || role == DGRAD_W; }

static int hadamard_size(enum hadamard h) {
  switch (h) {
    case HADAMARD_PLAIN_16:
    case HADAMARD_SIGNED_16: return 16;
    case HADAMARD_SIGNED_32: return 32;
    case HADAMARD_NONE: break;
  }
  return 1;
}

static enum format plain_format(enum dtype activations) {
  return activations == DTYPE_F32 ? FORMAT_F32 : FORMAT_BF16;
}

/* The axes of one operand's source against its groups. */
static void check_divides(struct problems *p, const char *where, const struct extent *x, enum linear_site site,
                          enum operand_role role, const struct encoding *encoding) {
  struct linear_shape s = linear_shape(x, site);
  bool weight = role_is_weight(role);
  bool gradient = role == DGRAD_DY || role == WGRAD_DY;
  int64_t rows = weight ? s.n : x->attention.seq_len, cols = gradient ? s.n : s.k;
  const char *row_axis = weight ? "rows" : "seq_len";

  int block = block_size(encoding->block), width = hadamard_size(encoding->hadamard);
  int unit = block > width ? block : width;
  bool along_rows = role_view(role) == VIEW_COLUMN;
  if ((along_rows || block_is_2d(encoding->block)) && rows % unit != 0)
    problems_add(p, "%s: %s: %s %lld is not a multiple of %d", where, linear_name(site), row_axis, (long long)rows,
                 unit);
  /* a column view is made of square pieces, so its other axis is whole too */
  if (cols % unit != 0)
    problems_add(p, "%s: %s: columns %lld are not a multiple of %d", where, linear_name(site), (long long)cols, unit);
}

/* Both add what the backend cannot do to *refused, beside what is wrong. */
static void check_span(struct problems *p, int *refused, const struct route *r, const struct route_span *span,
                       const struct extent *x, const struct device *d) {
  for (int role = 0; role < OPERAND_ROLE_COUNT; role++) {
    const struct encoding *encoding = &span->linear.operand[role];
    char text[ENCODING_TEXT], where[ENCODING_TEXT + 64];
    (void)snprintf(where, sizeof where, "blocks %d-%d %s %s", span->first, span->last, operand_role_names[role],
                   encoding_text(encoding, text, (int)sizeof text));
    const char *why = d->k->refuse_encoding(d, encoding, role_view((enum operand_role)role));
    if (why) {
      problems_add(p, "%s: %s (backend %s)", where, why, d->k->backend);
      (*refused)++;
      continue;
    }
    if (encoding_is_plain(encoding)) {
      if (encoding->format != plain_format(r->activations))
        problems_add(p, "%s: activations are %s", where, dtype_name(r->activations));
      continue;
    }
    for (int site = 0; site < LINEAR_SITES; site++)
      check_divides(p, where, x, (enum linear_site)site, (enum operand_role)role, encoding);
  }
}

/* Attention and head work on the activations as they are. */
static void check_unrouted(struct problems *p, int *refused, const struct route *r, const char *what,
                           enum format format) {
  if (format == plain_format(r->activations)) return;
  problems_add(p, "%s %s: executed in the activations' type, %s, alone", what, format_name(format),
               dtype_name(r->activations));
  (*refused)++;
}

bool route_check(const struct route *r, int n_layers, const struct extent *x, const struct device *d,
                 struct error *e) {
  struct problems p = {.error = e, .code = ERROR_CONFIG};
  int refused = 0;
  for (int layer = 0; layer < n_layers; layer++) {
    if (route_linear(r, layer)) continue;
    int last = layer;
    while (last + 1 < n_layers && !route_linear(r, last + 1)) last++;
    problems_add(&p, "blocks %d-%d have no formats in route %s", layer + 1, last + 1, r->name);
    layer = last;
  }
  for (int i = 0; i < r->n_spans; i++) {
    const struct route_span *span = &r->span[i];
    if (span->last > n_layers)
      problems_add(&p, "blocks %d-%d: the model has %d", span->first, span->last, n_layers);
    check_span(&p, &refused, r, span, x, d);
  }
  check_unrouted(&p, &refused, r, "attention qk", r->attention_qk);
  check_unrouted(&p, &refused, r, "attention pv", r->attention_pv);
  check_unrouted(&p, &refused, r, "attention d_out", r->attention_d_out);
  check_unrouted(&p, &refused, r, "head", r->head);
  if (problems_none(&p)) return true;
  if (e && refused == p.found) e->code = ERROR_DEVICE;
  return error_hint(e, "choose another route or other shapes");
}
