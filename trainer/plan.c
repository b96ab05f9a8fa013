#include "trainer/plan.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/threads.h"
#include "comm/exchange.h"
#include "comm/share.h"
#include "data/loader.h"
#include "trainer/run.h"
#include "trainer/state.h"

/* Seconds a token of a block's linears at a machine's peaks: fprop, and the three contractions. */
static void block_seconds(const struct config *c, const struct machine *m, int layer, double *fprop, double *all) {
  const struct extent x = plan_extent(c);
  *fprop = *all = 0;
  for (int site = 0; site < LINEAR_SITES; site++) {
    const struct linear_shape w = linear_shape(&x, (enum linear_site)site);
    const struct encoding *o = route_linear(&c->route, layer, (enum linear_site)site)->operand;
    const double flops = 2.0 * (double)w.k * (double)w.n, forward = flops / machine_contraction_flops(m, &o[FPROP_X], &o[FPROP_W]);
    *fprop += forward;
    *all += forward + flops / machine_contraction_flops(m, &o[DGRAD_DY], &o[DGRAD_W]) +
            flops / machine_contraction_flops(m, &o[WGRAD_DY], &o[WGRAD_X]);
  }
}

/* Bytes a token that a block's boundaries move to make X again: what its producer reads, and the operand of wgrad. */
static double block_boundary_bytes(const struct config *c, int layer) {
  const struct extent x = plan_extent(c);
  const double element = (double)dtype_bytes(c->route.activations);
  double bytes = 0;
  for (int site = 0; site < LINEAR_SITES; site++) {
    const int64_t k = linear_shape(&x, (enum linear_site)site).k;
    const struct encoding *e = &route_linear(&c->route, layer, (enum linear_site)site)->operand[WGRAD_X];
    if (site == LINEAR_OUT && encoding_is_plain(e)) continue; /* attention's output itself */
    bytes += element * (double)(site == LINEAR_DOWN ? 2 * k : k);
    bytes += (double)(operand_code_bytes(e, k, x.tokens) + operand_scale_bytes(e, k, x.tokens)) / (double)x.tokens;
  }
  return bytes;
}

/* Attention's six products: scores and P V forward; dP, dV, dQ and dK through what dO is. */
static double attention_seconds(const struct config *c, const struct machine *m, double flops) {
  const struct attention_formats f = route_attention(&c->route);
  const enum format formats[] = {f.qk, f.pv, attention_format_plain(f.d_out) ? f.d_out : FORMAT_E4M3};
  static const double products[] = {1, 1, 4};
  double seconds = 0;
  for (int i = 0; i < 3; i++) {
    const struct encoding e = {.format = formats[i]};
    seconds += products[i] / 6 * flops / machine_contraction_flops(m, &e, &e);
  }
  return seconds;
}

bool plan_time(const struct config *c, const struct machine *m, int64_t gpus, struct plan_time *out) {
  const struct model_config *s = &c->model.shape;
  memset(out, 0, sizeof *out);
  const int64_t micro_batches = c->train.global_batch / c->train.local_batch, passes = share_micro_batches_most(micro_batches, gpus);
  if (micro_batches < gpus || (c->train.accumulation > 0 && micro_batches != gpus * c->train.accumulation)) return false;
  const double tokens = (double)(passes * c->train.local_batch * c->train.seq_len);
  for (int layer = 0; layer < (int)s->n_layers; layer++) {
    double fprop, all;
    block_seconds(c, m, layer, &fprop, &all);
    out->linears += tokens * all;
    const enum recompute again = recompute_of_block(c->train.recompute, c->train.recompute_every, layer);
    if (again == RECOMPUTE_ALL) out->recompute += tokens * fprop; /* attention's is left out */
    if (again == RECOMPUTE_BOUNDARIES) out->recompute += tokens * block_boundary_bytes(c, layer) / m->memory_bandwidth;
  }
  const double causal = model_config_flops(s, c->train.seq_len, true);
  const double matmul = 6.0 * (double)model_config_matmul_params(s);
  out->attention = attention_seconds(c, m, tokens * (causal - matmul));
  const struct encoding *h = c->route.head.operand;
  out->head = tokens * 2.0 * (double)(s->vocab_size * s->hidden_size) *
              (1 / machine_contraction_flops(m, &h[FPROP_X], &h[FPROP_W]) + 1 / machine_contraction_flops(m, &h[DGRAD_DY], &h[DGRAD_W]) +
               1 / machine_contraction_flops(m, &h[WGRAD_DY], &h[WGRAD_X]));

  const double n = (double)model_config_param_count(s);
  const double weight = (double)dtype_bytes(c->train.param_dtype), gradient = (double)dtype_bytes(c->train.gradient_dtype);
  out->optimizer = n / (double)gpus * (gradient + 16 + weight + (c->train.master ? 8 : 0)) / m->memory_bandwidth; /* 16: moments; 8: master */
  /* Rings run over every GPU's network adapter, so that a domain's adapters add up. */
  const double rails = m->network_bandwidth * m->domain;
  const double link = gpus <= m->domain || rails > m->link_bandwidth ? m->link_bandwidth : rails;
  const double others = (double)(gpus - 1) / (double)gpus * n / link, sums = others * gradient, copies = others * weight;
  out->reduce = sums + copies;

  const double compute = out->linears + out->attention + out->head + out->recompute;
  /* Of the last micro-batch's backward and of the first's forward, when accumulating. */
  const double pass = compute / (double)passes;
  out->total = compute + fmax(0, sums - pass * 2 / 3) + fmax(0, copies - pass / 3) + out->optimizer;
  out->passes = passes;
  out->tokens_per_second = (double)(c->train.global_batch * c->train.seq_len) / out->total;
  out->mfu = out->tokens_per_second / (double)gpus * causal / m->bf16_flops;
  return true;
}

struct extent plan_extent(const struct config *c) {
  const struct model_config *m = &c->model.shape;
  const int64_t tokens = c->train.local_batch * c->train.seq_len;
  return (struct extent){.tokens = tokens,
                         .head_chunk = c->train.head_chunk > 0 && c->train.head_chunk < tokens ? c->train.head_chunk : tokens,
                         .attention = {c->train.local_batch, c->train.seq_len, m->n_heads, m->n_kv_heads, m->head_dim},
                         .hidden_size = m->hidden_size,
                         .ffn_size = m->ffn_size,
                         .vocab_size = m->vocab_size,
                         .attention_backward = c->route.activations};
}

int64_t plan_largest_tensor(const struct extent *x) {
  int64_t most = 0;
  for (int site = 0; site < LINEAR_SITES; site++) {
    const struct linear_shape w = linear_shape(x, (enum linear_site)site);
    const int64_t n[] = {x->tokens * w.k, x->tokens * w.n, w.n * w.k};
    for (int i = 0; i < 3; i++)
      if (n[i] > most) most = n[i];
  }
  return most;
}

int64_t plan_checkpoint_bytes(const struct config *c) {
  const int64_t weight = c->train.master ? 4 : (int64_t)dtype_bytes(c->train.param_dtype);
  return model_config_param_count(&c->model.shape) * (weight + 8);
}

bool plan_memory(const struct config *c, int threads, int64_t ranks, struct arena *out, int64_t *own, struct error *e) {
  struct device *d = device_open_plan(c->run.backend, threads, e);
  if (!d) return false;
  struct run run = {.config = *c, .device = d, .arena = arena_measure(), .rank = (int)ranks - 1, .world = (int)ranks};
  const bool good = run_lay_out(&run, RUN_TRAIN, e);
  if (good) model_destroy(run.model);
  *out = run.arena;
  *own = d->k->own_bytes + comm_exchange_own_bytes(d, (int)ranks);
  d->k->close(d);
  return good;
}

static void print_bytes(FILE *out, const char *what, double bytes, bool large, const char *note) {
  fprintf(out, "  %-22s %10.3f %s%s%s\n", what, bytes / (large ? 1e9 : 1e6), large ? "GB" : "MB", note[0] ? "   " : "", note);
}

static void print_memory(FILE *out, const struct config *c, const struct arena *arena, int64_t own, int threads, int64_t gpus) {
  const char *const notes[ARENA_CATEGORY_COUNT] = {
      [ARENA_MASTER] = "FP32 master weights",
      [ARENA_GRADIENTS] = c->train.gradient_dtype == DTYPE_BF16 ? "BF16, accumulated" : "FP32, accumulated",
      [ARENA_WEIGHT_OPERANDS] = "weights in the formats of contractions",
      [ARENA_ACTIVATIONS] = "what backward needs of every block",
      [ARENA_TRANSIENT] = "one block's or one boundary's, and the batch",
      [ARENA_HEAD] = "logits of a chunk",
      [ARENA_COMMUNICATION] = "other ranks' gradients on their way into sums",
  };
  static const char *const recompute[] = {
      [RECOMPUTE_NONE] = "none", [RECOMPUTE_BOUNDARIES] = "boundaries", [RECOMPUTE_EVERY_NTH] = "every n-th block", [RECOMPUTE_ALL] = "all"};
  const bool large = arena->used >= 1000000000;
  char scratch[128];
  if (own > 0) snprintf(scratch, sizeof scratch, "of backend %s: cuBLASLt's workspace, partial sums, attention's dS where it is kept", c->run.backend);
  else snprintf(scratch, sizeof scratch, "of backend %s with %d threads", c->run.backend, threads);
  const int64_t ranks = gpus > 0 ? gpus : 1, local = c->train.local_batch, share = share_micro_batches_most(c->train.global_batch / local, ranks) * local;
  char whose[96] = "; of several, each holds its share of moments and master";
  if (ranks > 1) snprintf(whose, sizeof whose, " of %" PRId64 ", its share of moments and master", ranks);
  fprintf(out, "\nmemory of one rank%s: local batch %" PRId64 " x %" PRId64 " tokens, recompute %s\n", whose, c->train.local_batch, c->train.seq_len,
          recompute[c->train.recompute]);
  for (int i = 0; i < ARENA_CATEGORY_COUNT; i++)
    if (arena->by_category[i] > 0)
      print_bytes(out, arena_category_name((enum arena_category)i), (double)arena->by_category[i], large,
                  i == ARENA_SCRATCH ? scratch : notes[i] ? notes[i] : "");
  if (own > 0) print_bytes(out, "CUDA itself", (double)own, large, gpus > 1 ? "context, code of kernels and of cuBLASLt, NCCL's channels" : "context, code of kernels and of cuBLASLt");
  print_bytes(out, "total", (double)arena->used + (double)own, large, "");
  char host[96];
  snprintf(host, sizeof host, "in the host's memory: %d updates of %" PRId64 " sample%s, and the one in use", LOADER_AHEAD, share, share == 1 ? "" : "s");
  print_bytes(out, "samples read ahead", (double)loader_bytes(share, c->train.seq_len, c->data.attention == DATA_ATTENTION_DOCUMENT),
              large, host);
  print_bytes(out, "a checkpoint", (double)plan_checkpoint_bytes(c), large, "of all ranks together, before compression");
  snprintf(scratch, sizeof scratch, "a rank's share of it, of %" PRId64 ", in host memory", ranks);
  print_bytes(out, "checkpoint staging", (double)plan_checkpoint_bytes(c) / (double)ranks, large, scratch);
  if (state_compressing_bytes(c, threads) > 0)
    print_bytes(out, "  compressing", (double)state_compressing_bytes(c, threads), large, "host memory of a rank, while it saves");
}

static void print_peaks(FILE *out, const struct machine *m) {
  fprintf(out, "\n%s: dense BF16 %.5g", m->title, m->bf16_flops / 1e12);
  if (m->fp8_flops > m->bf16_flops) fprintf(out, ", FP8 %.5g", m->fp8_flops / 1e12);
  if (m->fp4_flops > 0) fprintf(out, ", FP4 %.5g", m->fp4_flops / 1e12);
  const char *slower = m->fp4_flops > 0               ? ""
                       : m->fp8_flops > m->bf16_flops ? " (no FP4 units: MXFP4 runs at the FP8 rate, NVFP4 at BF16's)"
                                                      : " (no FP8 or FP4 units: every format at the BF16 rate)";
  fprintf(out, " TFLOP/s%s; %.0f GB at %.3g TB/s\n", slower, m->memory_bytes / 1e9, m->memory_bandwidth / 1e12);
  if (m->domain > 1)
    fprintf(out, "  one way, each GPU: %.0f GB/s among %d, %.0f GB/s beyond\n", m->link_bandwidth / 1e9, m->domain, m->network_bandwidth / 1e9);
}

static void print_times(FILE *out, const struct config *c, const struct machine *m, int64_t n) {
  struct plan_time t;
  if (!plan_time(c, m, n, &t)) {
    const int64_t global = c->train.global_batch, local = c->train.local_batch, accumulation = c->train.accumulation;
    if (global / local < n)
      fprintf(out, "  %5" PRId64 "   train.global_batch %" PRId64 " is less than %" PRId64 " x local batch %" PRId64 "\n", n, global, n, local);
    else
      fprintf(out, "  %5" PRId64 "   train.global_batch %" PRId64 " is not %" PRId64 " x local batch %" PRId64 " x train.accumulation %" PRId64 ": only %" PRId64 " can run\n",
              n, global, n, local, accumulation, global / local / accumulation);
    return;
  }
  fprintf(out, "  %5" PRId64 " %6" PRId64 " %9.1f %9.1f %9.1f", n, t.passes, t.linears * 1e3, t.attention * 1e3, t.head * 1e3);
  if (c->train.recompute != RECOMPUTE_NONE) fprintf(out, " %9.1f", t.recompute * 1e3);
  fprintf(out, " %9.2f %9.2f %9.1f %11.0f %9.0f %8.1f%%\n", t.optimizer * 1e3, t.reduce * 1e3, t.total * 1e3, t.tokens_per_second,
          t.tokens_per_second / (double)n, 100 * t.mfu);
}

static void print_machine(FILE *out, const struct config *c, const struct machine *m, int64_t gpus, double memory) {
  static const int64_t counts[] = {1, 2, 4, 8, 16, 32, 64, 72};
  const double left = m->memory_bytes - memory;
  print_peaks(out, m);
  if (left >= 0)
    fprintf(out, "  a rank's %.1f GB fit, %.1f GB are left\n", memory / 1e9, left / 1e9);
  else
    fprintf(out, "  a rank's %.1f GB DO NOT FIT: %.1f GB too many\n", memory / 1e9, -left / 1e9);
  fprintf(out, "  roofline of one update, milliseconds on each rank\n  %5s %6s %9s %9s %9s", m->domain > 1 ? "GPUs" : "ranks", "passes", "linears", "attention", "head");
  if (c->train.recompute != RECOMPUTE_NONE) fprintf(out, " %9s", "recompute");
  fprintf(out, " %9s %9s %9s %11s %9s %9s\n", "optimizer", "reduce", "total", "tokens/s", "per GPU", "BF16 MFU");
  if (gpus || m->domain == 1)
    print_times(out, c, m, gpus ? gpus : 1);
  else
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) print_times(out, c, m, counts[i]);
}

bool plan_print(FILE *out, const struct config *c, const struct machine *machine, int64_t gpus, struct error *e) {
  const struct model_config *s = &c->model.shape;
  const int threads = c->run.threads > 0 ? (int)c->run.threads : threads_available();
  struct arena arena;
  int64_t own;
  if (!plan_memory(c, threads, gpus > 0 ? gpus : 1, &arena, &own, e)) return false;
  const double memory = (double)arena.used + (double)own;

  const double tokens = (double)(c->train.global_batch * c->train.seq_len);
  fprintf(out, "%s, route %s\n", c->run.name, c->route.name);
  fprintf(out, "  %-22s %14" PRId64 "\n", "parameters", model_config_param_count(s));
  fprintf(out, "  %-22s %14" PRId64 "   contracted with each token (head counted once, embedding look-up not)\n", "  in contractions",
          model_config_matmul_params(s));
  fprintf(out, "  %-22s %14.0f   causal half of attention counted: 6 P + 6 L H d S\n", "FLOPs/token, causal",
          model_config_flops(s, c->train.seq_len, true));
  fprintf(out, "  %-22s %14.0f   full square counted:              6 P + 12 L H d S\n", "FLOPs/token, full",
          model_config_flops(s, c->train.seq_len, false));
  fprintf(out, "  %-22s %14.0f   = %" PRId64 " samples x %" PRId64 "\n", "tokens/update", tokens, c->train.global_batch, c->train.seq_len);
  fprintf(out, "  %-22s %14.3e   in %" PRId64 " updates\n", "tokens in all", tokens * (double)c->train.updates, c->train.updates);

  if (c->data.validation[0] && c->validation.samples > 0)
    fprintf(out, "  %-22s %14.0f   = %" PRId64 " samples x %" PRId64 "\n", "tokens of a validation",
            (double)(c->validation.samples * c->train.seq_len), c->validation.samples, c->train.seq_len);

  print_memory(out, c, &arena, own, threads, gpus);
  if (machine) {
    print_machine(out, c, machine, gpus, memory);
  } else {
    print_machine(out, c, machine_named("gb200"), gpus, memory);
    print_machine(out, c, machine_named("h200"), gpus, memory);
  }
  fprintf(out, "\nThe roofline counts contractions at the dense peak of their formats, attention (causal half) at BF16's, the\n"
               "optimizer's state of a rank read and written once at memory bandwidth, %s gradients summed into their owners' rows\n"
               "and parameters copied to all by rings, hidden behind the last pass' backward and the first one's forward as far as\n"
               "they fit; no element-wise work but what recompute: boundaries does again, at memory bandwidth. `passes` are\n"
               "micro-batches accumulated. MFU is against the BF16 peak, causal convention, so FP4 and FP8 contractions can take it\n"
               "above 100%%. No real run reaches it.\n",
          c->train.gradient_dtype == DTYPE_BF16 ? "BF16" : "FP32");
  return true;
}
