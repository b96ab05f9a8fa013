/* What needs more than one key: derived defaults and checks.
 *
 * A check that reads a key with a problem of its own is left out, so one
 * mistake gives one line.
 */
#include <inttypes.h>
#include <string.h>

#include "data/data.h"
#include "trainer/config_load.h"
#include "trainer/suggest.h"

static bool given(struct config_loader *l, const char *key) { return config_record(l, key)->state == OPTION_GIVEN; }
static bool absent(struct config_loader *l, const char *key) { return config_record(l, key)->state == OPTION_DEFAULT; }

/* ---- run ------------------------------------------------------------------ */

static void resolve_run(struct config_loader *l) {
  struct config *c = l->config;
  if (!CONFIG_SOUND(l, "run.name", "run.folder")) return;
  if (absent(l, "run.name")) { /* the file's name */
    const char *stem = strrchr(l->name, '/') ? strrchr(l->name, '/') + 1 : l->name;
    size_t length = strlen(stem);
    if (length > 5 && strcmp(stem + length - 5, ".yaml") == 0) length -= 5;
    else if (length > 4 && strcmp(stem + length - 4, ".yml") == 0) length -= 4;
    char name[CONFIG_TEXT], why[OPTION_WHY];
    snprintf(name, sizeof name, "%.*s", (int)length, stem);
    const struct option *o = option_find(option_section("run"), "name");
    if (length >= sizeof name || !option_parse(o, c, name, why)) {
      config_problem(l, "run.name", "the file's name cannot serve as the run's name; give one");
      return;
    }
  }
  if (!c->run.name[0]) {
    config_problem(l, "run.name", "is empty");
  } else if (absent(l, "run.folder") || !c->run.folder[0]) {
    if (snprintf(c->run.folder, sizeof c->run.folder, "runs/%s", c->run.name) >= (int)sizeof c->run.folder)
      config_problem(l, "run.name", "is too long for the folder runs/NAME; give run.folder");
  }
}

/* ---- model ------------------------------------------------------------------ */

static void missing(struct config_loader *l, const char *key) {
  config_problem(l, key, "is missing: give it, or model.preset");
}

static bool resolve_rope_scaling(struct config_loader *l, const struct rope_scaling *preset,
                                 const struct rope_scaling *written, struct rope_scaling *out) {
  static const char *const keys[] = {"model.rope_scaling.factor", "model.rope_scaling.low_freq_factor",
                                     "model.rope_scaling.high_freq_factor",
                                     "model.rope_scaling.original_max_position"};
  if (absent(l, "model.rope_scaling")) {
    *out = *preset;
    return true;
  }
  *out = (struct rope_scaling){.enabled = written->enabled};
  if (!written->enabled) return true;
  bool good = true;
  for (int i = 0; i < 4; i++) {
    bool own = !absent(l, keys[i]);
    if (!own && !preset->enabled) {
      config_problem(l, keys[i], "is missing: rope_scaling needs all four keys");
      good = false;
    }
    const struct rope_scaling *from = own ? written : preset;
    if (i == 0) out->factor = from->factor;
    if (i == 1) out->low_freq_factor = from->low_freq_factor;
    if (i == 2) out->high_freq_factor = from->high_freq_factor;
    if (i == 3) out->original_max_position = from->original_max_position;
  }
  return good;
}

/* Each line of a shape's problems goes to the key that it names first. */
static void report_shape(struct config_loader *l, const char *message) {
  const struct option_section *s = option_section("model");
  char line[512];
  for (const char *m = message; *m;) {
    size_t length = strcspn(m, "\n");
    snprintf(line, sizeof line, "%.*s", (int)length, m);
    const char *first = NULL, *key = "vocab_size";
    for (int i = 0; i < s->n_rows; i++) {
      const char *found = strstr(line, s->rows[i].key);
      if (found && (!first || found < first)) {
        first = found;
        key = s->rows[i].key;
      }
    }
    char label[96];
    snprintf(label, sizeof label, "model.%s", key);
    if (line[0]) config_problem(l, label, "%s", line);
    m += length + (m[length] == '\n');
  }
}

/* False when there is no usable shape (and a problem says why). */
static bool resolve_model(struct config_loader *l) {
  static const char *const required[] = {"model.vocab_size", "model.hidden_size", "model.ffn_size", "model.n_layers",
                                         "model.n_heads", NULL};
  struct config *c = l->config;
  const struct option_section *s = option_section("model");
  const struct model_config written = c->model.shape;
  struct model_config *m = &c->model.shape;
  memset(m, 0, sizeof *m);
  *m = (struct model_config){.norm_eps = 1e-5, .rope_theta = 500000};
  bool preset = c->model.preset[0] != 0, good = CONFIG_SOUND(l, "model.preset");
  if (good && preset && !model_preset(c->model.preset, m)) {
    char all[256] = "";
    struct suggestion near = {c->model.preset, NULL, 0};
    for (const char *const *n = model_preset_names(); *n; n++) {
      size_t used = strlen(all);
      snprintf(all + used, sizeof all - used, "%s%s", used ? ", " : "", *n);
      suggest_offer(&near, *n);
    }
    config_problem(l, "model.preset", "'%s' is not one of: %s%s%s%s", c->model.preset, all,
                   near.best ? "; did you mean " : "", near.best ? near.best : "", near.best ? "?" : "");
    good = false;
  }
  const struct rope_scaling preset_scaling = m->rope_scaling;
  for (int i = 0; i < s->n_rows; i++) {
    const struct option *o = &s->rows[i];
    enum option_state state = l->record[s - option_sections][i].state;
    if (state == OPTION_BROKEN) good = false;
    if (state != OPTION_GIVEN || strcmp(o->key, "preset") == 0) continue;
    size_t inside = o->offset - offsetof(struct config, model.shape);
    memcpy((char *)m + inside, (const char *)&written + inside, o->size);
  }
  if (!CONFIG_SOUND(l, "model.preset")) return false;
  for (int i = 0; good && !preset && required[i]; i++)
    if (absent(l, required[i])) missing(l, required[i]);
  for (int i = 0; !preset && required[i]; i++) good &= !absent(l, required[i]);
  if (!preset && absent(l, "model.n_kv_heads")) m->n_kv_heads = m->n_heads;
  if (!resolve_rope_scaling(l, &preset_scaling, &written.rope_scaling, &m->rope_scaling) || !good) return false;
  if (absent(l, "model.head_dim") && (!preset || given(l, "model.hidden_size") || given(l, "model.n_heads"))) {
    if (m->hidden_size % m->n_heads != 0) {
      config_problem(l, "model.head_dim", "hidden_size %" PRId64 " is not a multiple of n_heads %" PRId64 "; give head_dim",
                     m->hidden_size, m->n_heads);
      return false;
    }
    m->head_dim = m->hidden_size / m->n_heads;
  }
  struct error e = {0};
  if (!model_config_check(m, &e)) {
    report_shape(l, e.message);
    return false;
  }
  return true;
}

/* ---- training ----------------------------------------------------------------- */

static void check_batch(struct config_loader *l) {
  const struct config *c = l->config;
  int64_t global = c->train.global_batch, local = c->train.local_batch, accumulation = c->train.accumulation,
          ranks = c->run.ranks;
  if (!CONFIG_SOUND(l, "train.global_batch", "train.local_batch")) return;
  if (global % local != 0) {
    config_problem(l, "train.global_batch", "%" PRId64 " is not a multiple of train.local_batch %" PRId64, global, local);
    return;
  }
  if (!CONFIG_SOUND(l, "train.accumulation", "run.ranks")) return;
  int64_t micro_batches = global / local; /* of all ranks */
  if (accumulation > 0 && ranks > 0 && (micro_batches % accumulation != 0 || micro_batches / accumulation != ranks))
    config_problem(l, "train.accumulation",
                   "global_batch %" PRId64 " is not local_batch %" PRId64 " x accumulation %" PRId64 " x run.ranks %" PRId64,
                   global, local, accumulation, ranks);
  else if (accumulation > 0 && micro_batches % accumulation != 0)
    config_problem(l, "train.accumulation",
                   "global_batch %" PRId64 " is not a multiple of local_batch %" PRId64 " x accumulation %" PRId64, global,
                   local, accumulation);
  else if (ranks > micro_batches)
    config_problem(l, "train.global_batch",
                   "%" PRId64 " is less than train.local_batch %" PRId64 " x run.ranks %" PRId64, global, local,
                   ranks);
}

static void check_train(struct config_loader *l) {
  struct config *c = l->config;
  if (CONFIG_SOUND(l, "train.master", "train.param_dtype")) {
    if (absent(l, "train.master")) c->train.master = c->train.param_dtype == DTYPE_BF16;
    if (c->train.master && c->train.param_dtype != DTYPE_BF16)
      config_problem(l, "train.master", "FP32 master weights need train.param_dtype bf16; fp32 parameters are their own master");
  }
  if (CONFIG_SOUND(l, "train.updates", "train.global_batch") && c->train.updates > ((int64_t)1 << 40) / c->train.global_batch)
    config_problem(l, "train.updates", "%" PRId64 " updates of train.global_batch %" PRId64 " samples are more than 2^40 samples",
                   c->train.updates, c->train.global_batch);
  if (CONFIG_SOUND(l, "train.seq_len", "train.local_batch") && c->train.seq_len > INT32_MAX / c->train.local_batch)
    config_problem(l, "train.seq_len", "%" PRId64 " x train.local_batch %" PRId64 " is more than 2^31 - 1 tokens",
                   c->train.seq_len, c->train.local_batch);
}

static void check_schedule(struct config_loader *l) {
  const struct config *c = l->config;
  int64_t warmup = c->optimizer.warmup_updates, decay = c->optimizer.decay_updates, updates = c->train.updates;
  enum schedule_kind schedule = c->optimizer.schedule;
  if (CONFIG_SOUND(l, "optimizer.min_lr", "optimizer.lr") && c->optimizer.min_lr > c->optimizer.lr)
    config_problem(l, "optimizer.min_lr", "%g is above optimizer.lr %g", c->optimizer.min_lr, c->optimizer.lr);
  bool fits = CONFIG_SOUND(l, "optimizer.warmup_updates", "train.updates");
  if (fits && warmup > updates) {
    config_problem(l, "optimizer.warmup_updates", "%" PRId64 " is more than train.updates %" PRId64, warmup, updates);
    fits = false;
  }
  if (!CONFIG_SOUND(l, "optimizer.schedule")) return;
  if (schedule == SCHEDULE_CONSTANT) {
    if (CONFIG_SOUND(l, "optimizer.min_lr") && c->optimizer.min_lr > 0)
      config_problem(l, "optimizer.min_lr", "has no meaning with optimizer.schedule constant; use cosine or wsd, or 0");
    if (CONFIG_SOUND(l, "optimizer.decay_updates") && decay > 0)
      config_problem(l, "optimizer.decay_updates", "has no meaning with optimizer.schedule constant; use cosine or wsd, or 0");
  }
  if (schedule == SCHEDULE_WSD && CONFIG_SOUND(l, "optimizer.decay_updates")) {
    if (decay == 0)
      config_problem(l, "optimizer.decay_updates", "optimizer.schedule wsd needs the length of its decay");
    else if (fits && decay > updates - warmup)
      config_problem(l, "optimizer.decay_updates",
                     "warmup_updates %" PRId64 " and decay_updates %" PRId64 " are more than train.updates %" PRId64, warmup,
                     decay, updates);
  }
}

/* ---- data, validation, faults ---------------------------------------------- */

static bool name_taken(const struct config *c, int64_t before, const char *name) {
  for (int64_t i = 0; i < before; i++)
    if (strcmp(c->data.source[i].name, name) == 0) return true;
  return false;
}

/* The last part of the path, letters that no name may have as _, with a number where it is taken. */
static void name_source(struct config *c, int64_t at) {
  struct data_source *s = &c->data.source[at];
  size_t end = strlen(s->path);
  while (end > 1 && s->path[end - 1] == '/') end--;
  size_t from = end;
  while (from > 0 && s->path[from - 1] != '/') from--;
  char stem[DATA_NAME - 12] = "source"; /* a dash and any number follow */
  size_t n = 0;
  for (size_t i = from; i < end && n + 1 < sizeof stem; i++) {
    const char x = s->path[i];
    const bool plain = (x >= 'a' && x <= 'z') || (x >= 'A' && x <= 'Z') || (x >= '0' && x <= '9') || x == '_' ||
                       (n > 0 && (x == '.' || x == '-'));
    stem[n++] = plain ? x : '_';
  }
  if (n > 0) stem[n] = 0;
  snprintf(s->name, sizeof s->name, "%s", stem);
  for (int number = 2; name_taken(c, at, s->name); number++) snprintf(s->name, sizeof s->name, "%s-%d", stem, number);
}

static void check_sources(struct config_loader *l) {
  struct config *c = l->config;
  if (!CONFIG_SOUND(l, "data.sources")) return;
  int64_t weighted = 0;
  for (int64_t i = 0; i < c->data.n_sources; i++) {
    struct data_source *s = &c->data.source[i];
    weighted += s->weight > 0;
    if (!s->path[0]) config_problem(l, "data.sources", "the path of source %" PRId64 " is empty", i + 1);
    if (!s->name[0])
      name_source(c, i);
    else if (name_taken(c, i, s->name))
      config_problem(l, "data.sources", "two sources are called %s", s->name);
  }
  if (weighted > 0 && weighted < c->data.n_sources)
    for (int64_t i = 0; i < c->data.n_sources; i++)
      if (!(c->data.source[i].weight > 0)) {
        config_problem(l, "data.sources", "%s has no weight, others have: give one to all or to none", c->data.source[i].name);
        break;
      }
  if (!CONFIG_SOUND(l, "data.stages")) return;
  for (int64_t i = 0; i < c->data.n_sources && weighted == 0 && c->data.n_stages == 0; i++)
    if (c->data.source[i].max_repetition != 1)
      config_problem(l, "data.sources", "%s has max_repetition %g and no weight: without weights every document comes once",
                     c->data.source[i].name, c->data.source[i].max_repetition);
  if (weighted > 0 && c->data.n_stages > 0)
    config_problem(l, "data.stages", "stand in place of the sources' weights; leave those out");
  for (int64_t i = 0; i < c->data.n_stages; i++) {
    const struct data_stage *s = &c->data.stage[i];
    double sum = 0;
    for (int64_t j = 0; j < s->n_weights; j++) sum += s->weight[j];
    if (s->n_weights != c->data.n_sources)
      config_problem(l, "data.stages", "stage %" PRId64 " has %" PRId64 " weights for %" PRId64 " sources", i + 1, s->n_weights,
                     c->data.n_sources);
    else if (!(sum > 0))
      config_problem(l, "data.stages", "stage %" PRId64 " gives no source a weight", i + 1);
    if (i == 0 ? s->at != 0 : s->at <= c->data.stage[i - 1].at)
      config_problem(l, "data.stages", "stage %" PRId64 " begins at %" PRId64 " tokens: the first begins at 0, each later one after the one before",
                     i + 1, s->at);
  }
}

static void check_skips(struct config_loader *l) {
  const struct config *c = l->config;
  if (!CONFIG_SOUND(l, "data.skip")) return;
  for (int64_t i = 1; i < c->data.n_skips; i++)
    if (c->data.skip[i].range[0] <= c->data.skip[i - 1].range[1])
      config_problem(l, "data.skip", "%" PRId64 "-%" PRId64 " does not come after %" PRId64 "-%" PRId64 ": give ascending ranges",
                     c->data.skip[i].range[0], c->data.skip[i].range[1], c->data.skip[i - 1].range[0], c->data.skip[i - 1].range[1]);
}

static void check_data(struct config_loader *l, bool model_good) {
  const struct config *c = l->config;
  if (CONFIG_SOUND(l, "data.train") && !c->data.train[0])
    config_problem(l, "data.train", "is missing: the token stream to train on");
  if (CONFIG_SOUND(l, "data.validation", "validation.every") && c->validation.every > 0 && !c->data.validation[0])
    config_problem(l, "validation.every", "needs data.validation, the token stream to validate on");
  if (CONFIG_SOUND(l, "data.train", "data.validation") && c->data.train[0] &&
      strcmp(c->data.train, c->data.validation) == 0)
    config_problem(l, "data.validation", "is the same file as data.train");
  check_sources(l);
  check_skips(l);
  if (CONFIG_SOUND(l, "data.tokenizer") && !c->data.tokenizer[0])
    config_problem(l, "data.tokenizer", "is empty: bytes, or a tokenizer's file");
  if (model_good && CONFIG_SOUND(l, "data.tokenizer") && strcmp(c->data.tokenizer, "bytes") == 0 &&
      c->model.shape.vocab_size < TOKENIZER_BYTES_VOCAB)
    config_problem(l, "model.vocab_size", "%" PRId64 " is less than the %d ids of data.tokenizer bytes",
                   c->model.shape.vocab_size, TOKENIZER_BYTES_VOCAB);
}

/* KIND@UPDATE[/RANK] */
static void check_fault(struct config_loader *l) {
  static const char *const kinds[] = {"nan", "spike", "stall", "kill", "save-error", NULL};
  const char *fault = l->config->fault;
  if (!CONFIG_SOUND(l, "fault") || !fault[0]) return;
  size_t kind = strcspn(fault, "@");
  bool known = false;
  for (int i = 0; kinds[i]; i++) known |= strlen(kinds[i]) == kind && strncmp(kinds[i], fault, kind) == 0;
  const char *s = fault + kind + (fault[kind] == '@');
  size_t update = strspn(s, "0123456789"), rank = s[update] == '/' ? strspn(s + update + 1, "0123456789") : 0;
  size_t length = update + (rank ? rank + 1 : 0);
  if (!known || fault[kind] != '@' || update == 0 || update > 9 || rank > 9 || s[length] != 0) {
    char shown[QUOTED];
    config_problem(l, "fault", "%s is not KIND@UPDATE or KIND@UPDATE/RANK with KIND nan, spike, stall, kill or save-error",
                   text_quote(fault, shown));
  }
}

void config_resolve(struct config_loader *l) {
  resolve_run(l);
  bool model_good = resolve_model(l);
  int64_t n_layers = l->config->model.shape.n_layers;
  /* Without a usable shape the route's words are still worth checking. */
  config_resolve_route(l, model_good && n_layers > 0 ? (int)n_layers : 32);
  check_batch(l);
  check_train(l);
  check_schedule(l);
  check_data(l, model_good);
  check_fault(l);
}
