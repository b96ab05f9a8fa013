/* fp4d diff: two checkpoints, tensor by tensor. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoints/checkpoint.h"
#include "kernels/formats.h"
#include "trainer/command.h"
#include "trainer/state.h"

enum { EXIT_DIFFER = 1, PIECE_BYTES = 32 << 20 };

struct diff_arguments {
  const char *a, *b;
  bool all;
};

const struct argument command_diff_arguments[] = {
    {.name = "A", .type = ARGUMENT_WORD, .offset = offsetof(struct diff_arguments, a),
     .help = "a step folder, or a folder of steps or a run's folder (then the newest whole one)"},
    {.name = "B", .type = ARGUMENT_WORD, .offset = offsetof(struct diff_arguments, b), .help = "the same"},
    {.name = "--all", .type = ARGUMENT_FLAG, .offset = offsetof(struct diff_arguments, all), .help = "name equal tensors as well"},
    {0}};

/* What of one tensor differs. */
struct difference {
  int64_t elements; /* whose bits differ */
  double most;      /* largest |a - b|; NaN where only one of them is a NaN */
  double error, energy; /* sums of squares of a - b, and of a */
};

static double value(const void *data, enum dtype dtype, int64_t i) {
  return dtype == DTYPE_F32 ? (double)((const float *)data)[i] : (double)bf16_decode(((const uint16_t *)data)[i]);
}

static void add_piece(struct difference *d, const void *a, enum dtype of_a, const void *b, enum dtype of_b, int64_t n) {
  if (of_a == of_b && memcmp(a, b, (size_t)n * dtype_bytes(of_a)) == 0) {
    for (int64_t i = 0; i < n; i++) d->energy += value(a, of_a, i) * value(a, of_a, i);
    return;
  }
  for (int64_t i = 0; i < n; i++) {
    const double x = value(a, of_a, i), y = value(b, of_b, i);
    const bool same = of_a == of_b ? memcmp((const char *)a + (size_t)i * dtype_bytes(of_a), (const char *)b + (size_t)i * dtype_bytes(of_b),
                                            dtype_bytes(of_a)) == 0
                                   : x == y;
    d->energy += x * x;
    if (same) continue;
    d->elements++;
    const double away = x == y ? 0 : fabs(x - y); /* infinities of one sign are equal */
    d->error += away * away;
    if (!(away <= d->most) && !isnan(d->most)) d->most = away;
  }
}

static bool compare(struct checkpoint *ka, const struct tensor_slice *ta, struct checkpoint *kb, const struct tensor_slice *tb,
                    struct difference *d, struct error *e) {
  const size_t row = (size_t)ta->cols * sizeof(float);
  const int64_t most = row < PIECE_BYTES ? (int64_t)(PIECE_BYTES / row) : 1;
  const int64_t piece = most < ta->rows ? most : ta->rows;
  struct tensor_slice a = *ta, b = *tb;
  a.data = malloc((size_t)piece * row + 1);
  b.data = malloc((size_t)piece * row + 1);
  bool good = (a.data && b.data) || error_set(e, ERROR_SYSTEM, "out of memory for %s", ta->name);
  *d = (struct difference){0};
  for (int64_t first = 0; good && first < ta->rows; first += piece) {
    a.first_row = b.first_row = first;
    a.rows = b.rows = ta->rows - first < piece ? ta->rows - first : piece;
    good = checkpoint_read(ka, &a, 1, e) && checkpoint_read(kb, &b, 1, e);
    if (good) add_piece(d, a.data, a.dtype, b.data, b.dtype, a.rows * a.cols);
  }
  free(a.data);
  free(b.data);
  return good;
}

/* Both lists are in the order of names. */
static bool compare_all(struct checkpoint *a, struct checkpoint *b, bool all, int *differ, struct error *e) {
  const int na = checkpoint_tensor_count(a), nb = checkpoint_tensor_count(b);
  int equal = 0;
  *differ = 0;
  printf("%-50s %14s %12s %12s\n", "tensor", "elements", "largest", "relative L2");
  for (int i = 0, j = 0; i < na || j < nb;) {
    const struct tensor_slice *x = i < na ? checkpoint_tensor(a, i) : NULL, *y = j < nb ? checkpoint_tensor(b, j) : NULL;
    const int order = !x ? 1 : !y ? -1 : strcmp(x->name, y->name);
    if (order != 0) {
      const struct tensor_slice *lone = order < 0 ? x : y;
      if (lone) printf("%-50s only in %s\n", lone->name, order < 0 ? "A" : "B");
      ++*differ;
      i += order < 0;
      j += order > 0;
      continue;
    }
    i++;
    j++;
    if (x->rows != y->rows || x->cols != y->cols) {
      printf("%-50s [%" PRId64 ", %" PRId64 "] and [%" PRId64 ", %" PRId64 "]\n", x->name, x->rows, x->cols, y->rows, y->cols);
      ++*differ;
      continue;
    }
    struct difference d;
    if (!compare(a, x, b, y, &d, e)) return false;
    if (x->dtype == y->dtype && d.elements == 0) {
      equal++;
      if (all) printf("%-50s %14s\n", x->name, "equal");
      continue;
    }
    ++*differ;
    printf("%-50s %14" PRId64 " %12.5g %12.5g%s%s%s%s\n", x->name, d.elements, d.most, d.error == 0 ? 0 : sqrt(d.error / d.energy),
           x->dtype == y->dtype ? "" : "  ", x->dtype == y->dtype ? "" : dtype_name(x->dtype), x->dtype == y->dtype ? "" : " and ",
           x->dtype == y->dtype ? "" : dtype_name(y->dtype));
  }
  printf("%d tensor%s equal, %d differ%s\n", equal, equal == 1 ? " is" : "s are", *differ, *differ == 1 ? "s" : "");
  return true;
}

int command_diff(int argc, char **argv) {
  struct diff_arguments arguments = {0};
  struct error e = {0};
  if (!arguments_parse(command_diff_arguments, argc, argv, &arguments, &e)) return command_fail(&e);
  int differ = 0;
  struct checkpoint *a = state_find(arguments.a, &e), *b = a ? state_find(arguments.b, &e) : NULL;
  if (b) printf("A: %s, update %" PRId64 "\nB: %s, update %" PRId64 "\n", checkpoint_path(a), checkpoint_update(a), checkpoint_path(b), checkpoint_update(b));
  const bool good = b && compare_all(a, b, arguments.all, &differ, &e);
  checkpoint_close(b);
  checkpoint_close(a);
  if (!good) return command_fail(&e);
  return differ ? EXIT_DIFFER : ERROR_NONE;
}
