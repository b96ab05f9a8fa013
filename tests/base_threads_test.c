/* The thread pool: each index once, worker numbers exclusive, no loop mixes
 * with the next. */
#include <stdatomic.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/threads.h"
#include "tests/test.h"

#define MOST 5
#define TASKS 1000

struct count {
  atomic_int by_index[TASKS];
  atomic_int busy[MOST]; /* a worker number is used by one thread at a time */
  atomic_int wrong;
  int workers;
};

static void count_index(void *context, int64_t index, int worker) {
  struct count *c = context;
  if (index < 0 || index >= TASKS || worker < 0 || worker >= c->workers) {
    atomic_fetch_add(&c->wrong, 1);
    return;
  }
  if (atomic_fetch_add(&c->busy[worker], 1) != 0) atomic_fetch_add(&c->wrong, 1);
  atomic_fetch_add(&c->by_index[index], 1);
  atomic_fetch_sub(&c->busy[worker], 1);
}

TEST(every_index_once) {
  static const int64_t sizes[] = {0, 1, 2, 3, 7, 64, TASKS};
  for (int workers = 1; workers <= MOST; workers++) {
    struct error e;
    struct threads *t = threads_create(workers, &e);
    CHECK(t != NULL);
    if (!t) return;
    CHECK_EQ_I64(threads_count(t), workers);
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
      static struct count c;
      memset(&c, 0, sizeof c);
      c.workers = workers;
      threads_run(t, sizes[s], count_index, &c);
      CHECK_EQ_I64(c.wrong, 0);
      for (int i = 0; i < TASKS; i++) CHECK_EQ_I64(c.by_index[i], i < sizes[s]);
    }
    threads_destroy(t);
  }
}

struct plain {
  int64_t value[3]; /* not atomic: a loop's end must order its writes */
  int64_t step;
};

static void add_step(void *context, int64_t index, int worker) {
  (void)worker;
  struct plain *p = context;
  p->value[index] += p->step;
}

TEST(loops_follow_one_another) {
  struct error e;
  struct threads *t = threads_create(3, &e);
  CHECK(t != NULL);
  if (!t) return;
  struct plain p = {0};
  int64_t expected = 0;
  for (int loop = 0; loop < 5000; loop++) {
    p.step = loop % 17;
    expected += p.step;
    threads_run(t, 3, add_step, &p);
    for (int i = 0; i < 3; i++) CHECK_EQ_I64(p.value[i], expected);
    if (loop % 500 == 0) usleep(200); /* let the workers fall asleep */
  }
  threads_destroy(t);
}

static void hold(void *context, int64_t index, int worker) {
  (void)index;
  (void)worker;
  /* Returns only once the other task runs too: there are two real threads. */
  atomic_int *inside = context;
  atomic_fetch_add(inside, 1);
  double limit = clock_seconds() + 100;
  while (atomic_load(inside) < 2 && clock_seconds() < limit) usleep(50);
}

TEST(tasks_run_side_by_side) {
  struct error e;
  struct threads *t = threads_create(2, &e);
  CHECK(t != NULL);
  if (!t) return;
  atomic_int inside = 0;
  double start = clock_seconds();
  threads_run(t, 2, hold, &inside);
  CHECK(clock_seconds() - start < 90);
  threads_destroy(t);
}

TEST(bad_count) {
  struct error e = {0};
  CHECK(threads_create(0, &e) == NULL);
  CHECK_EQ_I64(e.code, ERROR_INTERNAL);
  CHECK(threads_available() >= 1);
  threads_destroy(NULL);
}

TEST(clocks) {
  double a = clock_seconds(), w = clock_wall();
  usleep(2000);
  double b = clock_seconds();
  CHECK(b - a >= 0.002 && b - a < 60);
  CHECK(w > 1.7e9 && w < 1e11);
}

int main(void) {
  RUN(every_index_once);
  RUN(loops_follow_one_another);
  RUN(tasks_run_side_by_side);
  RUN(bad_count);
  RUN(clocks);
  return test_report();
}
