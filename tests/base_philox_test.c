/* Philox4x32-10 against the known answers published with Random123
 * (tests/kat_vectors), and the counter's fields. */
#include "base/philox.h"
#include "tests/test.h"

struct answer {
  uint32_t counter[4], key[2], expected[4];
};

static const struct answer answers[] = {
    {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
    {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
     {0xffffffff, 0xffffffff},
     {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
    {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
     {0xa4093822, 0x299f31d0},
     {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
};

TEST(known_answers) {
  for (size_t i = 0; i < sizeof answers / sizeof *answers; i++) {
    struct philox_block counter;
    memcpy(counter.word, answers[i].counter, sizeof counter.word);
    uint64_t key = (uint64_t)answers[i].key[1] << 32 | answers[i].key[0];
    struct philox_block out = philox4x32_10(key, counter);
    for (int w = 0; w < 4; w++) CHECK_EQ_I64(out.word[w], answers[i].expected[w]);
  }
}

TEST(counter_fields) {
  struct philox_block c = philox_counter(0x01020304, 0xAB12345678, 0xDEF, 0x9A7, 0xCAFEBABE);
  CHECK_EQ_I64(c.word[0], 0xCAFEBABE);
  CHECK_EQ_I64(c.word[1], 0x12345678);
  CHECK_EQ_I64(c.word[2], 0x01020304);
  CHECK_EQ_I64(c.word[3], 0xABDEF9A7);
  /* Fields too wide for their bits do not leak into their neighbours. */
  c = philox_counter(0, 0, 0x1001, 0x2003, 0);
  CHECK_EQ_I64(c.word[3], 0x00001003);
}

int main(void) {
  RUN(known_answers);
  RUN(counter_fields);
  return test_report();
}
