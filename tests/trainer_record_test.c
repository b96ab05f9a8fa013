/* metrics.jsonl: exact numbers, one line an update, cut back on resume. */
#include "trainer/record.h"

#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "tests/test.h"

static char folder[] = "/tmp/fp4d-record-XXXXXX";

static struct record_file *begin(int64_t update) {
  struct error e;
  struct record_file *f = record_open(folder, &e);
  CHECK(f && record_begin(f, update, &e));
  return f;
}

static void put(struct record_file *f, int64_t update, double loss) {
  struct error e;
  json_t *o = json_object();
  record_text(o, "kind", "update");
  record_integer(o, "update", update);
  record_real(o, "loss", loss);
  CHECK(record_write(f, o, &e));
}

static char *content(void) {
  char path[128], *text = NULL;
  size_t bytes;
  struct error e;
  snprintf(path, sizeof path, "%s/metrics.jsonl", folder);
  CHECK(file_read(path, 1 << 20, ERROR_SYSTEM, &text, &bytes, &e));
  return text;
}

static int lines_of(const char *text) {
  int n = 0;
  for (; *text; text++) n += *text == '\n';
  return n;
}

TEST(numbers_are_exact) {
  const double values[] = {0.1, 1.0 / 3, 2.0837465910274, 1e-300, 5e-324, 1.7976931348623157e308, -0.0};
  for (unsigned i = 0; i < sizeof values / sizeof *values; i++) {
    json_t *o = json_object();
    record_real(o, "x", values[i]);
    char *text = record_dump(o);
    CHECK(strtod(strchr(text, ':') + 1, NULL) == values[i]);
    free(text);
    json_decref(o);
  }
  json_t *o = json_object();
  record_real(o, "nan", NAN);
  record_real(o, "inf", INFINITY);
  CHECK_STR(json_string_value(json_object_get(o, "nan")), "nan");
  CHECK_STR(json_string_value(json_object_get(o, "inf")), "inf");
  json_decref(o);
}

TEST(cut_back_to_the_checkpoint) {
  struct record_file *f = begin(0);
  for (int64_t u = 1; u <= 14; u++) put(f, u, 3.0 / (double)u);
  record_close(f);
  f = begin(10); /* died at 14, goes on from 10 */
  for (int64_t u = 11; u <= 20; u++) put(f, u, 3.0 / (double)u);
  record_close(f);
  char *text = content();
  CHECK_EQ_I64(lines_of(text), 20);
  const char *at = text;
  for (int64_t u = 1; u <= 20; u++) {
    json_t *o = json_loads(at, JSON_DISABLE_EOF_CHECK, NULL);
    CHECK_EQ_I64(json_integer_value(json_object_get(o, "update")), u);
    json_decref(o);
    at = strchr(at, '\n') + 1;
  }
  free(text);
}

TEST(a_torn_last_line_is_dropped) {
  struct record_file *f = begin(0);
  put(f, 1, 1);
  put(f, 2, 1);
  record_close(f);
  char path[128];
  snprintf(path, sizeof path, "%s/metrics.jsonl", folder);
  FILE *raw = fopen(path, "a");
  fputs("{\"kind\":\"update\",\"upd", raw);
  fclose(raw);
  f = begin(2);
  put(f, 3, 1);
  record_close(f);
  char *text = content();
  CHECK_EQ_I64(lines_of(text), 3);
  CHECK(strstr(text, "\"upd\"") == NULL && strstr(text, "\"upd{") == NULL);
  free(text);
}

/* Damage in the middle costs the damaged lines, at the end it costs nothing; never good lines. */
TEST(damaged_lines) {
  static const char *const damage[] = {"\n", "{}\n", "garbage\n", "{\"kind\":\"update\",\"update\":\"2\"}\n", "\xff\xfe\n{\n"};
  char path[128];
  snprintf(path, sizeof path, "%s/metrics.jsonl", folder);
  for (size_t i = 0; i < sizeof damage / sizeof *damage; i++) {
    struct record_file *f = begin(0);
    put(f, 1, 1);
    record_close(f);
    FILE *raw = fopen(path, "a");
    fputs(damage[i], raw);
    fclose(raw);
    f = begin(1); /* at the end */
    char *text = content();
    CHECK_EQ_I64(lines_of(text), 1);
    free(text);
    put(f, 2, 1);
    record_close(f);
    raw = fopen(path, "a");
    fputs(damage[i], raw);
    fclose(raw);
    raw = fopen(path, "a");
    fputs("{\"kind\":\"update\",\"update\":3}\n{\"kind\":\"update\",\"update\":4}\n", raw);
    fclose(raw);
    const int was = dup(2), nowhere = open("/dev/null", O_WRONLY);
    dup2(nowhere, 2);
    f = begin(3); /* in the middle; update 4 goes */
    dup2(was, 2);
    close(was);
    close(nowhere);
    record_close(f);
    text = content();
    if (!strstr(text, damage[i]) || !strstr(text, "\"update\":3}\n") || strstr(text, "\"update\":4")) FAIL("%d: %s", (int)i, text);
    free(text);
  }
}

/* A save beside training is on record after later updates; a resume from it keeps that line. */
TEST(saves_beside_training) {
  char path[128], *text = NULL;
  size_t bytes;
  struct error e = {0};
  snprintf(path, sizeof path, "%s/metrics.jsonl", folder);
  static const char before[] = "{\"kind\":\"update\",\"update\":1}\n{\"kind\":\"update\",\"update\":2}\n";
  static const char after[] = "{\"kind\":\"update\",\"update\":3}\n{\"kind\":\"checkpoint\",\"update\":2}\n"
                              "{\"kind\":\"update\",\"update\":4}\n{\"kind\":\"checkpoint\",\"update\":4}\n{\"kind\":\"upd";
  FILE *f = fopen(path, "w");
  CHECK(f && fputs(before, f) >= 0 && fputs(after, f) >= 0 && fclose(f) == 0);
  record_close(begin(2));
  CHECK(file_read(path, 1 << 20, ERROR_SYSTEM, &text, &bytes, &e));
  char expected[256];
  snprintf(expected, sizeof expected, "%s{\"kind\":\"checkpoint\",\"update\":2}\n", before);
  CHECK(text && bytes == strlen(expected) && memcmp(text, expected, bytes) == 0);
  free(text);
  unlink(path);
}

/* A FIFO in its place must not be waited for. */
/* The newest of what is kept; none of what is cut away. */
TEST(contractions_of_what_is_kept) {
  struct error e;
  struct record_file *f = begin(0);
  CHECK(record_contractions(f) == NULL);
  for (int64_t u = 1; u <= 6; u++) {
    json_t *o = json_object();
    record_text(o, "kind", "update");
    record_integer(o, "update", u);
    if (u % 2 == 0) json_object_set_new(o, "contractions", json_integer(u));
    CHECK(record_write(f, o, &e));
  }
  record_close(f);
  static const int64_t newest[][2] = {{6, 6}, {5, 4}, {2, 2}, {1, 0}};
  for (size_t i = 0; i < sizeof newest / sizeof *newest; i++) {
    f = begin(newest[i][0]);
    CHECK_EQ_I64(json_integer_value(record_contractions(f)), newest[i][1]);
    record_close(f);
  }
}

TEST(no_regular_file) {
  char path[128];
  struct error e = {0};
  snprintf(path, sizeof path, "%s/metrics.jsonl", folder);
  unlink(path);
  CHECK(mkfifo(path, 0600) == 0);
  for (int64_t update = 0; update < 2; update++) {
    struct record_file *f = record_open(folder, &e);
    CHECK(f && !record_begin(f, update, &e));
    CHECK(e.code == ERROR_SYSTEM && strstr(e.message, path));
    record_close(f);
  }
  unlink(path);
}

TEST(a_folder_serves_one_run_at_a_time) {
  struct error e = {0};
  struct record_file *f = begin(0);
  CHECK(f != NULL);
  CHECK(record_open(folder, &e) == NULL);
  CHECK_EQ_I64(e.code, ERROR_CONFIG);
  CHECK(strstr(e.message, folder) != NULL);
  record_close(f);
  f = begin(0);
  CHECK(f != NULL);
  record_close(f);
}

int main(void) {
  if (!mkdtemp(folder)) return 1;
  RUN(numbers_are_exact);
  RUN(cut_back_to_the_checkpoint);
  RUN(a_torn_last_line_is_dropped);
  RUN(damaged_lines);
  RUN(saves_beside_training);
  RUN(contractions_of_what_is_kept);
  RUN(no_regular_file);
  RUN(a_folder_serves_one_run_at_a_time);
  struct error e;
  file_remove_tree(folder, ERROR_SYSTEM, &e);
  return test_report();
}
