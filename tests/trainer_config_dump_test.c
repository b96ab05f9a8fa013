/* A resolved configuration as YAML reads back to the same; text that was damaged crashes nothing. */
#include "tests/config_rig.h"

static struct config other;

/* Every byte of the struct that some row, or the route, accounts for. */
static bool same(const struct config *a, const struct config *b) {
  for (int i = 0; i < option_section_number; i++)
    for (int j = 0; option_sections[i].base == OPTION_OF_CONFIG && j < option_sections[i].n_rows; j++) {
      const struct option *o = &option_sections[i].rows[j];
      if (o->size && memcmp((const char *)a + o->offset, (const char *)b + o->offset, o->size) != 0) {
        printf("# %s.%s differs\n", option_sections[i].name, o->key);
        return false;
      }
    }
  const struct route *r = &a->route, *s = &b->route;
  if (strcmp(r->name, s->name) != 0 || r->n_spans != s->n_spans || r->activations != s->activations ||
      r->forward_tail != s->forward_tail || !same_linear(&r->head, &s->head) ||
      r->attention_qk != s->attention_qk || r->attention_pv != s->attention_pv || r->attention_d_out != s->attention_d_out ||
      r->attention_p_slope != s->attention_p_slope || r->attention_p_offset != s->attention_p_offset ||
      r->attention_d_out_lift != s->attention_d_out_lift)
    return false;
  for (int i = 0; i < r->n_spans; i++) {
    if (r->span[i].first != s->span[i].first || r->span[i].last != s->span[i].last || r->span[i].sites != s->span[i].sites) return false;
    if (!same_linear(&r->span[i].linear, &s->span[i].linear)) return false;
  }
  return memcmp(&a->data, &b->data, sizeof a->data) == 0 && strcmp(a->route_name, b->route_name) == 0;
}

static double odd_double(void) { return (double)(1 + draw(1u << 30)) / (double)(3 + draw(1u << 30)) * 1e-3; }

TEST(round_trip) {
  static const char *const texts[] = {"", "a b", "x: y # z", "\"q\" \\ \\\\", "'", "- [", "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", "true", "null", "&a *b !c"};
  static const char *const schedules[] = {"cosine", "wsd"};
  static const char *const recomputes[] = {"boundaries", "every-nth", "all"};
  const char *const *routes = route_names();
  int n_routes = 0;
  while (routes[n_routes]) n_routes++;
  for (int trial = 0; trial < 300; trial++) {
    char text[40][160];
    const char *sets[40];
    int n = 0;
#define SET(...) snprintf(text[n], sizeof text[n], __VA_ARGS__), sets[n] = text[n], n++
    int64_t local = 1 + (int64_t)draw(9), updates = 100 + (int64_t)draw(1000000);
    SET("train.local_batch=%" PRId64, local);
    SET("train.global_batch=%" PRId64, local * (1 + (int64_t)draw(1000)));
    SET("train.updates=%" PRId64, updates);
    SET("train.recompute=%s", recomputes[draw(3)]);
    SET("train.param_dtype=%s", draw(2) ? "bf16" : "fp32");
    SET("train.gradient_dtype=%s", draw(2) ? "bf16" : "fp32");
    if (draw(2)) SET("train.overfit_one_batch=true");
    SET("run.seed=%" PRIu64, draw(1u << 31) << 32 | draw(1u << 31));
    SET("run.folder=%s", texts[draw(10)]);
    SET("run.name=r%d", trial);
    SET("data.validation=%s", texts[draw(10)]);
    SET("optimizer.schedule=%s", schedules[draw(2)]);
    SET("optimizer.decay_updates=%d", 1 + (int)draw(50));
    SET("optimizer.warmup_updates=%d", (int)draw(50));
    SET("optimizer.lr=%.17g", 1.0 + odd_double());
    SET("optimizer.min_lr=%.17g", odd_double() > 1 ? 0.5 : odd_double() / 1e9);
    SET("optimizer.eps=%.17g", odd_double() / 1e12 + 1e-29);
    SET("optimizer.beta2=%.17g", (double)draw(1u << 31) / 2147483648.0);
    SET("limits.save_s=%.17g", 1 + (double)draw(1u << 31) / 1048576.0);
    SET("log.peak_flops=%.17g", (double)draw(1u << 31) * 1e9);
    SET("divergence.loss=%s", draw(2) ? "skip" : "halt");
    SET("model.preset=llama3.1-8b");
    SET("model.n_layers=%d", 6 + (int)draw(60));
    SET("model.norm_eps=%.17g", odd_double() / 1e6 + 1e-12);
    if (draw(2)) SET("model.rope_scaling=none");
    if (draw(2)) SET("data.sources=a.txt,%s", "some folder/b");
    if (draw(2)) SET("data.skip=%d-%d,%d", (int)draw(9), 9 + (int)draw(9), 18 + (int)draw(100));
    SET("route=%s", routes[draw((uint64_t)n_routes)]);
    SET("fault=nan@%d/1", (int)draw(100));
#undef SET
    if (!parse(GOOD, sets, n)) {
      FAIL("trial %d: %s", trial, failure.message);
      break;
    }
    char *dump = config_dump(&config);
    CHECK(dump != NULL);
    failure = (struct error){0};
    if (!config_parse(&other, dump, "saved", NULL, 0, &failure)) FAIL("%s\n%s", failure.message, dump);
    CHECK(same(&config, &other));
    char *again = config_dump(&other);
    CHECK_STR(again, dump);
    free(again);
    free(dump);
  }
}

/* ---- nothing crashes ------------------------------------------------------------ */

TEST(mutations) {
  static const char *const seeds[] = {
      GOOD "optimizer: {lr: 1e-3, clip: 2}\nroute: mxfp4-row-sr\nfault: nan@7/1\n",
      GOOD "route:\n  name: mine\n  linears:\n" SPAN("1") SPAN("2") "  attention: {qk: bf16, do: e5m2}\n",
      "model:\n  vocab_size: 300\n  hidden_size: 96\n  ffn_size: 256\n  n_layers: 3\n  n_heads: 4\n  rope_scaling:\n"
      "    factor: 8\n    low_freq_factor: 1\n    high_freq_factor: 4\n    original_max_position: 64\n"
      "data: {sources: [a, 'b', \"c\\n\"], train: |\n t\n}\n"};
  static const char *const bits[] = {"*a", "&a ", "!!x ", "{", "}", "[", "]", ": ", "- ", "\n", "\t", "\"", "'", "|", ">",
                                     "%", "#", "---\n", "...\n", "? ", "0", "-", "e", "\xff", "\xe2\x80\xa8", "\x01", ",",
                                     "99999999999999999999", "none", "~", "<<: ", "include: x\n", "\r", "@", "`"};
  int accepted = 0;
  for (int trial = 0; trial < 6000; trial++) {
    static char text[4096];
    snprintf(text, sizeof text, "%s", seeds[draw(3)]);
    for (int edits = 1 + (int)draw(4); edits > 0; edits--) {
      size_t length = strlen(text), at = (size_t)draw(length + 1);
      size_t cut = draw(2) ? (size_t)draw(6) : draw(8) == 0 ? (size_t)draw(60) : 0;
      if (cut > length - at) cut = length - at;
      const char *put_in = draw(4) ? bits[draw(sizeof bits / sizeof *bits)] : "";
      size_t added = strlen(put_in);
      if (length + added + 1 > sizeof text) continue;
      memmove(text + at + added, text + at + cut, length - at - cut + 1);
      memcpy(text + at, put_in, added);
    }
    if (parse(text, NULL, 0)) {
      accepted++;
      char *dump = config_dump(&config);
      if (!config_parse(&other, dump, "saved", NULL, 0, &failure) || !same(&config, &other))
        FAIL("a dump does not read back: %s\n%s", failure.message, text);
      free(dump);
    } else if (failure.code != ERROR_CONFIG || failure.message[0] == 0) {
      FAIL("code %d, \"%s\"", failure.code, failure.message);
    }
    char set[120];
    snprintf(set, sizeof set, "%.100s", text + draw(strlen(text) + 1));
    parse_set(set);
  }
  CHECK(accepted > 100);
}

int main(void) {
  RUN(round_trip);
  RUN(mutations);
  return test_report();
}
