/* Texts of JSON lines against Python's json (tests/oracle/json_text.py), and the edges by hand. */
#include <stdlib.h>

#include "data/json_text.h"
#include "tests/test.h"

static int64_t from_hex(const char *hex, char *out) {
  int64_t n = 0;
  for (; hex[0] && hex[0] != '-' && hex[1]; hex += 2) {
    unsigned byte;
    if (sscanf(hex, "%2x", &byte) != 1) return -1;
    out[n++] = (char)(unsigned char)byte;
  }
  return n;
}

TEST(as_python) {
  const char *path = getenv("FP4D_JSON_GOLDEN");
  FILE *f = fopen(path ? path : "tests/golden/json_text.txt", "r");
  CHECK(f != NULL);
  if (!f) return;
  static char row[200000], line[100000], want[100000], text[100000];
  int64_t rows = 0, refused = 0, wrong = 0;
  while (fgets(row, sizeof row, f)) {
    row[strcspn(row, "\n")] = 0;
    char *hex = strtok(row, " "), *value = strtok(NULL, " "), *lone = strtok(NULL, " ");
    const int64_t length = from_hex(hex, line);
    struct json_text found = {.text = text};
    const bool ok = json_text_find(line, length, "text", &found);
    rows++;
    if (!lone) {
      refused++;
      if (ok && wrong++ < 3) FAIL("accepted: %.*s", (int)length, line);
      CHECK(ok || (found.problem && found.at >= 0 && found.at <= length));
      continue;
    }
    const int64_t n = from_hex(value, want);
    if (!ok || found.length != n || memcmp(text, want, (size_t)n) != 0 || found.lone != atoll(lone)) {
      if (wrong++ < 3) FAIL("%.*s: %s", (int)length, line, ok ? "another text" : found.problem);
    }
  }
  fclose(f);
  CHECK_EQ_I64(wrong, 0);
  CHECK(rows > 300 && refused > 50 && refused < rows - 50);
}

static struct json_text find(const char *line, bool *ok) {
  static char text[10000];
  struct json_text found = {.text = text};
  *ok = json_text_find(line, (int64_t)strlen(line), "text", &found);
  return found;
}

static bool refused(const char *line, int64_t at, const char *why) {
  bool ok;
  const struct json_text f = find(line, &ok);
  if (ok || f.at != at || !strstr(f.problem, why)) printf("# %s: byte %lld, %s\n", line, (long long)f.at, ok ? "accepted" : f.problem);
  return !ok && f.at == at && strstr(f.problem, why);
}

TEST(what_is_wrong_and_where) {
  CHECK(refused("", 0, "no JSON object"));
  CHECK(refused("[1]", 0, "no JSON object"));
  CHECK(refused("{\"a\": 1}", 8, "absent"));
  CHECK(refused("{\"text\": 1}", 11, "not a text"));
  CHECK(refused("{\"text\": \"a\", \"text\": null}", 27, "not a text"));
  CHECK(refused("{\"text\": \"ab", 12, "does not end"));
  CHECK(refused("{\"text\": \"a\tb\"}", 11, "control character"));
  CHECK(refused("{\"text\": \"a\"} x", 14, "follows"));
  CHECK(refused("{\"text\": \"\\x\"}", 12, "unknown escape"));
  CHECK(refused("{\"text\": \"\\u12g4\"}", 12, "hexadecimal"));
  CHECK(refused("{\"text\" \"a\"}", 8, "colon"));
  CHECK(refused("{\"text\": \"a\",}", 13, "key in quotes"));
}

TEST(surrogates) {
  bool ok;
  struct json_text f = find("{\"text\": \"\\ud83d\\ude00\\ud83d\\ud83d\\ude00\\ude00\"}", &ok);
  CHECK(ok && f.lone == 2 && f.length == 14);
  CHECK(ok && memcmp(f.text, "\xf0\x9f\x98\x80\xef\xbf\xbd\xf0\x9f\x98\x80\xef\xbf\xbd", 14) == 0);
  f = find("{\"te\\u0078t\": \"key\"}", &ok);
  CHECK(ok && f.length == 3 && memcmp(f.text, "key", 3) == 0);
  f = find("{\"text\": \"\\u0000\"}", &ok);
  CHECK(ok && f.length == 1 && f.text[0] == 0);
}

TEST(depth) {
  static char line[4 * JSON_DEPTH + 64];
  for (int extra = 0; extra < 2; extra++) {
    const int depth = JSON_DEPTH + extra;
    int n = sprintf(line, "{\"a\": ");
    for (int i = 0; i < depth; i++) line[n++] = '[';
    for (int i = 0; i < depth; i++) line[n++] = ']';
    strcpy(line + n, ", \"text\": \"x\"}");
    bool ok;
    const struct json_text f = find(line, &ok);
    CHECK(ok == (extra == 0));
    CHECK(ok || strstr(f.problem, "too deep"));
  }
}

int main(void) {
  RUN(as_python);
  RUN(what_is_wrong_and_where);
  RUN(surrogates);
  RUN(depth);
  return test_report();
}
