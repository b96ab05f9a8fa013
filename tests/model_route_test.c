/* Routes: words to encodings, the ledger's rows, spans, refusals. */
#include "tests/test.h"

#include "model/linears.h"

static struct error e;

static const char *parsed(const char *words, enum operand_role role) {
  static char text[ENCODING_TEXT];
  struct encoding encoding;
  if (!encoding_parse(words, role, &encoding, &e)) return "refused";
  return encoding_text(&encoding, text, (int)sizeof text);
}

TEST(words) {
  CHECK_STR(parsed("bf16", FPROP_X), "bf16");
  CHECK_STR(parsed("fp32", FPROP_W), "fp32");
  CHECK_STR(parsed("mxfp4", FPROP_X), "mxfp4/1x32/encode");
  CHECK_STR(parsed("mxfp4", FPROP_W), "mxfp4/2d32/adaptive");
  CHECK_STR(parsed("mxfp4/1x32", FPROP_W), "mxfp4/1x32/encode");
  CHECK_STR(parsed("mxfp4/2d32/floor", FPROP_W), "mxfp4/2d32/floor");
  CHECK_STR(parsed("mxfp4/floor", WGRAD_X), "mxfp4/1x32/floor");
  CHECK_STR(parsed("mxfp4/sr", DGRAD_DY), "mxfp4/1x32/encode/sr");
  CHECK_STR(parsed("mxfp4/1x32/decode/sr", WGRAD_DY), "mxfp4/1x32/decode/sr");
  CHECK_STR(parsed("nvfp4", WGRAD_X), "nvfp4/1x16/tensor");
  CHECK_STR(parsed("nvfp4", DGRAD_W), "nvfp4/2d16/tensor");
  CHECK_STR(parsed("nvfp4-local", FPROP_X), "nvfp4-local/1x16/faithful/strip256");
  CHECK_STR(parsed("nvfp4-local/2d16/pow2", FPROP_W), "nvfp4-local/2d16/pow2");
  CHECK_STR(parsed("fp8", FPROP_X), "e4m3/tensor");
  CHECK_STR(parsed("e5m2", DGRAD_DY), "e5m2/tensor");
  CHECK_STR(parsed("e5m2/row", WGRAD_DY), "e5m2/row");
  CHECK_STR(parsed("nvfp4/4over6", FPROP_X), "nvfp4/1x16/4over6");
  CHECK_STR(parsed("nvfp4/2d16/4over6", FPROP_W), "nvfp4/2d16/4over6");
  CHECK_STR(parsed("nvfp4/sr", WGRAD_DY), "nvfp4/1x16/tensor/sr");
  CHECK_STR(parsed("nvfp4-local/pow2/strip128/sr", DGRAD_DY), "nvfp4-local/1x16/pow2/strip128/sr");
  CHECK_STR(parsed("nvfp4-local/1x16", FPROP_W), "nvfp4-local/1x16/faithful"); /* a weight: one outer factor */
  CHECK_STR(parsed("nvfp4-local/1x16/strip384", FPROP_W), "nvfp4-local/1x16/faithful/strip384");
  CHECK_STR(parsed("mxfp4/sr/signed-32", WGRAD_DY), "mxfp4/1x32/encode/sr/signed-32");
  CHECK_STR(parsed("e4m3/signed-16", WGRAD_X), "e4m3/tensor/signed-16");
}

TEST(bad_words) {
  const char *const bad[] = {"",          "mxfp5",        "MXFP4",          "mxfp4/",          "mxfp4/1x16",
                             "nvfp4/1x32", "nvfp4/2d32",  "bf16/1x32",      "bf16/encode",     "mxfp4/tensor",
                             "nvfp4/pow2", "nvfp4/encode", "mxfp4/encode/1x32", "mxfp4/1x32/2d32", "mxfp4/encode/floor",
                             "/sr",       "mxfp4//sr",    "same",           "mxfp4/sr/sr",     "mxfp4/sr/1x32", "bf16/sr",
                             "e4m3/sr", "e4m3/encode", "e5m2/1x16", "nvfp4/row", "mxfp4/4over6", "mxfp4/strip256",
                             "nvfp4/strip256", "nvfp4-local/strip0", "nvfp4-local/strip", "nvfp4-local/strip-16",
                             "nvfp4-local/strip64", "nvfp4-local/strip65664", "nvfp4-local/strip256x", "nvfp4-local/strip0256",
                             "nvfp4-local/strip99999999999", "nvfp4-local/sr/strip256", "nvfp4-local/strip256/pow2",
                             "nvfp4-local/strip256/strip256", "nvfp4-local/2d16", "nvfp4-local/2d16/strip256",
                             "mxfp4/signed-32", "mxfp4/none", "bf16/signed-16", "nvfp4/signed-16/sr",
                             "mxfp4/1x32/encode/sr/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
                             "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"};
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    struct encoding out;
    if (encoding_parse(bad[i], DGRAD_DY, &out, &e)) FAIL("\"%s\" was taken", bad[i]);
    CHECK_EQ_I64(e.code, ERROR_CONFIG);
    CHECK(e.message[0]);
  }
  /* only wgrad operands are transformed, and quantised ones */
  CHECK_STR(parsed("mxfp4/signed-32", FPROP_X), "refused");
  CHECK_STR(parsed("bf16/signed-16", WGRAD_X), "refused");
  CHECK_STR(parsed("mxfp4/signed-32/sr", WGRAD_DY), "refused");
  /* only dY draws */
  CHECK_STR(parsed("mxfp4/sr", FPROP_X), "refused");
  CHECK_STR(parsed("mxfp4/sr", FPROP_W), "refused");
  CHECK_STR(parsed("mxfp4/sr", WGRAD_X), "refused");
}

/* Every encoding that the words can say, printed, reads back to itself; and what
 * the words cannot say is not read as something else. */
TEST(round_trip) {
  static const enum format formats[] = {FORMAT_F32, FORMAT_BF16, FORMAT_E4M3, FORMAT_E5M2, FORMAT_MXFP4, FORMAT_NVFP4, FORMAT_NVFP4_LOCAL};
  int legal[7] = {0};
  for (int role = 0; role < OPERAND_ROLE_COUNT; role++)
    for (int f = 0; f < 7; f++)
      for (int block = BLOCK_NONE; block <= BLOCK_2D32; block++)
        for (int scale = SCALE_NONE; scale <= SCALE_TENSOR_4OVER6; scale++)
          for (int sr = 0; sr < 2; sr++)
            for (int h = HADAMARD_NONE; h <= HADAMARD_SIGNED_32; h++)
              for (int32_t strip = 0; strip <= 65536; strip = strip ? strip * 8 : 128) {
                struct encoding one = {.format = formats[f], .block = (enum block_geometry)block, .scale = (enum scale_rule)scale,
                                       .rounding = sr ? ROUND_STOCHASTIC : ROUND_NEAREST, .hadamard = (enum hadamard)h,
                                       .strip = strip}, again;
                char text[ENCODING_TEXT], twice[ENCODING_TEXT];
                if (!encoding_parse(encoding_text(&one, text, (int)sizeof text), (enum operand_role)role, &again, &e)) continue;
                CHECK_STR(encoding_text(&again, twice, (int)sizeof twice), twice);
                /* a default that is left out of the text may not change what it says */
                bool said = block != BLOCK_NONE && scale != SCALE_NONE && (strip > 0 || one.format != FORMAT_NVFP4_LOCAL);
                if (said && !encoding_equal(&one, &again)) FAIL("%s reads as %s", text, twice);
                struct encoding third;
                CHECK(encoding_parse(twice, (enum operand_role)role, &third, &e) && encoding_equal(&again, &third));
                if (encoding_equal(&one, &again)) legal[f]++;
              }
  /* plain: 6 roles. FP8: 2 rules, of 2 wgrad roles 4 transforms. MXFP4: 2 blocks, 4 rules; sr doubles dY. */
  CHECK_EQ_I64(legal[0], 6);
  CHECK_EQ_I64(legal[1], 6);
  CHECK_EQ_I64(legal[2], 2 * (4 + 2 * 4));
  CHECK_EQ_I64(legal[3], 2 * (4 + 2 * 4));
  CHECK_EQ_I64(legal[4], 8 * (3 + 2 + 2 * 4 + 4));
  CHECK_EQ_I64(legal[5], 4 * (3 + 2 + 2 * 4 + 4));
  /* strips 128, 1024, 8192, 65536 in 1x16 blocks; weights also none, and tiles */
  CHECK_EQ_I64(legal[6], 2 * (4 * (3 + 2 + 2 * 4 + 4) + 2 * 1 + 2 * 1));
}

/* The ledger, written out: fprop x, fprop w, dgrad dy, dgrad w, wgrad dy, wgrad x. */
struct expected {
  const char *name;
  int layer; /* 0-based, of 32 */
  const char *operand[OPERAND_ROLE_COUNT];
};

#define ALL(F) {F, F, F, F, F, F}

static const struct expected ledger[] = {
    {"fp32", 0, ALL("fp32")},
    {"bf16", 31, ALL("bf16")},
    {"te-native", 31,
     {"nvfp4/1x16/tensor", "nvfp4/2d16/tensor", "nvfp4/1x16/tensor/sr", "nvfp4/2d16/tensor",
      "nvfp4/1x16/tensor/sr/signed-16", "nvfp4/1x16/tensor/signed-16"}},
    {"te-last4-bf16", 27,
     {"nvfp4/1x16/tensor", "nvfp4/2d16/tensor", "nvfp4/1x16/tensor/sr", "nvfp4/2d16/tensor",
      "nvfp4/1x16/tensor/sr/signed-16", "nvfp4/1x16/tensor/signed-16"}},
    {"te-last4-bf16", 28, ALL("bf16")},
    {"nvfp4-global", 5,
     {"nvfp4/1x16/tensor", "nvfp4/2d16/tensor", "nvfp4/1x16/tensor/sr", "nvfp4/2d16/tensor", "nvfp4/1x16/tensor",
      "nvfp4/1x16/tensor"}},
    {"mxfp4-row-sr", 0,
     {"mxfp4/1x32/encode", "mxfp4/2d32/adaptive", "mxfp4/1x32/encode/sr", "mxfp4/2d32/adaptive", "mxfp4/1x32/encode",
      "mxfp4/1x32/encode"}},
    {"nvfp4-local", 0,
     {"nvfp4-local/1x16/faithful/strip256", "nvfp4-local/2d16/faithful", "nvfp4-local/1x16/faithful/strip256/sr",
      "nvfp4-local/2d16/faithful", "nvfp4-local/1x16/faithful/strip256", "nvfp4-local/1x16/faithful/strip256"}},
    {"nvfp4-local-h16", 0,
     {"nvfp4-local/1x16/faithful/strip256", "nvfp4-local/2d16/faithful", "nvfp4-local/1x16/faithful/strip256/sr",
      "nvfp4-local/2d16/faithful", "nvfp4-local/1x16/faithful/strip256/signed-16", "nvfp4-local/1x16/faithful/strip256/signed-16"}},
    {"depth-27-5", 26,
     {"nvfp4-local/1x16/faithful/strip256", "nvfp4-local/2d16/faithful", "nvfp4-local/1x16/faithful/strip256/sr",
      "nvfp4-local/2d16/faithful", "nvfp4-local/1x16/faithful/strip256", "nvfp4-local/1x16/faithful/strip256"}},
    {"depth-27-5", 27,
     {"mxfp4/1x32/encode", "mxfp4/2d32/adaptive", "mxfp4/1x32/encode/sr", "mxfp4/2d32/adaptive", "mxfp4/1x32/encode",
      "mxfp4/1x32/encode"}},
    {"mxfp4-row-sr-h32", 0,
     {"mxfp4/1x32/encode", "mxfp4/2d32/adaptive", "mxfp4/1x32/encode/sr", "mxfp4/2d32/adaptive",
      "mxfp4/1x32/encode/signed-32", "mxfp4/1x32/encode/signed-32"}},
    {"operand-hybrid-h16", 0,
     {"mxfp4/1x32/encode", "mxfp4/2d32/adaptive", "nvfp4-local/1x16/faithful/strip256/sr", "nvfp4-local/2d16/faithful",
      "mxfp4/1x32/encode/plain-16", "mxfp4/1x32/encode/plain-16"}},
    {"fp8", 0, {"e4m3/tensor", "e4m3/tensor", "e5m2/tensor", "e4m3/tensor", "e5m2/tensor", "e4m3/tensor"}},
    {"nvfp4-te/forward-bf16-tail", 31,
     {"nvfp4/1x16/tensor", "nvfp4/2d16/tensor", "nvfp4/1x16/tensor/sr", "nvfp4/2d16/tensor",
      "nvfp4/1x16/tensor/sr/signed-16", "nvfp4/1x16/tensor/signed-16"}},
    {"nvfp4-local-pow2", 31,
     {"nvfp4-local/1x16/pow2/strip256", "nvfp4-local/2d16/pow2", "nvfp4-local/1x16/pow2/strip256/sr", "nvfp4-local/2d16/pow2",
      "nvfp4-local/1x16/pow2/strip256", "nvfp4-local/1x16/pow2/strip256"}},
    {"nvfp4-local-pow2-h16", 31,
     {"nvfp4-local/1x16/pow2/strip256", "nvfp4-local/2d16/pow2", "nvfp4-local/1x16/pow2/strip256/sr", "nvfp4-local/2d16/pow2",
      "nvfp4-local/1x16/pow2/strip256/signed-16", "nvfp4-local/1x16/pow2/strip256/signed-16"}},
    {"attention-fp8", 0, {"bf16", "bf16", "bf16", "bf16", "bf16", "bf16"}},
    {"attention-mxfp4", 0, {"bf16", "bf16", "bf16", "bf16", "bf16", "bf16"}},
    {"attention-fp8-proj-e4m3", 0, {"e4m3/tensor", "e4m3/tensor", "bf16", "bf16", "bf16", "bf16"}},
    {"attention-mxfp4-proj-e4m3", 31, {"e4m3/tensor", "e4m3/tensor", "bf16", "bf16", "bf16", "bf16"}},
    {"attention-fp8-proj-nvfp4", 31,
     {"nvfp4/1x16/tensor", "nvfp4/2d16/tensor", "nvfp4/1x16/tensor", "nvfp4/2d16/tensor", "bf16", "bf16"}},
    {"attention-mxfp4-proj-nvfp4", 0,
     {"nvfp4/1x16/tensor", "nvfp4/2d16/tensor", "nvfp4/1x16/tensor", "nvfp4/2d16/tensor", "bf16", "bf16"}},
    {"operand-hybrid-h32", 0,
     {"mxfp4/1x32/encode", "mxfp4/2d32/adaptive", "nvfp4-local/1x16/faithful/strip256/sr", "nvfp4-local/2d16/faithful",
      "mxfp4/1x32/encode/signed-32", "mxfp4/1x32/encode/signed-32"}},
};

TEST(ledger_rows) {
  int named = 0;
  for (const char *const *name = route_names(); *name; name++) {
    bool expected = false;
    for (size_t i = 0; i < sizeof ledger / sizeof ledger[0]; i++) expected |= strcmp(ledger[i].name, *name) == 0;
    if (!expected) FAIL("no expectation for %s", *name);
    named++;
  }
  CHECK_EQ_I64(named, 22); /* the eleven, fp32, fp8, the forward tail, two in powers of two, six of attention */
  for (size_t i = 0; i < sizeof ledger / sizeof ledger[0]; i++) {
    struct route r;
    if (!route_named(ledger[i].name, 32, &r, &e)) {
      FAIL("%s: %s", ledger[i].name, e.message);
      continue;
    }
    CHECK_STR(r.name, ledger[i].name);
    bool wide = strcmp(r.name, "fp32") == 0;
    CHECK(r.activations == (wide ? DTYPE_F32 : DTYPE_BF16));
    enum format plain = wide ? FORMAT_F32 : FORMAT_BF16;
    const char *attention = strncmp(r.name, "attention-", 10) == 0 ? r.name + 10 : NULL;
    CHECK(route_plain_format(&r) == plain && r.attention_qk == (attention ? FORMAT_NVFP4 : plain));
    CHECK(r.attention_pv == (!attention ? plain : strncmp(attention, "fp8", 3) == 0 ? FORMAT_E4M3 : FORMAT_MXFP4));
    CHECK(r.attention_d_out == (attention ? FORMAT_E5M2 : plain));
    for (int role = 0; role < OPERAND_ROLE_COUNT; role++) CHECK(r.head.operand[role].format == plain);
    CHECK(r.forward_tail == (strcmp(r.name, "nvfp4-te/forward-bf16-tail") == 0 ? 0.1 : 0));
    const struct linear_route *linear = route_linear(&r, ledger[i].layer, LINEAR_QKV);
    const struct linear_route *ffn = route_linear(&r, ledger[i].layer, LINEAR_DOWN);
    CHECK(route_linear(&r, ledger[i].layer, LINEAR_OUT) == linear && route_linear(&r, ledger[i].layer, LINEAR_GATE_UP) == ffn);
    for (int role = 0; role < OPERAND_ROLE_COUNT; role++)
      CHECK(encoding_equal(&ffn->operand[role], attention ? &r.head.operand[role] : &linear->operand[role]));
    for (int role = 0; role < OPERAND_ROLE_COUNT; role++) {
      char text[ENCODING_TEXT];
      encoding_text(&linear->operand[role], text, (int)sizeof text);
      if (strcmp(text, ledger[i].operand[role]) != 0)
        FAIL("%s block %d %s: %s, expected %s", r.name, ledger[i].layer + 1, operand_role_names[role], text,
             ledger[i].operand[role]);
    }
  }
  struct route r;
  CHECK(!route_named("mxfp4", 32, &r, &e));
  CHECK(strstr(e.message, "mxfp4-row-sr-h32"));
  CHECK(!route_named("te-last4-bf16", 4, &r, &e)); /* nothing left for NVFP4 */
  CHECK(strstr(e.message, "te-last4-bf16"));
  CHECK(route_named("te-last4-bf16", 5, &r, &e));
}

static struct route_words words_of(const char *layers) {
  return (struct route_words){layers, "mxfp4", "mxfp4/2d32", "mxfp4/sr", "same", "mxfp4", "mxfp4", "none", NULL};
}

TEST(spans) {
  const struct {
    const char *layers;
    int first, last; /* 0: refused */
  } cases[] = {{"all", 1, 12},   {"3", 3, 3},       {"1-12", 1, 12},   {"2-5", 2, 5},  {"last-4", 9, 12},
               {"last-12", 1, 12}, {"all-but-last-4", 1, 8}, {"last-13", 0, 0}, {"last-0", 0, 0}, {"0-3", 0, 0},
               {"5-2", 0, 0},    {"1-13", 0, 0},    {"", 0, 0},        {"1-", 0, 0},   {"-3", 0, 0},
               {"1-2-3", 0, 0},  {"last", 0, 0},    {"last-", 0, 0},   {"all-but-last-12", 0, 0},
               {"99999999999999999999", 0, 0}, {"1 - 2", 0, 0}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    struct route r = {0};
    struct route_words w = words_of(cases[i].layers);
    bool taken = route_add_span(&r, &w, 12, &e);
    if (taken != (cases[i].first > 0)) {
      FAIL("layers \"%s\": %s", cases[i].layers, taken ? "taken" : e.message);
    } else if (taken) {
      CHECK_EQ_I64(r.span[0].first, cases[i].first);
      CHECK_EQ_I64(r.span[0].last, cases[i].last);
    }
  }

  struct route r = {0};
  struct route_words w = words_of("1-6");
  CHECK(route_add_span(&r, &w, 12, &e));
  w.layers = "6-7";
  CHECK(!route_add_span(&r, &w, 12, &e));
  CHECK(strstr(e.message, "1-6"));
  w.layers = "8-12";
  CHECK(route_add_span(&r, &w, 12, &e));
  CHECK(route_linear(&r, 5, LINEAR_OUT) == &r.span[0].linear);
  CHECK(route_linear(&r, 6, LINEAR_QKV) == NULL);
  CHECK(route_linear(&r, 7, LINEAR_DOWN) == &r.span[1].linear);

  /* linears of a block apart */
  static const struct {
    const char *sites;
    unsigned bits; /* 0: refused */
  } words[] = {{"all", 15}, {NULL, 15}, {"attention", 3}, {"ffn", 12}, {"qkv", 1}, {"out", 2}, {"gate_up", 4}, {"down", 8},
               {"", 0},     {"wq", 0},  {"attention ", 0}, {"ALL", 0}};
  for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
    char text[LINEAR_SITES_TEXT];
    memset(&r, 0, sizeof r);
    w = words_of("all");
    w.sites = words[i].sites;
    CHECK(route_add_span(&r, &w, 12, &e) == (words[i].bits != 0));
    CHECK_EQ_I64(r.span[0].sites, words[i].bits);
    if (words[i].bits) CHECK_STR(linear_sites_text(r.span[0].sites, text), words[i].sites ? words[i].sites : "all");
    for (int site = 0; site < LINEAR_SITES; site++)
      CHECK((route_linear(&r, 3, (enum linear_site)site) != NULL) == (words[i].bits >> site & 1u));
    CHECK_EQ_I64(route_sites_without(&r, 11), 15 & ~words[i].bits);
  }
  char text[LINEAR_SITES_TEXT];
  CHECK_STR(linear_sites_text(1 | 4 | 8, text), "qkv, gate_up, down");
  memset(&r, 0, sizeof r);
  w = words_of("1-6");
  w.sites = "attention";
  CHECK(route_add_span(&r, &w, 12, &e));
  w.sites = "ffn";
  CHECK(route_add_span(&r, &w, 12, &e));
  w.sites = "out";
  CHECK(!route_add_span(&r, &w, 12, &e));
  CHECK(strstr(e.message, "overlap the span of blocks 1-6 (out linears)"));
  w.layers = "7-12";
  CHECK(route_add_span(&r, &w, 12, &e));
  CHECK_EQ_I64(route_sites_without(&r, 6), 13);

  memset(&r, 0, sizeof r);
  w = words_of("all");
  w.hadamard = "signed-64";
  CHECK(!route_add_span(&r, &w, 12, &e));
  w.hadamard = "signed-32";
  w.wgrad_x = "bf16";
  CHECK(!route_add_span(&r, &w, 12, &e));
  w = words_of("all");
  w.fprop_x = NULL;
  CHECK(!route_add_span(&r, &w, 12, &e));
  w = words_of("all");
  w.fprop_w = "same";
  CHECK(!route_add_span(&r, &w, 12, &e));
  w = words_of(NULL);
  CHECK(!route_add_span(&r, &w, 12, &e));
  CHECK_EQ_I64(r.n_spans, 0);

  memset(&r, 0, sizeof r);
  for (int i = 0; i < ROUTE_SPANS + 1; i++) {
    char layers[16];
    snprintf(layers, sizeof layers, "%d", i + 1);
    w = words_of(layers);
    CHECK(route_add_span(&r, &w, 32, &e) == (i < ROUTE_SPANS));
  }
}

/* A backend that knows plain formats and MXFP4 without transforms. */
static const char *refuse(const struct device *d, const struct encoding *encoding, enum view view) {
  (void)view;
  (void)d;
  if (encoding->hadamard != HADAMARD_NONE) return "no Hadamard transform here";
  if (encoding_is_plain(encoding) || encoding->format == FORMAT_MXFP4) return NULL;
  return "only bf16 and mxfp4 here";
}

static const char *take_all(const struct device *d, const struct encoding *encoding, enum view view) {
  (void)d;
  (void)encoding;
  (void)view;
  return NULL;
}

static struct extent extent_of(int64_t seq_len, int64_t hidden) {
  return (struct extent){.tokens = 2 * seq_len,
                         .head_chunk = seq_len,
                         .attention = {2, seq_len, 4, 2, 32},
                         .hidden_size = hidden,
                         .ffn_size = 352,
                         .vocab_size = 258};
}

static int lines(const char *text) {
  int n = 1;
  for (; *text; text++) n += *text == '\n';
  return n;
}

static const char *refuse_attention(const struct device *d, const struct attention_formats *f, enum attention_part part,
                                    const struct attention_shape *s) {
  (void)d, (void)s;
  return part == ATTENTION_PART_PV && f->pv == FORMAT_E4M3 ? "no such codes here" : NULL;
}

static const char *refuse_extent(const struct device *d, const struct extent *x, enum dtype activations) {
  (void)d;
  return x->attention.head_dim == 48 && activations == DTYPE_BF16 ? "a head_dim of 48" : NULL;
}

TEST(refusals) {
  const struct kernels k = {.backend = "test", .refuse_encoding = refuse, .refuse_attention = refuse_attention, .refuse_extent = refuse_extent};
  const struct device d = {.k = &k};
  struct extent x = extent_of(64, 128);
  struct route r;

  const char *const taken[] = {"fp32", "bf16", "mxfp4-row-sr", "attention-mxfp4"};
  for (const char *const *name = route_names(); *name; name++) {
    bool expected = false;
    for (int i = 0; i < 4; i++) expected |= strcmp(*name, taken[i]) == 0;
    CHECK(route_named(*name, 8, &r, &e));
    if (route_check(&r, 8, &x, &d, &e) != expected) FAIL("%s: %s", *name, expected ? e.message : "not refused");
  }
  route_named("operand-hybrid-h32", 8, &r, &e);
  CHECK(!route_check(&r, 8, &x, &d, &e));
  CHECK_EQ_I64(e.code, ERROR_DEVICE); /* nothing is wrong with it */
  CHECK_EQ_I64(lines(e.message), 4); /* dgrad dy, dgrad w; both wgrad operands */
  CHECK(strstr(e.message, "blocks 1-8 dgrad dy nvfp4-local/1x16/faithful/strip256/sr: only bf16 and mxfp4 here"));
  CHECK(strstr(e.message, "no Hadamard transform here (backend test)"));

  /* token axis and widths */
  route_named("mxfp4-row-sr", 8, &r, &e);
  x = extent_of(48, 128);
  CHECK(!route_check(&r, 8, &x, &d, &e)); /* batch 2: 96 tokens, but blocks would mix samples */
  CHECK(strstr(e.message, "wgrad dy mxfp4/1x32/encode: qkv: seq_len 48 is not a multiple of 32"));
  CHECK_EQ_I64(lines(e.message), 8);
  CHECK_EQ_I64(e.code, ERROR_CONFIG);
  route_named("depth-27-5", 28, &r, &e); /* some of both */
  CHECK(!route_check(&r, 28, &x, &d, &e));
  CHECK_EQ_I64(e.code, ERROR_CONFIG);
  route_named("mxfp4-row-sr", 8, &r, &e);
  x = extent_of(64, 144);
  CHECK(!route_check(&r, 8, &x, &d, &e));
  CHECK(strstr(e.message, "fprop x mxfp4/1x32/encode: qkv: columns 144"));
  CHECK(strstr(e.message, "dgrad w mxfp4/2d32/adaptive: out: rows 144"));
  route_named("bf16", 8, &r, &e);
  CHECK(route_check(&r, 8, &x, &d, &e));

  x.attention.batch = 2, x.attention.head_dim = 48;
  CHECK(!route_check(&r, 8, &x, &d, &e));
  CHECK_EQ_I64(e.code, ERROR_DEVICE);
  CHECK(strstr(e.message, "local_batch 2, seq_len 64, ") && strstr(e.message, "head_dim 48: backend test does not execute a head_dim of 48"));

  /* sizes of every format: what stands against each, for a backend that takes all */
  const struct kernels all = {.backend = "all", .refuse_encoding = take_all, .refuse_extent = refuse_extent};
  const struct device any = {.k = &all};
  static const struct {
    const char *route;
    int64_t seq_len, hidden, ffn;
    int problems;
    const char *one;
  } sizes[] = {
      {"te-native", 64, 128, 352, 0, NULL},
      {"te-native", 48, 144, 352, 0, NULL},
      {"te-native", 40, 128, 352, 8, "wgrad dy nvfp4/1x16/tensor/sr/signed-16: qkv: seq_len 40 is not a multiple of 16"},
      {"te-native", 64, 136, 352, 16, "dgrad w nvfp4/2d16/tensor: out: rows 136 is not a multiple of 16"},
      {"fp8", 48, 144, 352, 0, NULL},
      {"fp8", 40, 128, 352, 8, "wgrad dy e5m2/tensor: qkv: seq_len 40 is not a multiple of 16"},
      {"nvfp4-local", 64, 128, 512, 0, NULL},
      {"nvfp4-local", 64, 128, 352, 1, "wgrad dy nvfp4-local/1x16/faithful/strip256: gate_up: ffn_size 352 is not a multiple of 256"},
      {"operand-hybrid-h16", 64, 128, 352, 0, NULL},
      {"operand-hybrid-h16", 64, 128, 360, 0, "dgrad dy nvfp4-local/1x16/faithful/strip256/sr: gate_up: ffn_size 360 is not a multiple of 16"},
      {"mxfp4-row-sr-h32", 48, 128, 352, 8, "wgrad x mxfp4/1x32/encode/signed-32: down: seq_len 48 is not a multiple of 32"},
      {"nvfp4-local-h16", 8, 128, 512, 8, "wgrad x nvfp4-local/1x16/faithful/strip256/signed-16: qkv: seq_len 8 is not a multiple of 16"},
  };
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    CHECK(route_named(sizes[i].route, 8, &r, &e));
    x = extent_of(sizes[i].seq_len, sizes[i].hidden);
    x.ffn_size = sizes[i].ffn;
    if (route_check(&r, 8, &x, &any, &e) != (sizes[i].one == NULL)) {
      FAIL("%s, case %d: %s", sizes[i].route, (int)i, sizes[i].one ? "taken" : e.message);
    } else if (sizes[i].one) {
      if (!strstr(e.message, sizes[i].one)) FAIL("%s", e.message);
      if (sizes[i].problems) CHECK_EQ_I64(lines(e.message), sizes[i].problems);
      CHECK_EQ_I64(e.code, ERROR_CONFIG);
    }
  }

  /* missing blocks, and what is not routed */
  memset(&r, 0, sizeof r);
  struct route_words w = words_of("3-4");
  route_add_span(&r, &w, 8, &e);
  r.activations = DTYPE_BF16;
  r.attention_qk = r.attention_d_out = FORMAT_BF16;
  r.head = linear_route_plain(FORMAT_BF16);
  r.attention_pv = FORMAT_E4M3;
  x = extent_of(64, 128);
  CHECK(!route_check(&r, 8, &x, &d, &e));
  CHECK(strstr(e.message, "blocks 1-2 have no formats"));
  CHECK(strstr(e.message, "blocks 5-8 have no formats"));
  CHECK(strstr(e.message, "attention pv e4m3: no such codes here"));
  CHECK_EQ_I64(e.code, ERROR_CONFIG);
  CHECK_EQ_I64(lines(e.message), 3);
  CHECK(!route_check(&r, 3, &x, &d, &e));
  CHECK(strstr(e.message, "blocks 3-4: the model has 3"));

  /* linears that are not covered; sizes of those that are */
  memset(&r, 0, sizeof r);
  w = words_of("2-8");
  w.sites = "attention";
  CHECK(route_add_span(&r, &w, 8, &e));
  r.activations = DTYPE_BF16;
  r.attention_qk = r.attention_pv = r.attention_d_out = FORMAT_BF16;
  r.head = linear_route_plain(FORMAT_BF16);
  x.ffn_size = 8; /* of no concern to qkv and out */
  CHECK(!route_check(&r, 8, &x, &d, &e));
  CHECK(strstr(e.message, "blocks 1-1 have no formats in route  (all linears)\nblocks 2-8 have no formats in route  (ffn linears)"));
  CHECK_EQ_I64(lines(e.message), 2);
  x = extent_of(64, 128);

  /* plain operands are the activations themselves */
  route_named("bf16", 8, &r, &e);
  r.attention_pv = FORMAT_E4M3;
  CHECK(!route_check(&r, 8, &x, &d, &e));
  CHECK_EQ_I64(e.code, ERROR_DEVICE);
  r.attention_pv = FORMAT_MXFP4;
  CHECK(route_check(&r, 8, &x, &d, &e));
  r.attention_pv = FORMAT_F32;
  CHECK(!route_check(&r, 8, &x, &d, &e));
  CHECK(strstr(e.message, "attention pv fp32: activations are bf16"));
  route_named("fp32", 8, &r, &e);
  r.attention_qk = FORMAT_NVFP4;
  CHECK(!route_check(&r, 8, &x, &d, &e));
  CHECK(strstr(e.message, "attention qk nvfp4: activations are fp32"));
  route_named("bf16", 8, &r, &e);
  r.span[0].linear.operand[WGRAD_X].format = FORMAT_F32;
  CHECK(!route_check(&r, 8, &x, &d, &e));
  CHECK(strstr(e.message, "wgrad x fp32: activations are bf16"));

  /* more problems than an error holds */
  memset(&r, 0, sizeof r);
  for (int i = 0; i < 16; i++) {
    char layers[16];
    snprintf(layers, sizeof layers, "%d", i + 1);
    w = words_of(layers);
    CHECK(route_add_span(&r, &w, 16, &e));
  }
  x = extent_of(33, 129);
  CHECK(!route_check(&r, 16, &x, &d, &e));
  CHECK(strlen(e.message) < sizeof e.message - 1);
  CHECK(strstr(e.message, "\n... and "));
  CHECK(!route_check(&r, 16, &x, &d, NULL));
}

int main(void) {
  RUN(words);
  RUN(bad_words);
  RUN(round_trip);
  RUN(ledger_rows);
  RUN(spans);
  RUN(refusals);
  return test_report();
}
