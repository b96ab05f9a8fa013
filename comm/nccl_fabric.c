#include "comm/nccl_fabric.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static bool joined(const struct gpu_fabric *f) { return f->state == FABRIC_COMPLETED && f->status == 0; }

/* Of a rack of hosts. */
static bool in_rack(const struct gpu_fabric *f) {
  static const uint8_t host[sizeof f->cluster];
  return memcmp(f->cluster, host, sizeof host) != 0;
}

static bool same_clique(const struct gpu_fabric *a, const struct gpu_fabric *b) {
  return a->clique == b->clique && memcmp(a->cluster, b->cluster, sizeof a->cluster) == 0;
}

/* A health mask's troubles, by the first of their two bits. */
static const struct {
  int bit;
  const char *words;
} troubles[] = {{0, "degraded bandwidth"}, {2, "a route being recovered"}, {4, "an unhealthy route"}, {6, "recovery from an access that timed out"}};

static const char *trouble_of(const struct gpu_fabric *f) {
  for (size_t i = 0; i < sizeof troubles / sizeof *troubles; i++)
    if (f->state != FABRIC_NONE && (f->health >> troubles[i].bit & 3) == 1) return troubles[i].words;
  return NULL;
}

__attribute__((format(printf, 2, 3))) static void warn(struct nccl_fabric *out, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(out->warning[out->n++], NCCL_FABRIC_TEXT, format, arguments);
  va_end(arguments);
}

/* " and 3 more", of several, the first of whom has been named. */
static const char *and_more(char text[32], int count) {
  text[0] = 0;
  if (count > 1) snprintf(text, 32, " and %d more", count - 1);
  return text;
}

struct nccl_fabric nccl_fabric(const struct gpu_fabric *gpu, int n, const char *name) {
  struct nccl_fabric out = {.n = 0};
  int in = 0, in_racks = 0, cliques = 0, troubled = 0, first_troubled = -1;
  for (int i = n - 1; i >= 0; i--) {
    const struct gpu_fabric *f = &gpu[i];
    if (trouble_of(f)) troubled++, first_troubled = i;
    in += joined(f);
    if (!joined(f) || !in_rack(f)) continue;
    in_racks++;
    bool new = true;
    for (int other = i + 1; other < n && new; other++) new = !joined(&gpu[other]) || !same_clique(f, &gpu[other]);
    cliques += new;
  }
  if (in == 0) snprintf(out.summary, sizeof out.summary, "no NVLink fabric");
  else if (in_racks == 0) snprintf(out.summary, sizeof out.summary, "%d of %d GPUs in their hosts' NVLink fabric", in, n);
  else snprintf(out.summary, sizeof out.summary, "%d of %d GPUs in a rack's NVLink fabric, %d clique%s", in_racks, n, cliques, cliques == 1 ? "" : "s");

  int outside = 0, first_outside = -1;
  for (int i = n - 1; i >= 0; i--)
    if (in > 0 && (!joined(&gpu[i]) || (in_racks > 0 && !in_rack(&gpu[i])))) outside++, first_outside = i;
  char more[32];
  if (outside > 0) {
    static const char *const states[] = {"it has none", "it has not begun to join", "it is joining", "it ended"};
    const struct gpu_fabric *f = &gpu[first_outside];
    warn(&out, "%s%d%s %s not in the NVLink fabric that others are in (%s, NVML's status %u)%s; see 'Fabric' in nvidia-smi -q", name, first_outside,
         and_more(more, outside), outside > 1 ? "are" : "is", joined(f) ? "it is in its host's alone" : states[f->state & 3], f->status,
         in_racks > 0 ? ": NCCL then goes without NVLink between hosts and does not say so" : "");
  }
  if (troubled > 0)
    warn(&out, "the NVLink fabric tells of %s at %s%d%s (health mask 0x%x): exchanges may be slow, or fail; see 'Fabric' in nvidia-smi -q",
         trouble_of(&gpu[first_troubled]), name, first_troubled, and_more(more, troubled), gpu[first_troubled].health);
  return out;
}
