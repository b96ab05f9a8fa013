/* What a rank of several holds of a model, and the units that ranks exchange. */
#include <stdio.h>
#include <string.h>

#include "comm/share.h"
#include "tests/model_rig.h"
#include "tests/test.h"

/* Two plain configurations and one whose widths are no multiples of 8. */
static struct model_config config_of(int i) {
  struct model_config c = rig_config();
  c.tied = i == 1;
  if (i == 2) c.hidden_size = 60, c.ffn_size = 100, c.vocab_size = 259;
  return c;
}

TEST(rows_of_ranks) {
  for (int i = 0; i < 3; i++) {
    const struct model_config c = config_of(i);
    struct model_shape s = rig_shape(1, DTYPE_BF16);
    struct rig whole, part;
    s.master = true;
    if (!rig_open(&whole, &c, "bf16", &s, 1)) {
      FAIL("no model");
      return;
    }
    CHECK_EQ_I64(model_share_elements(whole.m), whole.elements);
    for (s.world = 1; s.world <= 5; s.world++) {
      int64_t elements = 0, wrong = 0, moments = 0;
      for (s.rank = 0; s.rank < s.world; s.rank++) {
        if (!rig_open(&part, &c, "bf16", &s, 2)) {
          FAIL("no model");
          return;
        }
        CHECK(memcmp(model_params(part.m), model_params(whole.m), (size_t)whole.elements * 2) == 0);
        int64_t at = 0;
        for (int p = 0; p < model_param_number(part.m); p++) {
          const struct param *all = model_param(part.m, p);
          const struct param_share *own = model_param_share(part.m, p);
          CHECK_EQ_I64(own->first_row, share_row(all->rows, all->cols, s.rank, s.world));
          CHECK_EQ_I64(own->first_row + own->rows, share_row(all->rows, all->cols, s.rank + 1, s.world));
          CHECK_EQ_I64(own->offset, at);
          at += own->rows * all->cols;
          wrong += memcmp(model_master(part.m) + own->offset, model_master(whole.m) + all->offset + own->first_row * all->cols,
                          (size_t)(own->rows * all->cols) * sizeof(float)) != 0;
        }
        CHECK_EQ_I64(model_share_elements(part.m), at);
        for (int64_t k = 0; k < at; k++) moments += model_adam_m(part.m)[k] != 0 || model_adam_v(part.m)[k] != 0;
        elements += at;
        rig_close(&part);
      }
      CHECK_EQ_I64(elements, whole.elements);
      CHECK(wrong == 0 && moments == 0);
    }
    rig_close(&whole);
  }
}

/* Every parameter is of one unit, in order: the embedding, the blocks, the final norm and the head. */
TEST(units) {
  for (int i = 0; i < 3; i++) {
    const struct model_config c = config_of(i);
    const struct model_shape s = rig_shape(1, DTYPE_BF16);
    struct rig g;
    if (!rig_open(&g, &c, "bf16", &s, 1)) {
      FAIL("no model");
      return;
    }
    int next = 0;
    CHECK_EQ_I64(model_unit_number(g.m), c.n_layers + 2);
    for (int u = 0; u < model_unit_number(g.m); u++) {
      const struct model_unit unit = model_unit(g.m, u);
      CHECK_EQ_I64(unit.first, next);
      next += unit.n;
      for (int p = unit.first; p < next; p++)
        CHECK_EQ_I64(model_param(g.m, p)->layer, u == 0 || u == model_unit_number(g.m) - 1 ? -1 : u - 1);
    }
    CHECK_EQ_I64(next, model_param_number(g.m));
    CHECK_EQ_I64(model_unit(g.m, model_unit_number(g.m) - 1).n, c.tied ? 1 : 2);
    rig_close(&g);
  }
}

/* More ranks than there are rows to own. */
TEST(too_many_ranks) {
  const struct model_config c = config_of(2);
  struct model_shape s = rig_shape(1, DTYPE_BF16);
  struct route r;
  struct error e;
  struct arena a = arena_measure();
  struct device *d = device_open("cpu", 1, &e);
  s.world = 200; /* 259 rows of 60, at most: not 8 for each */
  CHECK(d && route_named("bf16", (int)c.n_layers, &r, &e) && !model_create(d, &a, &c, &r, &s, &e));
  CHECK_EQ_I64(e.code, ERROR_CONFIG);
  CHECK_STR(e.message, "rank 0 of 200 would own no row of any parameter");
  if (d) d->k->close(d);
}

int main(void) {
  RUN(rows_of_ranks);
  RUN(units);
  RUN(too_many_ranks);
  return test_report();
}
