/* Number formats against their definitions, literal searches and other packages' bits. */
#include "kernels/formats.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "kernels/kernels.h"
#include "tests/test.h"

/* ---- an independent model: nearest of a table of magnitudes ----------------- */

/* A format by its fields: values of codes 0..largest, bias as IEEE has it. */
struct minifloat {
  int fraction_bits, bias, largest;
};
static const struct minifloat E2M1 = {1, 1, 7}, E4M3 = {3, 7, 0x7E}, E5M2 = {2, 15, 0x7B};

static double minifloat_value(const struct minifloat *f, int code) {
  int e = code >> f->fraction_bits, m = code & ((1 << f->fraction_bits) - 1), one = 1 << f->fraction_bits;
  return e ? ldexp(one + m, e - f->bias - f->fraction_bits) : ldexp(m, 1 - f->bias - f->fraction_bits);
}

/* Nearest, ties to the even code, saturating; the sign apart. NaN is the caller's. */
static int minifloat_nearest(const struct minifloat *f, double a) {
  int low = 0, high = f->largest;
  if (a >= minifloat_value(f, high)) return high;
  while (high - low > 1) {
    int mid = (low + high) / 2;
    if (minifloat_value(f, mid) <= a) low = mid;
    else high = mid;
  }
  double below = a - minifloat_value(f, low), above = minifloat_value(f, high) - a;
  if (below == above) return low % 2 ? high : low;
  return below < above ? low : high;
}

/* Patterns: all BF16, a scrambled million of FP32, and neighbours of every tie. */
static uint32_t scrambled(uint32_t i) { return i * 2654435761u; }

/* ---- tables ------------------------------------------------------------------ */

TEST(tables) {
  static const float e2m1[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
  for (uint32_t c = 0; c < 16; c++) {
    CHECK(f32_bits(e2m1_decode(c)) == f32_bits(e2m1[c]));
    CHECK_EQ_I64(e2m1_encode(e2m1[c]), c);
    CHECK((double)e2m1_decode(c & 7) == minifloat_value(&E2M1, c & 7));
    for (uint32_t r = 0; r < 65536; r += 257) CHECK_EQ_I64(e2m1_encode_stochastic(e2m1[c], r), c);
  }
  for (int c = 0; c <= 0x7E; c++) {
    CHECK((double)e4m3_decode((uint32_t)c) == minifloat_value(&E4M3, c));
    CHECK_EQ_I64(e4m3_encode(e4m3_decode((uint32_t)c)), c);
    CHECK_EQ_I64(e4m3_encode(e4m3_decode((uint32_t)c | 0x80)), c | 0x80);
  }
  CHECK(isnan(e4m3_decode(0x7F)) && isnan(e4m3_decode(0xFF)));
  for (int c = 0; c <= 0x7B; c++) {
    CHECK((double)e5m2_decode((uint32_t)c) == minifloat_value(&E5M2, c));
    CHECK_EQ_I64(e5m2_encode(e5m2_decode((uint32_t)c)), c);
    CHECK_EQ_I64(e5m2_encode(e5m2_decode((uint32_t)c | 0x80)), c | 0x80);
  }
  CHECK(isinf(e5m2_decode(0x7C)) && e5m2_decode(0xFC) < 0 && isnan(e5m2_decode(0x7D)) && isnan(e5m2_decode(0xFF)));
  for (int c = 0; c < 255; c++) CHECK((double)e8m0_decode((uint32_t)c) == ldexp(1, c - 127));
  CHECK(isnan(e8m0_decode(255)));
  CHECK((double)e4m3_decode(0x7E) == 448 && (double)e5m2_decode(0x7B) == 57344);
  CHECK((double)e4m3_decode(1) == 0x1p-9 && (double)e5m2_decode(1) == 0x1p-16);
}

/* Every code's value by ml_dtypes, and back (a NaN to a NaN's code). */
TEST(every_code) {
  static const struct {
    const char *name;
    float (*decode)(uint32_t);
    uint32_t (*encode)(float);
    uint32_t mask, nan;
  } of[4] = {{"e4m3", e4m3_decode, e4m3_encode, 0xFF, 0x7F},
             {"e5m2", e5m2_decode, e5m2_encode, 0xFF, 0x7F},
             {"e8m0", e8m0_decode, e8m0_encode_up, 0xFF, 0xFF},
             {"e2m1", e2m1_decode, e2m1_encode, 0x0F, 0}};
  FILE *golden = fopen("tests/golden/codes.txt", "r");
  CHECK(golden != NULL);
  if (!golden) return;
  uint32_t code, lines = 0;
  char text[4][16];
  while (fscanf(golden, "%" SCNx32 " %15s %15s %15s %15s", &code, text[0], text[1], text[2], text[3]) == 5) {
    CHECK_EQ_I64(code, lines++);
    for (int i = 0; i < 4; i++) {
      uint32_t c = code & of[i].mask;
      float value = of[i].decode(c);
      bool nan = strcmp(text[i], "nan") == 0;
      if (nan ? !isnan(value) : f32_bits(value) != (uint32_t)strtoul(text[i], NULL, 16))
        FAIL("%s code %02" PRIx32 " is %a", of[i].name, c, (double)value);
      uint32_t largest = isinf(value) ? (c & 0x80) | 0x7B : c; /* encoders saturate */
      if (of[i].encode(value) != (nan ? of[i].nan : largest)) FAIL("%s code %02" PRIx32 " comes back otherwise", of[i].name, c);
    }
    uint32_t down = e8m0_encode_floor(e8m0_decode(code));
    if (down != code) FAIL("e8m0 code %02" PRIx32 " comes back as %02" PRIx32, code, down);
  }
  fclose(golden);
  CHECK_EQ_I64(lines, 256);
}

TEST(ties_and_edges) {
  static const struct {
    float x;
    uint32_t code;
  } e2m1[] = {{.25f, 0},  {.75f, 2},       {1.25f, 2},   {1.75f, 4}, {2.5f, 4},  {3.5f, 6},       {5, 6},
              {-.25f, 8}, {-0.f, 8},       {6.0001f, 7}, {1e30f, 7}, {-7, 15},   {INFINITY, 7},   {-INFINITY, 15},
              {NAN, 7},   {0x1p-149f, 0},  {-1e-40f, 8}, {5.5f, 7},  {-5.f, 14}, {0.2500001f, 1}, {0.7499999f, 1}};
  for (size_t i = 0; i < sizeof e2m1 / sizeof e2m1[0]; i++) CHECK_EQ_I64(e2m1_encode(e2m1[i].x), e2m1[i].code);
  CHECK_EQ_I64(e2m1_encode(-(float)NAN), 7);
  CHECK_EQ_I64(e2m1_encode(f32_from_bits(0xFF800001u)), 7);

  CHECK_EQ_I64(e4m3_encode(0x1p-10f), 0);
  CHECK_EQ_I64(e4m3_encode(0x1.001p-10f), 1);
  CHECK_EQ_I64(e4m3_encode(3 * 0x1p-10f), 2);
  CHECK_EQ_I64(e4m3_encode(448), 0x7E);
  CHECK_EQ_I64(e4m3_encode(1e9f), 0x7E);
  CHECK_EQ_I64(e4m3_encode(-INFINITY), 0xFE);
  CHECK_EQ_I64(e4m3_encode(NAN), 0x7F);
  CHECK_EQ_I64(e5m2_encode(INFINITY), 0x7B);
  CHECK_EQ_I64(e5m2_encode(NAN), 0x7F);

  CHECK_EQ_I64(e8m0_encode_up(1), 127);
  CHECK_EQ_I64(e8m0_encode_up(1.5f), 128);
  CHECK_EQ_I64(e8m0_encode_up(3), 129);
  CHECK_EQ_I64(e8m0_encode_up(0x1p-127f), 0);
  CHECK_EQ_I64(e8m0_encode_up(0x1.8p-127f), 1);
  CHECK_EQ_I64(e8m0_encode_up(FLT_MAX), 254);
  CHECK_EQ_I64(e8m0_encode_up(INFINITY), 254);
  CHECK_EQ_I64(e8m0_encode_up(NAN), 255);
  CHECK_EQ_I64(e8m0_encode_up(0), 0);
  CHECK_EQ_I64(e8m0_encode_floor(0), 0);
  CHECK_EQ_I64(e8m0_encode_floor(1.999f), 127);
  CHECK_EQ_I64(e8m0_encode_floor(INFINITY), 254);
  CHECK_EQ_I64(e8m0_encode_floor(NAN), 255);

  CHECK_EQ_I64(bf16_encode(1.00390625f), 0x3F80); /* a tie, to even */
  CHECK_EQ_I64(bf16_encode(1.01171875f), 0x3F82);
  CHECK_EQ_I64(bf16_encode(FLT_MAX), 0x7F80);
  CHECK_EQ_I64(bf16_encode(-INFINITY), 0xFF80);
  CHECK(isnan(bf16_decode(bf16_encode(f32_from_bits(0x7F800001u)))));
  CHECK(isnan(bf16_decode(bf16_encode(f32_from_bits(0xFFFFFFFFu)))));
}

static void check_nearest(uint32_t u) {
  float x = f32_from_bits(u);
  if (isnan(x)) {
    if (e2m1_encode(x) != 7 || e4m3_encode(x) != 0x7F || e5m2_encode(x) != 0x7F) FAIL("NaN %08" PRIX32, u);
    return;
  }
  double a = fabs((double)x);
  uint32_t sign = u >> 31;
  if (e2m1_encode(x) != ((uint32_t)minifloat_nearest(&E2M1, a) | sign << 3)) FAIL("e2m1 %08" PRIX32, u);
  if (e4m3_encode(x) != ((uint32_t)minifloat_nearest(&E4M3, a) | sign << 7)) FAIL("e4m3 %08" PRIX32, u);
  if (e5m2_encode(x) != ((uint32_t)minifloat_nearest(&E5M2, a) | sign << 7)) FAIL("e5m2 %08" PRIX32, u);
}

TEST(nearest_by_search) {
  for (uint32_t i = 0; i < 65536; i++) check_nearest(i << 16);
  for (uint32_t i = 0; i < 1u << 17; i++) check_nearest(scrambled(i));
  const struct minifloat *formats[] = {&E2M1, &E4M3, &E5M2};
  for (int f = 0; f < 3; f++)
    for (int c = 0; c < formats[f]->largest; c++) {
      float tie = (float)((minifloat_value(formats[f], c) + minifloat_value(formats[f], c + 1)) / 2);
      for (uint32_t d = 0; d < 5; d++) {
        check_nearest(f32_bits(tie) + d - 2);
        check_nearest((f32_bits(tie) + d - 2) | 0x80000000u);
      }
    }
}

/* Another body of the E2M1 encoder, on the bits alone. */
static uint32_t e2m1_by_bits(uint32_t u) {
  uint32_t a = u & 0x7FFFFFFFu, m;
  if (a > 0x7F800000u) return 7;
  if (a >= 0x40A00001u) m = 7;                                                  /* above 5 */
  else if (a >= 0x3F800000u) m = ((a + 0x1FFFFFu + (a >> 22 & 1)) >> 22) - 252; /* 1 .. 5 */
  else m = a >= 0x3F400000u ? 2 : a > 0x3E800000u ? 1 : 0;
  return m | (u >> 28 & 8);
}

TEST(bodies_of_e2m1) {
  for (uint32_t i = 0; i < 1u << 20; i++) {
    uint32_t u = i < 65536 ? i << 16 : scrambled(i);
    uint32_t code = e2m1_encode(f32_from_bits(u));
    if (code != e2m1_by_bits(u)) FAIL("integer body %08" PRIX32, u);
    /* the stochastic body with half a step is rounding half away: it differs at ties alone */
    double a = fabs((double)f32_from_bits(u));
    bool tie = a == .25 || a == .75 || a == 1.25 || a == 1.75 || a == 2.5 || a == 3.5 || a == 5;
    /* and where the distance to the tie is below a 65,536th of a step it cannot see it */
    bool near_tie = tie || (a < .25 && a > .24999);
    for (double t = .25; !near_tie && t < 5.5; t += .25) near_tie = fabs(a - t) < 5e-5;
    if (!near_tie && code != e2m1_encode_stochastic(f32_from_bits(u), 0x8000)) FAIL("stochastic body %08" PRIX32, u);
  }
}

/* ---- stochastic --------------------------------------------------------------- */

TEST(stochastic_vectors) {
  uint32_t f[4];
  stochastic_fields(0x12345678u, f);
  CHECK_EQ_I64(f[0], 0x3478);
  CHECK_EQ_I64(f[1], 0x1E2C);
  CHECK_EQ_I64(f[2], 0x1256);
  CHECK_EQ_I64(f[3], 0x6A48);
  for (int bit = 0; bit < 32; bit++) { /* every bit goes to one place of each field of its pair */
    stochastic_fields(1u << bit, f);
    int pair = bit % 16 < 8 ? 0 : 2, place = bit % 8 + (bit >= 16 ? 8 : 0);
    CHECK_EQ_I64(f[pair], 1 << place);
    CHECK_EQ_I64(f[pair + 1], 0x8000 >> place);
    CHECK(f[2 - pair] == 0 && f[3 - pair] == 0);
  }
  CHECK_EQ_I64(e2m1_encode_stochastic(.75f, 0x7FFF), 1);
  CHECK_EQ_I64(e2m1_encode_stochastic(.75f, 0x8000), 2);
  CHECK_EQ_I64(e2m1_encode_stochastic(NAN, 5), 7);
  CHECK_EQ_I64(e2m1_encode_stochastic(-(float)NAN, 5), 7);
  CHECK_EQ_I64(e2m1_encode_stochastic(INFINITY, 0), 7);
  CHECK_EQ_I64(e2m1_encode_stochastic(-100, 0xFFFF), 15);
  CHECK_EQ_I64(e2m1_encode_stochastic(6, 0xFFFF), 7);
  CHECK_EQ_I64(e2m1_encode_stochastic(-0.f, 0xFFFF), 8);
  CHECK_EQ_I64(e2m1_encode_stochastic(-1e-40f, 0xFFFF), 8);
  CHECK_EQ_I64(e2m1_encode_stochastic(0x1p-17f, 0xFFFF), 1);
  CHECK_EQ_I64(e2m1_encode_stochastic(0x1.fffffep-18f, 0xFFFF), 0);
}

/* Up with probability floor(65536 t) / 65536, t the place between neighbours. */
static uint32_t stochastic_literal(float x, uint32_t field) {
  double a = fabs((double)x);
  uint32_t sign = signbit(x) ? 8 : 0, low = 0;
  if (a >= 6) return 7 | sign;
  while (low < 6 && minifloat_value(&E2M1, (int)low + 1) <= a) low++;
  double from = minifloat_value(&E2M1, (int)low), to = minifloat_value(&E2M1, (int)low + 1);
  double dropped = floor(65536 * (a - from) / (to - from));
  return (low + (dropped + field >= 65536)) | sign;
}

TEST(stochastic_by_definition) {
  uint32_t state = 1;
  for (uint32_t i = 0; i < 1u << 19; i++) {
    state = state * 1664525u + 1013904223u;
    uint32_t u = i < 65536 ? i << 16 : i < 1u << 18 ? scrambled(i) : 0x36000000u + (scrambled(i) >> 4) % 0x0B000000u;
    float x = f32_from_bits(u);
    if (isnan(x)) continue;
    uint32_t field = state >> 16;
    if (e2m1_encode_stochastic(x, field) != stochastic_literal(x, field)) FAIL("%08" PRIX32 " %04" PRIX32, u, field);
  }
}

TEST(stochastic_means) {
  static const struct {
    float x;
    double mean;
  } of[] = {{1.1f, 1.099998}, {5.9f, 5.899994}, {.01f, .009995}, {-2.7f, -2.699997}, {.25f, .25}, {3.3f, 3.299988}};
  for (size_t i = 0; i < sizeof of / sizeof of[0]; i++) {
    double sum = 0;
    for (uint32_t r = 0; r < 65536; r++) sum += (double)e2m1_decode(e2m1_encode_stochastic(of[i].x, r));
    CHECK_CLOSE(sum / 65536, of[i].mean, 1e-6);
    double step = fabs((double)of[i].x) < 2 ? .5 : fabs((double)of[i].x) < 4 ? 1 : 2;
    double bias = fabs((double)of[i].x) - fabs(sum / 65536);
    CHECK(bias >= -1e-12 && bias <= step / 65536);
  }
}

TEST(bf16_stochastic) {
  double sum = 0;
  const float x = 1.0f + 0x1p-10f + 0x1p-20f; /* between 1 and 1 + 2^-7 */
  for (uint32_t r = 0; r < 65536; r++) {
    uint16_t h = bf16_encode_stochastic(x, r);
    if (h != 0x3F80 && h != 0x3F81) FAIL("not a neighbour: %04x", h);
    sum += (double)bf16_decode(h);
  }
  CHECK_CLOSE(sum / 65536, (double)x, 1e-9);
  CHECK_EQ_I64(bf16_encode_stochastic(-1.5f, 0xFFFF), 0xBFC0);
  CHECK_EQ_I64(bf16_encode_stochastic(INFINITY, 0xFFFF), 0x7F80);
  CHECK_EQ_I64(bf16_encode_stochastic(0, 0xFFFF), 0);
  CHECK(isnan(bf16_decode(bf16_encode_stochastic(f32_from_bits(0x7F800001u), 0))));
  CHECK(isnan(bf16_decode(bf16_encode_stochastic(f32_from_bits(0x7FFFFFFFu), 0xFFFF))));
}

/* ---- MXFP4's scale --------------------------------------------------------------- */

TEST(mxfp4_scales) {
  CHECK_EQ_I64(mxfp4_scale_encode(0), 0);
  CHECK_EQ_I64(mxfp4_scale_adaptive(0), 0);
  for (uint32_t amax = 1; amax < 0x7F80; amax++) {
    double a = (double)bf16_decode((uint16_t)amax);
    int e;
    double m = frexp(a, &e); /* a = m 2^e, m in [1/2, 1) */
    int up = m == .5 ? e - 1 : e, byte = up + 127 < 2 ? 2 : up + 127 > 254 ? 254 : up + 127;
    if (mxfp4_scale_encode(amax) != (uint32_t)byte) FAIL("encode %04" PRIX32, amax);
    int adaptive = byte > 2 && a / ldexp(1, byte - 127) < .87 ? byte - 1 : byte;
    if (mxfp4_scale_adaptive(amax) != (uint32_t)adaptive) FAIL("adaptive %04" PRIX32, amax);
    double clip = fabs(a * (double)mxfp4_coefficient((uint32_t)byte));
    if (!(clip <= 6 || byte == 254)) FAIL("clips %04" PRIX32, amax);
  }
  for (uint32_t amax = 0x7F80; amax < 0x8000; amax++) CHECK_EQ_I64(mxfp4_scale_encode(amax), 254);
  CHECK_EQ_I64(mxfp4_scale_adaptive(0x7F80), 254);
  CHECK_EQ_I64(mxfp4_scale_adaptive(0x7FC0), 254);
  /* the ratio's lattice beside 0.87: 0.8671875 halves, 0.87109375 does not */
  CHECK_EQ_I64(mxfp4_scale_adaptive(bf16_encode(.8671875f)), 126);
  CHECK_EQ_I64(mxfp4_scale_adaptive(bf16_encode(.87109375f)), 127);
  CHECK_EQ_I64(mxfp4_scale_adaptive(bf16_encode(1.8828125f)), 128);
  for (int byte = 2; byte <= 254; byte++) {
    CHECK((double)mxfp4_coefficient((uint32_t)byte) == ldexp(6, 127 - byte));
    if (byte < 252) CHECK((double)mxfp4_decode(13, (uint32_t)byte) == -ldexp(3, byte - 127));
  }
  CHECK(mxfp4_decode(0, 0) == 0);
}

/* The rules of amax rounded down, over every BF16 amax, and every code under every byte. */
TEST(mxfp4_scales_rounded_down) {
  CHECK_EQ_I64(mxfp4_scale_decode(0), 0);
  CHECK_EQ_I64(mxfp4_scale_floor(0), 0);
  for (uint32_t amax = 1; amax < 0x7F80; amax++) {
    int e;
    (void)frexp((double)bf16_decode((uint16_t)amax), &e); /* floor(log2 amax) = e - 1 */
    int decode = e - 1 + 127, ocp = e - 1 - 2 + 127;
    decode = decode < 2 ? 2 : decode;
    ocp = ocp < 0 ? 0 : ocp;
    if (mxfp4_scale_decode(amax) != (uint32_t)decode) FAIL("decode %04" PRIX32, amax);
    if (mxfp4_scale_floor(amax) != (uint32_t)ocp) FAIL("floor %04" PRIX32, amax);
  }
  for (uint32_t amax = 0x7F80; amax < 0x8000; amax++) {
    CHECK_EQ_I64(mxfp4_scale_decode(amax), 254);
    CHECK_EQ_I64(mxfp4_scale_floor(amax), 254);
  }
  for (uint32_t byte = 0; byte < 255; byte++) {
    CHECK((double)mxfp4_coefficient_floor(byte) == ldexp(1, 127 - (int)byte));
    for (uint32_t code = 0; code < 16; code++) {
      double value = (code & 8 ? -1 : 1) * minifloat_value(&E2M1, code & 7) * ldexp(1, (int)byte - 127);
      if (mxfp4_decode(code, byte) != (float)value) FAIL("code %" PRIX32 " under byte %02" PRIX32, code, byte);
    }
  }
  for (uint32_t code = 0; code < 16; code++) CHECK(isnan(mxfp4_decode(code, 255)));
}

/* ---- other packages' bits ------------------------------------------------------- */

static uint32_t crc_byte(uint32_t crc, uint32_t byte) {
  static uint32_t table[256];
  if (!table[1])
    for (uint32_t i = 0; i < 256; i++) {
      uint32_t c = i;
      for (int k = 0; k < 8; k++) c = c >> 1 ^ (0xEDB88320u & (0u - (c & 1u)));
      table[i] = c;
    }
  return crc >> 8 ^ table[(crc ^ byte) & 0xFF];
}

static uint32_t up(float x) { return e8m0_encode_up(x); }
static uint32_t down(float x) { return e8m0_encode_floor(x); }
static uint32_t e2m1(float x) { return e2m1_encode(x); }
static uint32_t e4m3(float x) { return e4m3_encode(x); }
static uint32_t e5m2(float x) { return e5m2_encode(x); }
static uint32_t bf16(float x) { return bf16_encode(x); }

TEST(golden_checksums) {
  static const struct {
    const char *name;
    uint32_t (*encode)(float);
    double largest;
  } of[] = {{"ml_e2m1", e2m1, 6},           {"ml_e4m3", e4m3, 448},          {"ml_e5m2", e5m2, 57344},
            {"ml_bf16", bf16, 3e38},        {"cuda_e2m1", e2m1, INFINITY},   {"cuda_e4m3", e4m3, INFINITY},
            {"cuda_e5m2", e5m2, INFINITY},  {"cuda_e8m0_up", up, INFINITY},  {"cuda_e8m0_floor", down, INFINITY}};
  FILE *golden = fopen("tests/golden/formats.txt", "r");
  CHECK(golden != NULL);
  if (!golden) return;
  char name[64];
  uint32_t want;
  int seen = 0;
  while (fscanf(golden, "%63s %" SCNx32, name, &want) == 2) {
    char *source = strrchr(name, '_');
    *source++ = 0;
    bool two_bytes = strcmp(name, "ml_bf16") == 0, wide = strcmp(source, "f32") == 0;
    for (size_t k = 0; k < sizeof of / sizeof of[0]; k++) {
      if (strcmp(of[k].name, name) != 0) continue;
      uint32_t crc = ~0u;
      for (uint32_t i = 0; i < (wide ? 1u << 20 : 65536u); i++) {
        float x = f32_from_bits(wide ? scrambled(i) : i << 16);
        bool inside = isinf(of[k].largest) || fabs((double)x) <= of[k].largest;
        uint32_t code = of[k].encode(inside ? x : 0.0f);
        crc = crc_byte(crc, code & 0xFF);
        if (two_bytes) crc = crc_byte(crc, code >> 8);
      }
      if (~crc != want) FAIL("%s of %s patterns: %08" PRIx32 ", expected %08" PRIx32, name, source, ~crc, want);
      seen++;
    }
  }
  fclose(golden);
  CHECK_EQ_I64(seen, 18);
}

/* ---- encodings and operands ------------------------------------------------------ */

TEST(encodings) {
  char text[ENCODING_TEXT];
  struct encoding weight = {FORMAT_MXFP4, BLOCK_2D32, SCALE_MX_ADAPTIVE, ROUND_NEAREST, HADAMARD_NONE, 0};
  struct encoding dy = {FORMAT_MXFP4, BLOCK_1X32, SCALE_MX_ENCODE, ROUND_STOCHASTIC, HADAMARD_NONE, 0};
  struct encoding plain = {.format = FORMAT_BF16};
  struct encoding rotated = {FORMAT_NVFP4_LOCAL, BLOCK_2D16, SCALE_LOCAL_FAITHFUL, ROUND_STOCHASTIC, HADAMARD_SIGNED_16, 0};
  CHECK_STR(encoding_text(&weight, text, sizeof text), "mxfp4/2d32/adaptive");
  CHECK_STR(encoding_text(&dy, text, sizeof text), "mxfp4/1x32/encode/sr");
  CHECK_STR(encoding_text(&plain, text, sizeof text), "bf16");
  CHECK_STR(encoding_text(&rotated, text, sizeof text), "nvfp4-local/2d16/faithful/sr/signed-16");
  CHECK_STR(encoding_text(&rotated, text, 6), "nvfp4");
  CHECK(encoding_equal(&weight, &weight) && !encoding_equal(&weight, &dy));
  for (int i = 0; i < 5; i++) {
    struct encoding other = dy;
    if (i == 0) other.format = FORMAT_NVFP4;
    if (i == 1) other.block = BLOCK_1X16;
    if (i == 2) other.scale = SCALE_MX_FLOOR;
    if (i == 3) other.rounding = ROUND_NEAREST;
    if (i == 4) other.hadamard = HADAMARD_PLAIN_16;
    CHECK(!encoding_equal(&dy, &other));
  }
}

TEST(operands) {
  static const int64_t swizzle[][3] = {{0, 0, 0},   {1, 0, 16},      {32, 0, 4},    {0, 1, 1},     {0, 4, 512},
                                       {31, 3, 499}, {127, 15, 2047}, {128, 0, 2048}, {200, 9, 3209}};
  for (size_t i = 0; i < sizeof swizzle / sizeof swizzle[0]; i++)
    CHECK_EQ_I64(operand_scale_offset(swizzle[i][0], swizzle[i][1], 16), swizzle[i][2]);
  /* a bijection onto the padded array */
  struct encoding mx = {FORMAT_MXFP4, BLOCK_1X32, SCALE_MX_ENCODE, ROUND_NEAREST, HADAMARD_NONE, 0};
  static char seen[256 * 8];
  CHECK_EQ_I64(operand_scale_bytes(&mx, 130, 5 * 32), 256 * 8);
  for (int64_t r = 0; r < 256; r++)
    for (int64_t c = 0; c < 8; c++) {
      int64_t at = operand_scale_offset(r, c, 5);
      CHECK(at >= 0 && at < 256 * 8 && !seen[at]);
      seen[at] = 1;
    }
  CHECK_EQ_I64(operand_code_bytes(&mx, 130, 160), 130 * 80);
  struct encoding nv = {FORMAT_NVFP4, BLOCK_1X16, SCALE_TENSOR, ROUND_NEAREST, HADAMARD_NONE, 0};
  CHECK_EQ_I64(operand_scale_bytes(&nv, 1, 16), 128 * 4);
  struct encoding plain = {.format = FORMAT_BF16};
  CHECK_EQ_I64(operand_scale_bytes(&plain, 130, 160), 0);
  CHECK_EQ_I64(operand_code_bytes(&plain, 3, 5), 30);

  uint16_t data[6];
  struct matrix m = {.data = data, .dtype = DTYPE_BF16, .rows = 2, .cols = 3};
  struct operand row = operand_of_matrix(&m, VIEW_ROW), column = operand_of_matrix(&m, VIEW_COLUMN);
  CHECK(row.rows == 2 && row.cols == 3 && column.rows == 3 && column.cols == 2);
  CHECK(row.codes == (uint8_t *)data && row.scales == NULL && row.outer == NULL && column.view == VIEW_COLUMN);
  CHECK(row.encoding.format == FORMAT_BF16);
}

int main(void) {
  RUN(tables);
  RUN(every_code);
  RUN(ties_and_edges);
  RUN(nearest_by_search);
  RUN(bodies_of_e2m1);
  RUN(stochastic_vectors);
  RUN(stochastic_by_definition);
  RUN(stochastic_means);
  RUN(bf16_stochastic);
  RUN(mxfp4_scales);
  RUN(mxfp4_scales_rounded_down);
  RUN(golden_checksums);
  RUN(encodings);
  RUN(operands);
  return test_report();
}
