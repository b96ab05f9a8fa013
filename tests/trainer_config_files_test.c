/* Configuration files that include each other, that cannot be read, and those of this tree. */
#include <sys/stat.h>
#include <unistd.h>

#include "tests/config_rig.h"

static char folder[64];

static const char *put(const char *name, const char *text) {
  static char path[4][128];
  static int turn;
  char *p = path[turn++ % 4];
  snprintf(p, sizeof path[0], "%s/%s", folder, name);
  if (!file_publish(p, text, strlen(text), ERROR_SYSTEM, &failure)) FAIL("%s", failure.message);
  return p;
}

static bool load(const char *path) {
  failure = (struct error){0};
  return config_load(&config, path, NULL, 0, &failure);
}

static bool said(const char *what) {
  if (strstr(failure.message, what)) return true;
  printf("# said: %s\n", failure.message);
  return false;
}

TEST(includes) {
  char deep[96];
  snprintf(deep, sizeof deep, "%s/a/b", folder);
  CHECK(file_make_folder(deep, ERROR_SYSTEM, &failure));
  put("base.yaml", GOOD "optimizer: {lr: 1e-3, clip: 2}\nroute: mxfp4-row-sr\n");
  put("a/middle.yaml", "include: ../base.yaml\noptimizer:\n  clip: 3\n  beta1: 0.5\n");
  CHECK(load(put("a/b/top.yaml", "include: ../middle.yaml\nroute: bf16\noptimizer: {beta1: 0.25}\n")));
  CHECK_STR(failure.message, "");
  CHECK_STR(config.run.name, "top");
  CHECK(config.optimizer.lr == 1e-3 && config.optimizer.clip == 3 && config.optimizer.beta1 == 0.25);
  CHECK_STR(config.route.name, "bf16");

  put("route.yaml", "route:\n  name: mine\n  linears:\n" SPAN("all"));
  CHECK(load(put("list.yaml", "include: [base.yaml, route.yaml]\n")));
  CHECK_STR(config.route.name, "mine");

  /* The place of a problem is in the file where it stands. */
  put("bad.yaml", GOOD "optimizer: {lr: fast}\n");
  CHECK(!load(put("over.yaml", "include: bad.yaml\ntrain: {updates: 0}\n")));
  CHECK(said("/bad.yaml:3:17: optimizer.lr: 'fast'") && said("/over.yaml:2:18: train.updates: '0'"));
  CHECK_EQ_I64(lines(failure.message), 2);

  put("loop-a.yaml", "include: loop-b.yaml\n");
  put("loop-b.yaml", "include: ./loop-a.yaml\n");
  char path[128];
  snprintf(path, sizeof path, "%s/loop-a.yaml", folder);
  CHECK(!load(path));
  CHECK(said("loop-b.yaml:1:10: include:") && said("in a circle"));
  CHECK_EQ_I64(lines(failure.message), 1);
  CHECK(!load(put("self.yaml", "include: self.yaml\n")));
  CHECK(said("in a circle"));
  for (int i = 0; i < 12; i++) {
    char name[32], text[64];
    snprintf(name, sizeof name, "deep%d.yaml", i);
    snprintf(text, sizeof text, "include: deep%d.yaml\n", i + 1);
    put(name, text);
  }
  snprintf(path, sizeof path, "%s/deep0.yaml", folder);
  CHECK(!load(path));
  CHECK(said("inside each other"));
}

TEST(files) {
  CHECK(!load("no/such/file.yaml"));
  CHECK(said("cannot open no/such/file.yaml: No such file"));
  CHECK_EQ_I64(failure.code, ERROR_CONFIG);
  CHECK(!load(folder));
  CHECK(said("is a folder"));
  CHECK_EQ_I64(failure.code, ERROR_CONFIG);
  CHECK(!load(put("empty.yaml", "")));
  CHECK(said("is empty"));
  static char big[(1 << 20) + 100];
  memset(big, '#', sizeof big - 1);
  CHECK(!load(put("big.yaml", big)));
  CHECK(said("more than the 1048576 allowed"));
  if (geteuid() != 0) { /* nothing is unreadable to root */
    const char *path = put("secret.yaml", GOOD);
    CHECK(chmod(path, 0) == 0);
    CHECK(!load(path));
    CHECK(said("Permission denied"));
  }
  CHECK(!load(put("odd name.yaml", GOOD)));
  CHECK(said("run.name: the file's name cannot serve as the run's name; give one"));
  /* A zero byte in the file, and Windows' line ends and byte order mark. */
  char path[128];
  snprintf(path, sizeof path, "%s/zero.yaml", folder);
  CHECK(file_publish(path, GOOD "log: {\0}\n", sizeof GOOD "log: {\0}\n" - 1, ERROR_SYSTEM, &failure));
  CHECK(!load(path));
  CHECK(said("zero.yaml:3:7: not text in UTF-8: control characters are not allowed"));
  CHECK(load(put("windows.yaml", "\xef\xbb\xbfmodel: {preset: tiny}\r\ndata: {train: t}\r\n")));
  CHECK_STR(config.data.train, "t");
}

TEST(committed_configs) {
  static const char *const runs[] = {"configs/demo-bf16.yaml", "configs/demo-mxfp4.yaml", "configs/llama3-8b/bf16.yaml",
                                     "configs/llama3-8b/mxfp4-row-sr.yaml"};
  for (int i = 0; i < 4; i++)
    if (!load(runs[i])) FAIL("%s", failure.message);
  CHECK(load(runs[3]));
  CHECK_EQ_I64(model_config_param_count(&config.model.shape), 8030261248);
  CHECK_EQ_I64(config.train.updates * config.train.global_batch * config.train.seq_len, 160000114688);
  CHECK(config.optimizer.lr == 3e-4 && config.optimizer.beta2 == 0.95 && config.optimizer.eps == 1e-8);
  /* models and routes say what the program's own tables say */
  static const char *const models[] = {"llama3-8b", "llama3.1-8b", "llama3.2-1b", "llama3.2-3b"};
  for (int i = 0; i < 4; i++) {
    char text[200];
    struct model_config preset;
    snprintf(text, sizeof text, "include: configs/models/%s.yaml\ndata: {train: t}\n", models[i]);
    if (!parse(text, NULL, 0)) FAIL("%s", failure.message);
    CHECK(model_preset(models[i], &preset));
    struct model_config *m = &config.model.shape;
    CHECK(m->vocab_size == preset.vocab_size && m->hidden_size == preset.hidden_size && m->ffn_size == preset.ffn_size);
    CHECK(m->n_layers == preset.n_layers && m->n_heads == preset.n_heads && m->n_kv_heads == preset.n_kv_heads);
    CHECK(m->head_dim == preset.head_dim && m->tied == preset.tied && m->norm_eps == preset.norm_eps);
    CHECK(m->rope_theta == preset.rope_theta && m->rope_scaling.enabled == preset.rope_scaling.enabled);
    CHECK(m->rope_scaling.factor == preset.rope_scaling.factor);
  }
  for (const char *const *route = route_names(); *route; route++)
    for (int n_layers = 8; n_layers <= 32; n_layers += 24) {
      char text[200];
      struct route row;
      snprintf(text, sizeof text, "include: configs/routes/%s.yaml\n" "model: {preset: tiny, n_layers: %d}\ndata: {train: t}\n", *route, n_layers);
      if (!parse(text, NULL, 0)) FAIL("%s", failure.message);
      const struct route *file = &config.route;
      CHECK(route_named(*route, n_layers, &row, &failure));
      CHECK_STR(file->name, *route);
      CHECK(file->activations == row.activations && file->forward_tail == row.forward_tail &&
            file->attention_qk == row.attention_qk && file->attention_pv == row.attention_pv &&
            file->attention_d_out == row.attention_d_out && same_linear(&file->head, &row.head));
      for (int i = 0; i < n_layers * LINEAR_SITES; i++) {
        const enum linear_site site = (enum linear_site)(i % LINEAR_SITES);
        if (!same_linear(route_linear(file, i / LINEAR_SITES, site), route_linear(&row, i / LINEAR_SITES, site)))
          FAIL("configs/routes/%s.yaml: %s of block %d of %d is not the table's", *route, linear_name(site), i / LINEAR_SITES + 1, n_layers);
      }
    }
}

int main(void) {
  snprintf(folder, sizeof folder, "%s/fp4d-config-XXXXXX", P_tmpdir);
  if (!mkdtemp(folder)) return 1;
  RUN(includes);
  RUN(files);
  RUN(committed_configs);
  CHECK(file_remove_tree(folder, ERROR_SYSTEM, &failure));
  return test_report();
}
