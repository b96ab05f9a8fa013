/* safetensors: what the writer writes, and every way in which a file or an index can be
 * wrong: each is refused with the file and the offset or the tensor named. */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "checkpoints/safetensors.h"
#include "tests/test.h"

static char folder[] = "/tmp/fp4d-safetensors-XXXXXX";

static const char *in_folder(const char *name) {
  static char path[256];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  return path;
}

static void write_bytes(const char *name, const void *data, size_t bytes) {
  FILE *f = fopen(in_folder(name), "wb");
  if (!f || fwrite(data, 1, bytes, f) != bytes || fclose(f) != 0) FAIL("cannot write %s", name);
}

/* A file with the header `json`, said to have `length` bytes (-1: those it has), and `data` zeros after it. */
static void write_file(const char *name, const char *json, int64_t length, size_t data) {
  const size_t n = strlen(json);
  const uint64_t said = length < 0 ? n : (uint64_t)length;
  unsigned char *all = calloc(1, 8 + n + data);
  for (int i = 0; i < 8; i++) all[i] = (unsigned char)(said >> (8 * i));
  memcpy(all + 8, json, n);
  write_bytes(name, all, 8 + n + data);
  free(all);
}

static void clear(void) {
  static const char *const names[] = {"model.safetensors", "model.safetensors.index.json", "a.safetensors", "b.safetensors"};
  for (int i = 0; i < 4; i++) unlink(in_folder(names[i]));
}

/* Opening fails with ERROR_CHECKPOINT, and the message holds every text. */
static void refused(const char *what, const char *first, const char *second) {
  struct error e = {0};
  struct safetensors *s = safetensors_open(folder, &e);
  if (s) FAIL("%s: it opens", what);
  else if (e.code != ERROR_CHECKPOINT || !strstr(e.message, first) || !strstr(e.message, second))
    FAIL("%s: %s", what, e.message);
  safetensors_close(s);
}

static void header_refused(const char *what, const char *json, int64_t length, size_t data, const char *said) {
  clear();
  write_file("model.safetensors", json, length, data);
  refused(what, "model.safetensors", said);
}

/* ---- whole files ---------------------------------------------------------------- */

TEST(round_trip) {
  clear();
  const struct safetensors_entry entries[] = {{"a.weight", "F32", 2, {3, 5}, 60}, {"empty", "BF16", 2, {0, 7}, 0}, {"z", "BF16", 1, {11}, 22}};
  unsigned char data[82], back[82];
  for (size_t i = 0; i < sizeof data; i++) data[i] = (unsigned char)(i * 37 + 11);
  struct error e = {0};
  struct safetensors_writer *w = safetensors_create(in_folder("model.safetensors"), entries, 3, &e);
  CHECK(w && safetensors_put(w, data, 1, &e) && safetensors_put(w, data + 1, 81, &e) && safetensors_finish(w, &e));
  struct safetensors *s = safetensors_open(folder, &e);
  CHECK(s != NULL);
  if (!s) return;
  CHECK_EQ_I64(safetensors_count(s), 3);
  const struct safetensors_tensor *a = safetensors_find(s, "a.weight"), *z = safetensors_find(s, "z");
  CHECK(a && z && !safetensors_find(s, "b") && safetensors_find(s, "empty"));
  if (a && z) {
    CHECK_STR(a->dtype, "F32");
    CHECK(a->n_dims == 2 && a->shape[0] == 3 && a->shape[1] == 5 && a->bytes == 60 && a->at % 8 == 0);
    CHECK(z->n_dims == 1 && z->shape[0] == 11 && z->bytes == 22 && z->at == a->at + 60);
    CHECK(safetensors_read(s, a, 7, back + 7, 53, &e) && safetensors_read(s, a, 0, back, 7, &e) && safetensors_read(s, z, 0, back + 60, 22, &e));
    CHECK(memcmp(back, data, sizeof data) == 0);
    CHECK(!safetensors_read(s, z, 20, back, 3, &e) && e.code == ERROR_INTERNAL);
  }
  safetensors_close(s);
}

/* The bytes that safetensors 0.8's own writer makes of the same tensors. */
TEST(reference_bytes) {
  clear();
  static const char header[] = "{\"__metadata__\":{\"format\":\"pt\"},\"norm\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,4]},"
                               "\"w\":{\"dtype\":\"BF16\",\"shape\":[1,3],\"data_offsets\":[4,10]}}      ";
  const struct safetensors_entry entries[] = {{"norm", "BF16", 1, {2}, 4}, {"w", "BF16", 2, {1, 3}, 6}};
  struct error e = {0};
  struct safetensors_writer *w = safetensors_create(in_folder("model.safetensors"), entries, 2, &e);
  CHECK(w && safetensors_put(w, "0123456789", 10, &e) && safetensors_finish(w, &e));
  char *text;
  size_t bytes;
  if (!file_read(in_folder("model.safetensors"), 1000, ERROR_SYSTEM, &text, &bytes, &e)) {
    FAIL("%s", e.message);
    return;
  }
  const size_t n = (sizeof header - 1) / 8 * 8;
  CHECK_EQ_I64(bytes, 8 + n + 10);
  CHECK((unsigned char)text[0] == n && text[1] == 0 && memcmp(text + 8, header, n) == 0 && memcmp(text + 8 + n, "0123456789", 10) == 0);
  free(text);
}

TEST(writer_counts) {
  clear();
  const struct safetensors_entry entry = {"w", "F32", 1, {2}, 8};
  struct error e = {0};
  struct safetensors_writer *w = safetensors_create(in_folder("a.safetensors"), &entry, 1, &e);
  CHECK(w && !safetensors_put(w, "123456789", 9, &e) && !safetensors_finish(w, &e));
  w = safetensors_create(in_folder("b.safetensors"), &entry, 1, &e);
  CHECK(w && safetensors_put(w, "1234567", 7, &e) && !safetensors_finish(w, &e) && strstr(e.message, "1 bytes"));
  CHECK(!safetensors_create(in_folder("b.safetensors"), &entry, 1, &e)); /* replaces nothing */
  CHECK(!safetensors_create(in_folder("no/such"), &entry, 1, &e) && strstr(e.message, "no/such"));
}

/* ---- broken headers ------------------------------------------------------------- */

#define T(name, dtype, shape, offsets) "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

TEST(headers) {
  clear();
  write_bytes("model.safetensors", "\x10\0\0", 3);
  refused("shorter than a length", "model.safetensors ends at byte 3", "length");
  header_refused("a length beyond 100,000,000", "{}", 100000001, 0, "offset 0: a header of 100000001 bytes");
  header_refused("a length of 2^63 - 1", "{}", INT64_MAX, 0, "offset 0: a header of 9223372036854775807 bytes, at most");
  header_refused("a length beyond the file", "{}", 3, 0, "offset 0: a header of 3 bytes in a file of 10");
  header_refused("no header", "", 0, 4, "offset 8: the header does not begin with {");
  header_refused("a blank first", " {}", -1, 0, "offset 8: the header does not begin with {");
  header_refused("a list", "[]", -1, 0, "offset 8: the header does not begin with {");
  header_refused("cut JSON", "{\"w\":{\"dtype\":\"F32\"", -1, 0, "offset 27: the header: ");
  header_refused("text after the JSON", "{} x", -1, 0, "offset ");
  header_refused("invalid UTF-8", "{\"w\xff\":1}", -1, 0, "offset ");
  header_refused("a zero byte inside", "{\"w\\u0000\":1}", -1, 0, "offset ");
  header_refused("a name twice", "{" T("w", "U8", "[1]", "[0,1]") "," T("w", "U8", "[1]", "[1,2]") "}", -1, 2, "offset ");
  header_refused("a key twice", "{\"w\":{\"dtype\":\"U8\",\"dtype\":\"I8\",\"shape\":[1],\"data_offsets\":[0,1]}}", -1, 1, "offset ");
  header_refused("an entry that is no object", "{\"w\":[0,4]}", -1, 4, "tensor w: its entry is no object");
  header_refused("no dtype", "{\"w\":{\"shape\":[1],\"data_offsets\":[0,4]}}", -1, 4, "tensor w: \"dtype\"");
  header_refused("an unknown dtype", "{" T("w", "F128", "[1]", "[0,16]") "}", -1, 16, "tensor w: dtype F128");
  header_refused("a dtype in small letters", "{" T("w", "f32", "[1]", "[0,4]") "}", -1, 4, "tensor w: dtype f32");
  header_refused("no shape", "{\"w\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", -1, 4, "tensor w: \"shape\"");
  header_refused("a negative extent", "{" T("w", "F32", "[-1,-1]", "[0,4]") "}", -1, 4, "tensor w: \"shape\"");
  header_refused("a real extent", "{" T("w", "F32", "[1.0]", "[0,4]") "}", -1, 4, "tensor w: \"shape\"");
  header_refused("an extent beyond 64 bits", "{" T("w", "F32", "[99999999999999999999]", "[0,4]") "}", -1, 4, "offset ");
  header_refused("elements beyond 64 bits", "{" T("w", "F32", "[4294967296,4294967296]", "[0,0]") "}", -1, 0, "tensor w: its shape has more elements");
  header_refused("bits beyond 64 bits", "{" T("w", "F64", "[4611686018427387904]", "[0,0]") "}", -1, 0, "tensor w: its shape has more elements");
  header_refused("nine dimensions", "{" T("w", "U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]") "}", -1, 1, "tensor w: it has more than 8 dimensions");
  header_refused("half a byte", "{" T("w", "F4", "[3]", "[0,2]") "}", -1, 2, "tensor w: its elements fill no whole number of bytes");
  header_refused("the key of old, offsets", "{\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"offsets\":[0,4]}}", -1, 4, "tensor w: \"data_offsets\"");
  header_refused("one offset", "{" T("w", "F32", "[1]", "[0]") "}", -1, 4, "tensor w: \"data_offsets\"");
  header_refused("three offsets", "{" T("w", "F32", "[1]", "[0,4,8]") "}", -1, 4, "tensor w: \"data_offsets\"");
  header_refused("offsets as text", "{" T("w", "F32", "[1]", "[\"0\",\"4\"]") "}", -1, 4, "tensor w: \"data_offsets\"");
  header_refused("a negative offset", "{" T("w", "F32", "[1]", "[-4,0]") "}", -1, 4, "tensor w: data_offsets [-4, 0)");
  header_refused("an end before its begin", "{" T("w", "F32", "[1]", "[8,4]") "}", -1, 8, "tensor w: data_offsets [8, 4)");
  header_refused("an end beyond the data", "{" T("w", "F32", "[2]", "[0,8]") "}", -1, 4, "tensor w: its data ends at offset 8, the file's data at 4");
  header_refused("an end near 2^63", "{" T("w", "U8", "[9223372036854775807]", "[0,9223372036854775807]") "}", -1, 4, "tensor w: ");
  header_refused("too few bytes for the shape", "{" T("w", "F32", "[3]", "[0,8]") "}", -1, 8, "tensor w: 8 bytes of data, its dtype and shape make 12");
  header_refused("a hole at the beginning", "{" T("w", "F32", "[1]", "[4,8]") "}", -1, 8, "offset 0 of the data belongs to no tensor (tensor w");
  header_refused("a hole", "{" T("v", "F32", "[1]", "[0,4]") "," T("w", "F32", "[1]", "[6,10]") "}", -1, 10, "offset 4 of the data belongs to no tensor (tensor w");
  header_refused("an overlap", "{" T("w", "F32", "[2]", "[0,8]") "," T("v", "F32", "[1]", "[4,8]") "}", -1, 8, "offset 8 of the data is where");
  header_refused("the same place twice", "{" T("w", "F32", "[1]", "[0,4]") "," T("v", "F32", "[1]", "[0,4]") "}", -1, 4, "offset 4 of the data is where");
  header_refused("bytes after the last tensor", "{" T("w", "F32", "[1]", "[0,4]") "}", -1, 5, "1 bytes after the last tensor");
  header_refused("data without a tensor", "{}", -1, 4, "4 bytes after the last tensor");
  header_refused("metadata that is no object", "{\"__metadata__\":1}", -1, 0, "__metadata__ is no object");
  header_refused("metadata that is no text", "{\"__metadata__\":{\"n\":1}}", -1, 0, "__metadata__.n is no text");
  header_refused("a tensor without a name", "{" T("", "U8", "[1]", "[0,1]") "}", -1, 1, "a tensor's name has 0 bytes");
  clear();
  refused("nothing there", folder, "neither model.safetensors nor");
  CHECK(mkdir(in_folder("model.safetensors"), 0777) == 0);
  refused("a folder in its place", "model.safetensors", "not a regular file");
  rmdir(in_folder("model.safetensors"));
}

/* What the format allows and files have: spaces after the JSON, tensors of no bytes, of no dimension. */
TEST(allowed) {
  struct error e = {0};
  clear();
  write_file("model.safetensors", "{\"__metadata__\":{},\"x\":{\"note\":1,\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[0,8]}," T("none", "F32", "[0]", "[8,8]") "}\n   ", -1, 8);
  struct safetensors *s = safetensors_open(folder, &e);
  CHECK(s && safetensors_count(s) == 2);
  safetensors_close(s);
  write_file("model.safetensors", "{}", -1, 0);
  s = safetensors_open(folder, &e);
  CHECK(s && safetensors_count(s) == 0 && !safetensors_find(s, "x"));
  safetensors_close(s);
}

/* A file that becomes shorter after it was opened. */
TEST(cut_later) {
  struct error e = {0};
  char byte[4];
  clear();
  write_file("model.safetensors", "{" T("w", "F32", "[1]", "[0,4]") "}", -1, 4);
  struct safetensors *s = safetensors_open(folder, &e);
  CHECK(s && truncate(in_folder("model.safetensors"), 20) == 0);
  CHECK(s && !safetensors_read(s, safetensors_find(s, "w"), 0, byte, 4, &e) && strstr(e.message, "inside tensor w"));
  safetensors_close(s);
}

/* ---- shards ------------------------------------------------------------------------ */

#define INDEX "model.safetensors.index.json"

static void index_refused(const char *what, const char *json, const char *said) {
  write_bytes(INDEX, json, strlen(json));
  refused(what, said, "");
}

TEST(indexes) {
  struct error e = {0};
  clear();
  write_file("a.safetensors", "{" T("v", "U8", "[1]", "[0,1]") "}", -1, 1);
  write_file("b.safetensors", "{" T("w", "U8", "[2]", "[0,2]") "}", -1, 2);
  static const char good[] = "{\"metadata\":{\"total_size\":3},\"weight_map\":{\"w\":\"b.safetensors\",\"v\":\"a.safetensors\"}}";
  write_bytes(INDEX, good, strlen(good));
  struct safetensors *s = safetensors_open(folder, &e);
  CHECK(s && safetensors_count(s) == 2);
  if (s) CHECK(strstr(safetensors_path(s, safetensors_find(s, "w")), "/b.safetensors") && strcmp(safetensors_tensor(s, 0)->name, "v") == 0);
  safetensors_close(s);

  index_refused("no JSON", "{", INDEX ": offset 1");
  index_refused("no map", "{\"metadata\":{}}", INDEX ": weight_map");
  index_refused("a name twice", "{\"weight_map\":{\"v\":\"a.safetensors\",\"v\":\"b.safetensors\"}}", INDEX ": offset");
  index_refused("a file elsewhere", "{\"weight_map\":{\"v\":\"../a.safetensors\"}}", "weight_map.v is no name");
  index_refused("a file that is no text", "{\"weight_map\":{\"v\":3}}", "weight_map.v is no name");
  index_refused("an absent file", "{\"weight_map\":{\"v\":\"c.safetensors\"}}", "c.safetensors");
  index_refused("a tensor it does not name", "{\"weight_map\":{\"v\":\"a.safetensors\",\"u\":\"b.safetensors\"}}", "does not name tensor w");
  index_refused("a tensor that is not there", "{\"weight_map\":{\"v\":\"a.safetensors\",\"w\":\"b.safetensors\",\"u\":\"b.safetensors\"}}", "tensor u is in b.safetensors, which does not hold it");
  index_refused("a tensor in the other file", "{\"weight_map\":{\"v\":\"b.safetensors\",\"w\":\"a.safetensors\"}}", "it says that tensor v is in b.safetensors");
  write_bytes(INDEX, good, strlen(good));
  write_file("b.safetensors", "{" T("w", "U8", "[1]", "[0,1]") "," T("v", "U8", "[1]", "[1,2]") "}", -1, 2);
  refused("a tensor in two files", "tensor v is in ", "/b.safetensors");
  write_file("b.safetensors", "{" T("w", "U8", "[2]", "[0,2]") "}", -1, 1);
  refused("a broken shard", "b.safetensors: tensor w", "offset 2");
  char fifo[256];
  snprintf(fifo, sizeof fifo, "%s/b.safetensors", folder);
  CHECK(unlink(fifo) == 0 && mkfifo(fifo, 0600) == 0);
  alarm(60); /* instead of hanging */
  refused("a fifo", "b.safetensors is not a regular file", "");
  alarm(0);
  write_file("model.safetensors", "{}", -1, 0);
  refused("both layouts", "model.safetensors and an index", folder);
  clear();
}

int main(void) {
  if (!mkdtemp(folder)) return 1;
  RUN(round_trip);
  RUN(reference_bytes);
  RUN(writer_counts);
  RUN(headers);
  RUN(allowed);
  RUN(cut_later);
  RUN(indexes);
  clear();
  rmdir(folder);
  return test_report();
}
