/* The tables.  To add an option: a member in struct config and a row here. */
#include "trainer/options.h"

#include <math.h>
#include <string.h>

#define PLACE(type, member) .offset = offsetof(type, member), .size = sizeof(((type *)0)->member)
#define IN(member) PLACE(struct config, member)

#define COUNT_MAX 2147483647 /* updates: 31 bits of the random counter */
#define ANY_MAX INT64_MAX

static const struct option_word schedules[] = {
    {"constant", SCHEDULE_CONSTANT}, {"cosine", SCHEDULE_COSINE}, {"wsd", SCHEDULE_WSD}, {NULL, 0}};
static const struct option_word policies[] = {
    {"record", DIVERGENCE_RECORD}, {"halt", DIVERGENCE_HALT}, {"skip", DIVERGENCE_SKIP}, {NULL, 0}};
static const struct option_word nonfinite_policies[] = {
    {"halt", DIVERGENCE_HALT}, {"skip", DIVERGENCE_SKIP}, {NULL, 0}};
static const struct option_word recomputes[] = {
    {"none", RECOMPUTE_NONE}, {"boundaries", RECOMPUTE_BOUNDARIES}, {"every-nth", RECOMPUTE_EVERY_NTH},
    {"all", RECOMPUTE_ALL}, {NULL, 0}};
static const struct option_word dtypes[] = {{"bf16", DTYPE_BF16}, {"fp32", DTYPE_F32}, {NULL, 0}};
static const struct option_word data_formats[] = {
    {"auto", DATA_AUTO}, {"text", DATA_TEXT}, {"jsonl", DATA_JSONL}, {"megatron", DATA_MEGATRON}, {"llmc", DATA_LLMC},
    {"raw-u16", DATA_RAW_U16}, {"raw-u32", DATA_RAW_U32}, {"npy", DATA_NPY}, {NULL, 0}};
static const struct option_word utf8_policies[] = {
    {"replace", DATA_UTF8_REPLACE}, {"drop", DATA_UTF8_DROP}, {"error", DATA_UTF8_ERROR}, {NULL, 0}};
static const struct option_word dedups[] = {
    {"none", DATA_DEDUP_NONE}, {"exact", DATA_DEDUP_EXACT}, {"minhash", DATA_DEDUP_MINHASH}, {NULL, 0}};
static const struct option_word boundaries[] = {
    {"predict", DATA_BOUNDARY_PREDICT}, {"mask", DATA_BOUNDARY_MASK}, {NULL, 0}};
static const struct option_word attentions[] = {
    {"whole", DATA_ATTENTION_WHOLE}, {"document", DATA_ATTENTION_DOCUMENT}, {NULL, 0}};
static const struct option_word compressions[] = {{"zstd", CHECKPOINT_ZSTD}, {"store", CHECKPOINT_STORE}, {NULL, 0}};
static const struct option_word failures[] = {{"continue", CHECKPOINT_CONTINUE}, {"stop", CHECKPOINT_STOP}, {NULL, 0}};
static const struct option_word levels[] = {{"error", LOG_ERROR}, {"warning", LOG_WARNING}, {"info", LOG_INFO}, {"debug", LOG_DEBUG}, {NULL, 0}};

static const struct option top_rows[] = {
    {.key = "route", .type = OPTION_ROUTE, .fallback = "bf16",
     .help = "Which format each contraction's operands take: a built-in route by name, or a mapping (below)."},
    {.key = "fault", .type = OPTION_TEXT, IN(fault), .fallback = "",
     .help = "Testing aid: one injected fault, KIND@UPDATE or KIND@UPDATE/RANK with KIND nan, spike, stall, kill or "
             "save-error. Empty: none."},
};

static const struct option run_rows[] = {
    {.key = "name", .type = OPTION_TEXT, IN(run.name), .name_like = true, .fallback_words = "the file's name without .yaml",
     .help = "The run's name, in records and in the default folder."},
    {.key = "folder", .type = OPTION_TEXT, IN(run.folder), .fallback_words = "runs/ and the name",
     .help = "Where metrics.jsonl and checkpoints go."},
    {.key = "seed", .type = OPTION_INTEGER, IN(run.seed), .low = 0, .high = ANY_MAX, .fallback = "42",
     .help = "Seeds initial parameters and stochastic rounding."},
    {.key = "backend", .type = OPTION_TEXT, IN(run.backend), .name_like = true, .fallback = "cpu",
     .help = "What computes; `fp4d check` says whether this build has it."},
    {.key = "threads", .type = OPTION_INTEGER, IN(run.threads), .low = 0, .high = 4096, .fallback = "0",
     .help = "Worker threads of a rank. 0: cores of the host shared among its ranks."},
    {.key = "ranks", .type = OPTION_INTEGER, IN(run.ranks), .low = 0, .high = 1048576, .fallback = "0",
     .help = "World size that this run expects; another one is refused at start. 0: any."},
    {.key = "stop_after_update", .type = OPTION_INTEGER, IN(run.stop_after_update), .low = 0, .high = COUNT_MAX,
     .fallback = "0", .unit = "updates",
     .help = "Checkpoint and leave (exit code 75) after this update: for time slices. 0: off."},
};

static const struct option model_rows[] = {
    {.key = "preset", .type = OPTION_TEXT, IN(model.preset), .name_like = true, .fallback = "",
     .help = "A named model as the base; the keys below override it. Empty: none, the shape is all given here."},
    {.key = "vocab_size", .type = OPTION_INTEGER, IN(model.shape.vocab_size), .low = 2, .high = 16777216,
     .fallback_words = "the preset's", .unit = "tokens", .help = "Rows of the embedding table and of the head."},
    {.key = "hidden_size", .type = OPTION_INTEGER, IN(model.shape.hidden_size), .low = 1, .high = 1048576,
     .fallback_words = "the preset's", .help = "Width of the residual stream."},
    {.key = "ffn_size", .type = OPTION_INTEGER, IN(model.shape.ffn_size), .low = 1, .high = 1048576,
     .fallback_words = "the preset's", .help = "Width of gate and up."},
    {.key = "n_layers", .type = OPTION_INTEGER, IN(model.shape.n_layers), .low = 1, .high = 450,
     .fallback_words = "the preset's", .help = "Blocks."},
    {.key = "n_heads", .type = OPTION_INTEGER, IN(model.shape.n_heads), .low = 1, .high = 65536,
     .fallback_words = "the preset's", .help = "Query heads."},
    {.key = "n_kv_heads", .type = OPTION_INTEGER, IN(model.shape.n_kv_heads), .low = 1, .high = 65536,
     .fallback_words = "the preset's, else n_heads", .help = "Key and value heads (grouped-query attention)."},
    {.key = "head_dim", .type = OPTION_INTEGER, IN(model.shape.head_dim), .low = 1, .high = 65536,
     .fallback_words = "the preset's; hidden_size / n_heads where one of these is given",
     .help = "Width of a head."},
    {.key = "tied", .type = OPTION_BOOL, IN(model.shape.tied), .fallback_words = "the preset's, else false",
     .help = "The head is the embedding table."},
    {.key = "norm_eps", .type = OPTION_NUMBER, IN(model.shape.norm_eps), .lower = 0, .lower_open = true, .upper = 1,
     .upper_open = true, .fallback_words = "the preset's, else 1e-05", .help = "Epsilon of RMSNorm."},
    {.key = "rope_theta", .type = OPTION_NUMBER, IN(model.shape.rope_theta), .lower = 1, .lower_open = true,
     .upper = 1e12, .fallback_words = "the preset's, else 500000", .help = "Base of the rotary frequencies."},
    {.key = "rope_scaling", .type = OPTION_NONE, IN(model.shape.rope_scaling.enabled),
     .fallback_words = "the preset's, else none",
     .help = "Llama-3.1 scaling of the rotary frequencies: the four keys below as a mapping, or none."},
    {.key = "rope_scaling.factor", .type = OPTION_NUMBER, IN(model.shape.rope_scaling.factor), .lower = 1,
     .upper = 1e6, .fallback_words = "the preset's", .help = "How far the low frequencies are stretched."},
    {.key = "rope_scaling.low_freq_factor", .type = OPTION_NUMBER, IN(model.shape.rope_scaling.low_freq_factor),
     .lower = 0, .lower_open = true, .upper = 1e6, .fallback_words = "the preset's",
     .help = "Wavelengths above original_max_position over this are scaled fully."},
    {.key = "rope_scaling.high_freq_factor", .type = OPTION_NUMBER, IN(model.shape.rope_scaling.high_freq_factor),
     .lower = 0, .lower_open = true, .upper = 1e6, .fallback_words = "the preset's",
     .help = "Wavelengths below original_max_position over this are left alone."},
    {.key = "rope_scaling.original_max_position", .type = OPTION_INTEGER,
     IN(model.shape.rope_scaling.original_max_position), .low = 1, .high = 1073741824,
     .fallback_words = "the preset's", .unit = "tokens", .help = "Context length that was trained before scaling."},
};

#define LIST(number, item) .count = offsetof(struct config, number), .each = sizeof(((struct config *)0)->item[0])
static const struct option data_rows[] = {
    {.key = "sources", .type = OPTION_ENTRIES, IN(data.source), LIST(data.n_sources, data.source), .entries = "data.sources[]",
     .single = "path", .fallback = "", .help = "What `fp4d prepare` makes a stream of, or `fp4d index` an index (below)."},
    {.key = "stages", .type = OPTION_ENTRIES, IN(data.stage), LIST(data.n_stages, data.stage), .entries = "data.stages[]",
     .fallback = "", .help = "Weights of the sources that change along the stream (below), in place of the sources' own."},
    {.key = "tokens", .type = OPTION_INTEGER, IN(data.tokens), .low = 0, .high = ANY_MAX, .fallback = "0", .unit = "tokens",
     .help = "The training stream ends with the document that reaches this many. 0: as many as the sources give."},
    {.key = "train", .type = OPTION_TEXT, IN(data.train), .fallback_words = "none: must be given",
     .help = "Token stream or index to train on."},
    {.key = "validation", .type = OPTION_TEXT, IN(data.validation), .fallback = "",
     .help = "Token stream or index to validate on. Empty: no validation."},
    {.key = "validation_fraction", .type = OPTION_NUMBER, IN(data.validation_fraction), .lower = 0, .upper = 1,
     .upper_open = true, .fallback = "0.01",
     .help = "Share of documents that are kept for validation, by a hash of their content."},
    {.key = "seed", .type = OPTION_INTEGER, IN(data.seed), .low = 0, .high = ANY_MAX, .fallback = "1",
     .help = "Keys the order of documents and of samples."},
    {.key = "shuffle_documents", .type = OPTION_BOOL, IN(data.shuffle_documents), .fallback = "true",
     .help = "Documents in keyed order. false: as they stand in the sources."},
    {.key = "shuffle_samples", .type = OPTION_BOOL, IN(data.shuffle_samples), .fallback = "false",
     .help = "Samples in keyed order in the first epoch too. Later epochs always are."},
    {.key = "skip", .type = OPTION_ENTRIES, IN(data.skip), LIST(data.n_skips, data.skip), .entries = "data.skip[]",
     .single = "samples", .fallback = "", .help = "Samples of the order that the run leaves out: ranges FIRST-LAST, ascending."},
    {.key = "allow_change", .type = OPTION_BOOL, IN(data.allow_change), .fallback = "false",
     .help = "Resume although the stream's content, train.seq_len or data.seed is another than at the checkpoint."},
    {.key = "tokenizer", .type = OPTION_TEXT, IN(data.tokenizer), .fallback = "bytes",
     .help = "How text becomes token ids: bytes (256 byte values, begin and end of text), or a tokenizer's file."},
    {.key = "bos", .type = OPTION_BOOL, IN(data.bos), .fallback = "true", .help = "`prepare` begins each document with the tokenizer's BOS."},
    {.key = "eos", .type = OPTION_BOOL, IN(data.eos), .fallback = "true", .help = "`prepare` ends each document with the tokenizer's EOS."},
    {.key = "invalid_utf8", .type = OPTION_WORD, IN(data.invalid_utf8), .words = utf8_policies, .fallback = "replace",
     .help = "Bytes that are no UTF-8: become U+FFFD; or the document is dropped; or `prepare` stops. All are counted. The tokenizer bytes takes any."},
    {.key = "dedup", .type = OPTION_WORD, IN(data.dedup), .words = dedups, .fallback = "exact",
     .help = "Documents that `prepare` drops: none; those whose text is an earlier one's but for case and white space; near-duplicates as well."},
    {.key = "minhash_threshold", .type = OPTION_NUMBER, IN(data.minhash_threshold), .lower = 0, .upper = 1, .fallback = "0.75",
     .help = "dedup minhash: least estimated Jaccard similarity of two documents' word 5-grams."},
    {.key = "overlap_report", .type = OPTION_BOOL, IN(data.overlap_report), .fallback = "false",
     .help = "`prepare` measures how many of the training documents share a word 13-gram with validation."},
    {.key = "prepare_memory", .type = OPTION_INTEGER, IN(data.prepare_memory), .low = 16777216, .high = ANY_MAX,
     .fallback = "1073741824", .unit = "bytes", .help = "What `prepare` holds at once of documents; the rest is sorted on the disk."},
    {.key = "boundary", .type = OPTION_WORD, IN(data.boundary), .words = boundaries, .fallback = "predict",
     .help = "The target that begins another document: predicted like any, or not counted."},
    {.key = "attention", .type = OPTION_WORD, IN(data.attention), .words = attentions, .fallback = "whole",
     .help = "A position attends to the whole sample before it, or to its own document."},
};

#define SOURCE(member) PLACE(struct data_source, member)
static const struct option source_rows[] = {
    {.key = "path", .type = OPTION_TEXT, SOURCE(path), .fallback_words = "none: must be given",
     .help = "A file, or a folder searched for files of the format."},
    {.key = "name", .type = OPTION_TEXT, SOURCE(name), .name_like = true, .fallback = "",
     .help = "What records call the source. Empty: the path's last part."},
    {.key = "weight", .type = OPTION_NUMBER, SOURCE(weight), .lower = 0, .upper = 1e12, .fallback = "0",
     .help = "Share of the stream's tokens, to be normalised. 0 in every source: no mixing, every document once."},
    {.key = "max_repetition", .type = OPTION_NUMBER, SOURCE(max_repetition), .lower = 0, .lower_open = true, .upper = 1e6,
     .fallback = "1", .help = "With a weight: its tokens are used at most this many times; then the stream ends."},
    {.key = "format", .type = OPTION_WORD, SOURCE(format), .words = data_formats, .fallback = "auto",
     .help = "text and jsonl are for `prepare`, the others are token files for `index`. auto: by name and magic."},
    {.key = "text_key", .type = OPTION_TEXT, SOURCE(text_key), .fallback = "text", .help = "Of a JSON line: the key of the text."},
    {.key = "bos", .type = OPTION_INTEGER, SOURCE(bos), .low = -1, .high = 16777215, .fallback = "-1", .unit = "token id",
     .help = "In token files without document tables, a document begins at this id. -1: none."},
    {.key = "eos", .type = OPTION_INTEGER, SOURCE(eos), .low = -1, .high = 16777215, .fallback = "-1", .unit = "token id",
     .help = "The same: a document ends after this id."},
};

static const struct option stage_rows[] = {
    {.key = "at", .type = OPTION_INTEGER, PLACE(struct data_stage, at), .low = 0, .high = ANY_MAX,
     .fallback_words = "none: must be given", .unit = "tokens",
     .help = "The weights hold from the first document that begins at or after this many tokens."},
    {.key = "weights", .type = OPTION_NUMBERS, PLACE(struct data_stage, weight), .count = offsetof(struct data_stage, n_weights),
     .each = sizeof(double), .lower = 0, .upper = 1e12, .fallback_words = "none: must be given",
     .help = "One for each source, in their order; 0: not used in this stage."},
};

static const struct option skip_rows[] = {
    {.key = "samples", .type = OPTION_RANGE, PLACE(struct data_skip, range), .low = 0, .high = ANY_MAX,
     .fallback_words = "none: must be given", .help = "First and last sample left out, counted from 0 over all epochs."},
};

static const struct option train_rows[] = {
    {.key = "updates", .type = OPTION_INTEGER, IN(train.updates), .low = 1, .high = COUNT_MAX, .fallback = "1000",
     .unit = "updates", .help = "Length of the run."},
    {.key = "global_batch", .type = OPTION_INTEGER, IN(train.global_batch), .low = 1, .high = 16777216,
     .fallback = "8", .unit = "samples", .help = "Samples of an update, over all ranks."},
    {.key = "local_batch", .type = OPTION_INTEGER, IN(train.local_batch), .low = 1, .high = 65536, .fallback = "1",
     .unit = "samples", .help = "Samples that a rank computes at once."},
    {.key = "accumulation", .type = OPTION_INTEGER, IN(train.accumulation), .low = 0, .high = 16777216,
     .fallback = "0", .unit = "micro-batches",
     .help = "Micro-batches of a rank in an update, equal on all. 0: global_batch / (local_batch x ranks), or where that is not whole one more on the first ranks than on the others."},
    {.key = "seq_len", .type = OPTION_INTEGER, IN(train.seq_len), .low = 1, .high = 4194304, .fallback = "1024",
     .unit = "tokens", .help = "Tokens of a sample."},
    {.key = "recompute", .type = OPTION_WORD, IN(train.recompute), .words = recomputes, .fallback = "none",
     .help = "What backward computes again instead of keeping it; the bits are the same. boundaries: of every block the linears' inputs that "
             "RMSNorm, SwiGLU and quantisation make, no contraction and no attention. every-nth, all: the whole forward pass of blocks."},
    {.key = "recompute_every", .type = OPTION_INTEGER, IN(train.recompute_every), .low = 1, .high = 450,
     .fallback = "2", .unit = "blocks", .help = "With recompute: every-nth, blocks n, 2n, ... are recomputed."},
    {.key = "head_chunk", .type = OPTION_INTEGER, IN(train.head_chunk), .low = 0, .high = 1073741824,
     .fallback = "0", .unit = "tokens", .help = "Tokens whose logits exist at once. 0: chosen."},
    {.key = "param_dtype", .type = OPTION_WORD, IN(train.param_dtype), .words = dtypes, .fallback = "bf16",
     .help = "Type of the parameters that contractions read."},
    {.key = "master", .type = OPTION_BOOL, IN(train.master), .fallback_words = "true with bf16 parameters, else false",
     .help = "Keep FP32 master weights. false with bf16 parameters: the update is rounded stochastically."},
    {.key = "gradient_dtype", .type = OPTION_WORD, IN(train.gradient_dtype), .words = dtypes, .fallback = "fp32",
     .help = "Type that gradients are accumulated and reduced in; bf16: half the memory and traffic, a rounding a micro-batch."},
    {.key = "overfit_one_batch", .type = OPTION_BOOL, IN(train.overfit_one_batch), .fallback = "false",
     .help = "Every update reads the samples of the first: a check that a set-up can learn at all."},
};

static const struct option optimizer_rows[] = {
    {.key = "lr", .type = OPTION_NUMBER, IN(optimizer.lr), .lower = 0, .upper = 100, .fallback = "0.0003",
     .help = "Peak learning rate."},
    {.key = "min_lr", .type = OPTION_NUMBER, IN(optimizer.min_lr), .lower = 0, .upper = 100, .fallback = "0",
     .help = "Learning rate at the end of a cosine or WSD decay."},
    {.key = "beta1", .type = OPTION_NUMBER, IN(optimizer.beta1), .lower = 0, .upper = 1, .upper_open = true,
     .fallback = "0.9", .help = "AdamW: decay of the first moment."},
    {.key = "beta2", .type = OPTION_NUMBER, IN(optimizer.beta2), .lower = 0, .upper = 1, .upper_open = true,
     .fallback = "0.95", .help = "AdamW: decay of the second moment."},
    {.key = "eps", .type = OPTION_NUMBER, IN(optimizer.eps), .lower = 1e-30, .upper = 1, .fallback = "1e-08",
     .help = "AdamW: added to the root of the second moment."},
    {.key = "weight_decay", .type = OPTION_NUMBER, IN(optimizer.weight_decay), .lower = 0, .upper = 100,
     .fallback = "0.1", .help = "AdamW: decoupled weight decay of matrices; gains have none."},
    {.key = "clip", .type = OPTION_NUMBER, IN(optimizer.clip), .lower = 0, .upper = 1e30, .fallback = "1",
     .help = "Largest global gradient norm. 0: no clipping."},
    {.key = "schedule", .type = OPTION_WORD, IN(optimizer.schedule), .words = schedules, .fallback = "constant",
     .help = "Learning rate after warm-up; wsd: constant, then linear to min_lr over the last decay_updates."},
    {.key = "warmup_updates", .type = OPTION_INTEGER, IN(optimizer.warmup_updates), .low = 0, .high = COUNT_MAX,
     .fallback = "0", .unit = "updates", .help = "Linear warm-up."},
    {.key = "decay_updates", .type = OPTION_INTEGER, IN(optimizer.decay_updates), .low = 0, .high = COUNT_MAX,
     .fallback = "0", .unit = "updates",
     .help = "wsd: length of the last phase. cosine: length of the decay after warm-up, 0: to the end."},
};

static const struct option checkpoint_rows[] = {
    {.key = "every", .type = OPTION_INTEGER, IN(checkpoint.every), .low = 0, .high = COUNT_MAX, .fallback = "0",
     .unit = "updates", .help = "Save after each n-th update. 0: only on signals and at the end."},
    {.key = "keep", .type = OPTION_INTEGER, IN(checkpoint.keep), .low = 0, .high = 1000000, .fallback = "3",
     .unit = "checkpoints", .help = "How many of the newest to keep. 0: all."},
    {.key = "keep_every", .type = OPTION_INTEGER, IN(checkpoint.keep_every), .low = 0, .high = COUNT_MAX, .fallback = "0",
     .unit = "updates", .help = "Checkpoints of multiples of this update stay as well, for ever. 0: none."},
    {.key = "at_end", .type = OPTION_BOOL, IN(checkpoint.at_end), .fallback = "true",
     .help = "Save after the last update."},
    {.key = "async", .type = OPTION_BOOL, IN(checkpoint.async), .fallback = "true",
     .help = "A save stops training for the copy into a staging buffer alone; a thread writes it. It counts, and is called saved, after the update in which it became durable."},
    {.key = "compression", .type = OPTION_WORD, IN(checkpoint.compression), .words = compressions, .fallback = "zstd",
     .help = "zstd: bytes shuffled, level 1, each chunk with a checksum. store: as they are."},
    {.key = "threads", .type = OPTION_INTEGER, IN(checkpoint.threads), .low = 0, .high = 1024, .fallback = "0",
     .help = "Threads of a rank that compress. 0: half of run.threads, 1 to 8."},
    {.key = "on_failure", .type = OPTION_WORD, IN(checkpoint.on_failure), .words = failures, .fallback = "continue",
     .help = "What a save that fails does to the run, whose older checkpoints stay: it goes on, or stops with exit code 74. The last save, and one before leaving on request, must not fail."},
};

static const struct option validation_rows[] = {
    {.key = "every", .type = OPTION_INTEGER, IN(validation.every), .low = 0, .high = COUNT_MAX, .fallback = "0",
     .unit = "updates", .help = "Validate after each n-th update. 0: only at the end."},
    {.key = "samples", .type = OPTION_INTEGER, IN(validation.samples), .low = 0, .high = 1099511627776,
     .fallback = "0", .unit = "samples",
     .help = "Samples read, from the start of the validation stream: the same every time. 0: all."},
};

static const struct option divergence_rows[] = {
    {.key = "nonfinite", .type = OPTION_WORD, IN(divergence.nonfinite), .words = nonfinite_policies,
     .fallback = "halt", .help = "On NaN or infinity in loss or gradients. No parameter is touched either way."},
    {.key = "grad_norm", .type = OPTION_WORD, IN(divergence.grad_norm), .words = policies, .fallback = "record",
     .help = "On a gradient norm above grad_norm_z."},
    {.key = "loss", .type = OPTION_WORD, IN(divergence.loss), .words = policies, .fallback = "record",
     .help = "On a loss above loss_z."},
    {.key = "attention_zeros", .type = OPTION_WORD, IN(divergence.attention_zeros), .words = policies, .fallback = "record",
     .help = "On more zeros in attention's dO or dS than attention_zero_fraction, where they have codes."},
    {.key = "grad_norm_z", .type = OPTION_NUMBER, IN(divergence.grad_norm_z), .lower = 0, .lower_open = true,
     .upper = 1e30, .fallback = "8", .unit = "standard deviations",
     .help = "Distance above the window's mean that counts as an explosion."},
    {.key = "loss_z", .type = OPTION_NUMBER, IN(divergence.loss_z), .lower = 0, .lower_open = true, .upper = 1e30,
     .fallback = "6", .unit = "standard deviations", .help = "Distance above the window's mean that counts as a spike."},
    {.key = "attention_zero_fraction", .type = OPTION_NUMBER, IN(divergence.attention_zero_fraction), .lower = 0, .upper = 1,
     .fallback = "0.5", .help = "Share of elements that become zero by rounding which counts as an underflow; 1: never."},
    {.key = "window", .type = OPTION_INTEGER, IN(divergence.window), .low = 2, .high = 1024, .fallback = "128",
     .unit = "updates", .help = "Updates that the running statistics cover."},
};

static const struct option limits_rows[] = {
    {.key = "start_s", .type = OPTION_NUMBER, IN(limits.start_s), .lower = 0, .lower_open = true, .upper = 1e6,
     .fallback = "1800", .unit = "s", .help = "Longest time of MPI's start, and of each operation from there to the end of the first update."},
    {.key = "update_s", .type = OPTION_NUMBER, IN(limits.update_s), .lower = 0, .lower_open = true, .upper = 1e6,
     .fallback = "600", .unit = "s", .help = "Longest update; then every rank leaves with exit code 76."},
    {.key = "save_s", .type = OPTION_NUMBER, IN(limits.save_s), .lower = 0, .lower_open = true, .upper = 1e6,
     .fallback = "3600", .unit = "s", .help = "Longest checkpoint save, and longest validation."},
    {.key = "heartbeat_s", .type = OPTION_NUMBER, IN(limits.heartbeat_s), .lower = 0, .lower_open = true,
     .upper = 1e6, .fallback = "20", .unit = "s", .help = "Silence after which a rank counts as lost."},
};

static const struct option log_rows[] = {
    {.key = "every", .type = OPTION_INTEGER, IN(log.every), .low = 1, .high = COUNT_MAX, .fallback = "1",
     .unit = "updates", .help = "Print a line for each n-th update; metrics.jsonl has them all."},
    {.key = "peak_flops", .type = OPTION_NUMBER, IN(log.peak_flops), .lower = 0, .upper = 1e20, .fallback = "0",
     .unit = "FLOP/s", .help = "Peak of one rank, for MFU. 0: measured (cpu) or from the device table."},
    {.key = "level", .type = OPTION_WORD, IN(log.level), .words = levels, .fallback = "info",
     .help = "How much is printed."},
};

#define HEAD(member) PLACE(struct route_draft, head_parts.member)
static const struct option route_rows[] = {
    {.key = "name", .type = OPTION_TEXT, PLACE(struct route_draft, name), .name_like = true, .path_like = true,
     .fallback_words = "none: must be given",
     .help = "What records call this route, custom:NAME by custom. A built-in route's name is refused unless the content is that route's."},
    {.key = "linears", .type = OPTION_ENTRIES, PLACE(struct route_draft, span), .count = offsetof(struct route_draft, n_spans),
     .each = sizeof(struct span_draft), .origin = offsetof(struct span_draft, at), .entries = "route.linears[]",
     .fallback_words = "none: must be given",
     .help = "One entry for each range of blocks and linears (below); together they cover every linear once."},
    {.key = "attention.qk", .type = OPTION_TEXT, PLACE(struct route_draft, attention_qk), .name_like = true,
     .fallback = "bf16", .help = "Format of Q and K in scores: bf16, e4m3 or nvfp4."},
    {.key = "attention.pv", .type = OPTION_TEXT, PLACE(struct route_draft, attention_pv), .name_like = true,
     .fallback = "bf16", .help = "Format of P and V: bf16, e4m3 or mxfp4."},
    {.key = "attention.do", .type = OPTION_TEXT, PLACE(struct route_draft, attention_d_out), .name_like = true,
     .fallback = "bf16", .help = "Format of dO in attention's backward: bf16, e5m2 or e4m3; with the latter two P and dS are e4m3."},
    {.key = "attention.p_slope", .type = OPTION_NUMBER, PLACE(struct route_draft, p_slope), .lower = 0, .upper = 1e6, .fallback = "0",
     .help = "pv mxfp4: codes of P are those of max(0, p_slope x + p_offset), x = log2 of P over its block's scale. 0: of 2^x."},
    {.key = "attention.p_offset", .type = OPTION_NUMBER, PLACE(struct route_draft, p_offset), .lower = -1e6, .upper = 1e6,
     .fallback = "0", .help = "With p_slope."},
    {.key = "attention.do_lift", .type = OPTION_NUMBER, PLACE(struct route_draft, d_out_lift), .lower = 0, .upper = 0x1p100,
     .fallback = "0", .help = "do e5m2 or e4m3: dO is written times 4 and this power of two. 0: by the largest of a sample's kv head."},
    {.key = "head", .type = OPTION_TEXT, PLACE(struct route_draft, head), .fallback = "bf16",
     .help = "Encoding of the output matrix's contractions: one for all, or a mapping like a linear's (the next seven keys)."},
    {.key = "head.fprop.x", .type = OPTION_TEXT, HEAD(fprop_x), .fallback_words = "none: must be given",
     .help = "logits = X W^T: the input."},
    {.key = "head.fprop.w", .type = OPTION_TEXT, HEAD(fprop_w), .fallback_words = "none: must be given",
     .help = "The output matrix."},
    {.key = "head.dgrad.dy", .type = OPTION_TEXT, HEAD(dgrad_dy), .fallback_words = "none: must be given",
     .help = "The logits' gradient."},
    {.key = "head.dgrad.w", .type = OPTION_TEXT, HEAD(dgrad_w), .fallback = "same",
     .help = "The output matrix; same: encoded as in fprop."},
    {.key = "head.wgrad.x", .type = OPTION_TEXT, HEAD(wgrad_x), .fallback_words = "none: must be given",
     .help = "The input."},
    {.key = "head.wgrad.dy", .type = OPTION_TEXT, HEAD(wgrad_dy), .fallback_words = "none: must be given",
     .help = "The logits' gradient."},
    {.key = "head.wgrad.hadamard", .type = OPTION_TEXT, HEAD(hadamard), .name_like = true, .fallback = "none",
     .help = "Transform of both wgrad operands along tokens."},
    {.key = "forward_bf16_tail", .type = OPTION_NUMBER, PLACE(struct route_draft, forward_tail), .lower = 0, .upper = 1,
     .upper_open = true, .fallback = "0",
     .help = "Share of the updates, the last ones, in which fprop contracts BF16 operands in every linear and the head."},
    {.key = "activations", .type = OPTION_WORD, PLACE(struct route_draft, activations), .words = dtypes,
     .fallback = "bf16", .help = "Type of what flows between contractions."},
};

#define SPAN(member) PLACE(struct span_draft, member)
static const struct option span_rows[] = {
    {.key = "layers", .type = OPTION_TEXT, SPAN(layers), .fallback = "all",
     .help = "Blocks, counted from 1: all, 1-27, 28-32, 5, last-4, all-but-last-4."},
    {.key = "sites", .type = OPTION_TEXT, SPAN(sites), .name_like = true, .fallback = "all",
     .help = "Linears of these blocks: all, attention (qkv and out), ffn (gate_up and down), or one of these four."},
    {.key = "fprop.x", .type = OPTION_TEXT, SPAN(fprop_x), .fallback_words = "none: must be given",
     .help = "Y = X W^T: the input. FORMAT[/BLOCK][/SCALE-RULE][/stripN][/sr], as in mxfp4, mxfp4/2d32, mxfp4/sr, bf16 (docs/numerics.md)."},
    {.key = "fprop.w", .type = OPTION_TEXT, SPAN(fprop_w), .fallback_words = "none: must be given",
     .help = "The weight."},
    {.key = "dgrad.dy", .type = OPTION_TEXT, SPAN(dgrad_dy), .fallback_words = "none: must be given",
     .help = "dX = dY W: the output's gradient."},
    {.key = "dgrad.w", .type = OPTION_TEXT, SPAN(dgrad_w), .fallback = "same",
     .help = "The weight; same: encoded as in fprop."},
    {.key = "wgrad.x", .type = OPTION_TEXT, SPAN(wgrad_x), .fallback_words = "none: must be given",
     .help = "dW = dY^T X: the input."},
    {.key = "wgrad.dy", .type = OPTION_TEXT, SPAN(wgrad_dy), .fallback_words = "none: must be given",
     .help = "The output's gradient."},
    {.key = "wgrad.hadamard", .type = OPTION_TEXT, SPAN(hadamard), .name_like = true, .fallback = "none",
     .help = "Transform of both wgrad operands along tokens: none, plain-16, signed-16, signed-32."},
};

#define ROWS(rows) rows, (int)(sizeof rows / sizeof rows[0])
const struct option_section option_sections[] = {
    {"", "Top level", OPTION_OF_CONFIG, ROWS(top_rows)},
    {"run", "The run", OPTION_OF_CONFIG, ROWS(run_rows)},
    {"model", "The model", OPTION_OF_CONFIG, ROWS(model_rows)},
    {"data", "Data", OPTION_OF_CONFIG, ROWS(data_rows)},
    {"data.sources[]", "A source of data", OPTION_OF_ENTRY, ROWS(source_rows)},
    {"data.stages[]", "A stage of the mixture", OPTION_OF_ENTRY, ROWS(stage_rows)},
    {"data.skip[]", "Samples left out", OPTION_OF_ENTRY, ROWS(skip_rows)},
    {"train", "Training", OPTION_OF_CONFIG, ROWS(train_rows)},
    {"optimizer", "Optimizer and schedule", OPTION_OF_CONFIG, ROWS(optimizer_rows)},
    {"checkpoint", "Checkpoints", OPTION_OF_CONFIG, ROWS(checkpoint_rows)},
    {"validation", "Validation", OPTION_OF_CONFIG, ROWS(validation_rows)},
    {"divergence", "Divergence policies", OPTION_OF_CONFIG, ROWS(divergence_rows)},
    {"limits", "Time limits of the watchdog", OPTION_OF_CONFIG, ROWS(limits_rows)},
    {"log", "Console", OPTION_OF_CONFIG, ROWS(log_rows)},
    {"route", "A route written out", OPTION_OF_ROUTE, ROWS(route_rows)},
    {"route.linears[]", "An entry of a route's linears", OPTION_OF_ENTRY, ROWS(span_rows)},
};
const int option_section_number = (int)(sizeof option_sections / sizeof option_sections[0]);

const struct option_section *option_section(const char *name) {
  for (int i = 0; i < option_section_number; i++)
    if (strcmp(option_sections[i].name, name) == 0) return &option_sections[i];
  return NULL;
}

const struct option *option_find(const struct option_section *s, const char *key) {
  for (int i = 0; i < s->n_rows; i++)
    if (strcmp(s->rows[i].key, key) == 0) return &s->rows[i];
  return NULL;
}

void option_take_defaults(const struct option_section *s, void *base) {
  char why[OPTION_WHY];
  for (int i = 0; i < s->n_rows; i++)
    if (s->rows[i].fallback) option_parse(&s->rows[i], base, s->rows[i].fallback, why);
}
