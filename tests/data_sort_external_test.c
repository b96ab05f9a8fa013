/* The external sort against qsort: any cut into runs, kills, damage, memory. */
#include <dirent.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "data/sort_external.h"
#include "tests/random.h"
#include "tests/test.h"

static char root[64], folder[80];

enum { KEY = 19 };

struct record {
  unsigned char key[KEY];
  unsigned char *payload;
  int64_t bytes;
};

static int by_key(const void *x, const void *y) {
  return memcmp(((const struct record *)x)->key, ((const struct record *)y)->key, KEY);
}

static struct record *make(int64_t n, int64_t longest) {
  struct record *r = calloc((size_t)n, sizeof *r);
  CHECK(r != NULL);
  for (int64_t i = 0; r && i < n; i++) {
    r[i].key[0] = (unsigned char)(next() % 5 * 60); /* five groups */
    for (int k = 1; k < KEY - 4; k++) r[i].key[k] = (unsigned char)(next() % (k < 9 ? 2 : 256)); /* many common beginnings */
    for (int k = 0; k < 4; k++) r[i].key[KEY - 1 - k] = (unsigned char)(i >> (8 * k));
    r[i].bytes = next() % 64 == 0 ? next() % longest : next() % 100;
    r[i].payload = malloc((size_t)r[i].bytes + 1);
    for (int64_t k = 0; k < r[i].bytes; k++) r[i].payload[k] = (unsigned char)next();
  }
  return r;
}

static void release(struct record *r, int64_t n) {
  for (int64_t i = 0; i < n; i++) free(r[i].payload);
  free(r);
}

static struct sort_request request(void) {
  return (struct sort_request){.folder = folder, .owner = {7, 8}, .key_bytes = KEY, .memory = 1 << 20, .state_bytes = 8};
}

/* Feeds r[*state..n) as a process would that goes on; stops after `most` records or at the end. */
static bool feed(struct sort_external *s, const struct record *r, int64_t n, int64_t most, int64_t every, struct error *e) {
  int64_t at = 0, flushed = 0;
  if (sort_external_state(s)) memcpy(&at, sort_external_state(s), 8);
  flushed = at;
  for (int64_t fed = 0; at < n && fed < most; at++, fed++) {
    if (!sort_external_fits(s, 1, r[at].bytes) || at - flushed >= every) {
      if (!sort_external_flush(s, &at, e)) return false;
      flushed = at;
    }
    if (!sort_external_add(s, r[at].key, r[at].payload, r[at].bytes, e)) return false;
  }
  return at < n || sort_external_flush(s, &at, e);
}

/* Are the groups first..last, merged, what `sorted` has of them? */
static bool agrees(struct sort_external *s, const struct record *sorted, int64_t n, int first, int last, struct error *e) {
  struct sort_merge *m = sort_merge_open(s, first, last, 1 << 20, e);
  if (!m) return false;
  struct sort_record got;
  int64_t i = 0;
  int more;
  bool same = true;
  while ((more = sort_merge_next(m, &got, e)) > 0) {
    while (i < n && (sorted[i].key[0] < first || sorted[i].key[0] > last)) i++;
    same = same && i < n && memcmp(got.key, sorted[i].key, KEY) == 0 && got.bytes == sorted[i].bytes &&
           (got.bytes == 0 || memcmp(got.payload, sorted[i].payload, (size_t)got.bytes) == 0);
    i++;
    if (!same) break;
  }
  while (i < n && (sorted[i].key[0] < first || sorted[i].key[0] > last)) i++;
  sort_merge_close(m);
  return same && more == 0 && i == n;
}

static void reset(void) {
  struct error e;
  CHECK(file_remove_tree(folder, ERROR_DATA, &e));
}

TEST(any_cut_any_level) {
  struct error e = {0};
  static const int64_t sizes[] = {0, 1, 100, 30000};
  static const int64_t every[] = {1 << 30, 1, 7, 1200};
  for (int k = 0; k < 4; k++) {
    const int64_t n = sizes[k];
    struct record *r = make(n, 300000), *sorted = malloc((size_t)(n + 1) * sizeof *sorted);
    if (n) memcpy(sorted, r, (size_t)n * sizeof *r);
    if (n > 0) qsort(sorted, (size_t)n, sizeof *sorted, by_key);
    reset();
    const struct sort_request q = request();
    struct sort_external *s = sort_external_open(&q, &e);
    CHECK(s && !sort_external_state(s));
    CHECK(feed(s, r, n, n, every[k], &e));
    CHECK_EQ_I64(sort_external_held(s), 0);
    if (sort_external_runs(s) <= 8) CHECK(agrees(s, sorted, n, 0, 255, &e));
    const int64_t before = sort_external_runs(s);
    for (int merges = 1; merges <= 8; merges *= 2) { /* 8 blocks: at most 8, 4, 2, 1 runs */
      CHECK(sort_external_reduce(s, merges, NULL, NULL, &e));
      CHECK(sort_external_runs(s) <= 8 / merges && sort_external_runs(s) >= 1);
      for (int group = 0; group < 256; group += 60) CHECK(agrees(s, sorted, n, group, group, &e));
      CHECK(agrees(s, sorted, n, 1, 130, &e) && agrees(s, sorted, n, 0, 255, &e));
    }
    if (k == 2) CHECK_EQ_I64(before, 15);
    if (k == 3) CHECK(before > 20);
    int64_t place;
    memcpy(&place, sort_external_state(s), 8);
    CHECK_EQ_I64(place, n);
    sort_external_close(s);
    release(r, n);
    free(sorted);
  }
}

static int files_in_folder(void) {
  DIR *d = opendir(folder);
  int n = 0;
  for (struct dirent *entry; d && (entry = readdir(d));) n += entry->d_name[0] != '.';
  if (d) closedir(d);
  return n;
}

/* Processes that die at any moment, one of them while it merges; each goes on where runs end. */
TEST(killed) {
  struct error e = {0};
  const int64_t n = 20000;
  struct record *r = make(n, 100000), *sorted = malloc((size_t)n * sizeof *sorted);
  if (n) memcpy(sorted, r, (size_t)n * sizeof *r);
  qsort(sorted, (size_t)n, sizeof *sorted, by_key);
  reset();
  const struct sort_request q = request();
  int64_t before = 0;
  for (int round = 0; round < 8; round++) {
    const int64_t most = 1 + next() % 6000;
    const pid_t child = fork();
    if (child == 0) {
      struct sort_external *s = sort_external_open(&q, &e);
      if (s && feed(s, r, n, most, 1 << 30, &e)) {
        if (round % 4 == 3) sort_external_reduce(s, 4, NULL, NULL, &e);
        raise(SIGKILL);
      }
      _exit(1);
    }
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFSIGNALED(status));
    struct sort_external *s = sort_external_open(&q, &e);
    int64_t place = 0;
    if (s && sort_external_state(s)) memcpy(&place, sort_external_state(s), 8);
    CHECK(place >= before);
    before = place;
    sort_external_close(s);
  }
  struct sort_external *s = sort_external_open(&q, &e);
  CHECK(s && feed(s, r, n, n, 1 << 30, &e) && sort_external_reduce(s, 1, NULL, NULL, &e));
  CHECK(agrees(s, sorted, n, 0, 255, &e));
  CHECK_EQ_I64(files_in_folder(), sort_external_runs(s));
  sort_external_close(s);
  release(r, n);
  free(sorted);
}

/* Every bit flip, cut and foreign owner is seen when the folder is opened: what is taken on is a
 * prefix of the flushes; damage done later is seen when it is read. */
TEST(damage) {
  struct error e = {0};
  const int64_t n = 6000;
  struct record *r = make(n, 20000), *sorted = malloc((size_t)n * sizeof *sorted);
  if (n) memcpy(sorted, r, (size_t)n * sizeof *r);
  qsort(sorted, (size_t)n, sizeof *sorted, by_key);
  const struct sort_request q = request();
  for (int round = 0; round < 14; round++) {
    reset();
    struct sort_external *s = sort_external_open(&q, &e);
    CHECK(s && feed(s, r, n, n, 1000, &e));
    const int64_t runs = sort_external_runs(s);
    CHECK(runs >= 6);
    if (round % 2) CHECK(sort_external_reduce(s, 2, NULL, NULL, &e));
    sort_external_close(s);
    const int64_t struck = round % 2 ? 0 : 1 + next() % (runs - 1);
    char path[400];
    DIR *d = opendir(folder);
    for (struct dirent *entry; d && (entry = readdir(d));) {
      int64_t first;
      if (sscanf(entry->d_name, "run-%" SCNd64, &first) == 1 && first == struck) snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
    }
    closedir(d);
    const int64_t size = file_size(path), at = (int64_t)next() % size;
    if (round % 5 == 4) {
      CHECK(truncate(path, at) == 0);
    } else {
      const int fd = open(path, O_RDWR);
      unsigned char byte = 0;
      CHECK(pread(fd, &byte, 1, at) == 1);
      byte ^= (unsigned char)(1 << next() % 8);
      CHECK(pwrite(fd, &byte, 1, at) == 1);
      close(fd);
    }
    s = sort_external_open(&q, &e);
    CHECK(s != NULL);
    int64_t place = 0;
    if (sort_external_state(s)) memcpy(&place, sort_external_state(s), 8);
    CHECK(place < n && (struck == 0) == (place == 0));
    CHECK(feed(s, r, n, n, 1000, &e) && sort_external_reduce(s, 1, NULL, NULL, &e) && agrees(s, sorted, n, 0, 255, &e));
    sort_external_close(s);
  }
  reset();
  struct sort_external *s = sort_external_open(&q, &e);
  CHECK(s && feed(s, r, n, n, 1 << 30, &e));
  char path[400];
  snprintf(path, sizeof path, "%s/run-00000000-00000000", folder);
  const int fd = open(path, O_RDWR);
  CHECK(fd >= 0 && pwrite(fd, "x", 1, 5000) == 1);
  close(fd);
  CHECK(!agrees(s, sorted, n, 0, 255, &e) && strstr(e.message, "run-00000000-00000000 is damaged: the block at byte 64"));
  sort_external_close(s);
  struct sort_request other = q;
  other.owner.low++;
  s = sort_external_open(&other, &e);
  CHECK(s && !sort_external_state(s) && files_in_folder() == 0);
  sort_external_close(s);
  release(r, n);
  free(sorted);
}

/* 64 MB of records in a budget of 1 MiB, with few files open. */
TEST(memory_and_files) {
  struct error e = {0};
  const pid_t child = fork();
  if (child == 0) {
    reset();
    struct rlimit files = {40, 40}, memory = {64 << 20, 64 << 20};
    setrlimit(RLIMIT_NOFILE, &files);
#ifndef __SANITIZE_ADDRESS__
    setrlimit(RLIMIT_AS, &memory);
#endif
    (void)memory;
    const struct sort_request q = request();
    struct sort_external *s = sort_external_open(&q, &e);
    static unsigned char payload[4000], key[KEY];
    bool ok = s != NULL;
    int64_t place = 0;
    for (int64_t i = 0; ok && i < 16000; i++) {
      for (int k = 0; k < KEY; k++) key[k] = (unsigned char)next();
      if (!sort_external_fits(s, 1, sizeof payload)) ok = sort_external_flush(s, &place, &e);
      ok = ok && sort_external_add(s, key, payload, sizeof payload, &e);
    }
    ok = ok && sort_external_flush(s, &place, &e) && sort_external_runs(s) > 60 && sort_external_reduce(s, 2, NULL, NULL, &e);
    struct sort_merge *m = ok ? sort_merge_open(s, 0, 255, 1 << 20, &e) : NULL;
    struct sort_record record;
    int64_t n = 0;
    while (m && sort_merge_next(m, &record, &e) > 0) n++;
    if (e.message[0]) printf("# %s\n", e.message);
    _exit(n == 16000 ? 0 : 1);
  }
  int status = 0;
  CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(unwritable) {
  struct error e = {0};
  reset();
  const struct sort_request q = request();
  struct sort_external *s = sort_external_open(&q, &e);
  static unsigned char payload[200000], key[KEY];
  int64_t place = 0;
  CHECK(s && sort_external_add(s, key, payload, sizeof payload, &e));
  struct rlimit before, small;
  CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
  small = before;
  small.rlim_cur = 100000;
  signal(SIGXFSZ, SIG_IGN);
  CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
  CHECK(!sort_external_flush(s, &place, &e) && strstr(e.message, "run-00000000-00000000.tmp: File too large") && strstr(e.hint, "space"));
  CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
  CHECK_EQ_I64(files_in_folder(), 0);
  sort_external_close(s);
}

int main(void) {
  const char *temporary = getenv("TMPDIR");
  snprintf(root, sizeof root, "%s/fp4d-sort-XXXXXX", temporary && strlen(temporary) < 40 ? temporary : P_tmpdir);
  if (!mkdtemp(root)) {
    perror("mkdtemp");
    return 1;
  }
  snprintf(folder, sizeof folder, "%s/work", root);
  RUN(any_cut_any_level);
  RUN(killed);
  RUN(damage);
  RUN(memory_and_files);
  RUN(unwritable);
  struct error e;
  if (!file_remove_tree(root, ERROR_DATA, &e)) printf("# %s\n", e.message);
  return test_report();
}
