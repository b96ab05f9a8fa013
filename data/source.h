/* What a stream is made of, as a configuration says it: sources of text or of
 * tokens, in which shares, and which samples of the order a run leaves out.
 * Shared by `fp4d prepare` and `fp4d index`. */
#ifndef FP4D_DATA_SOURCE_H
#define FP4D_DATA_SOURCE_H

#include <stdint.h>

enum { DATA_SOURCES = 32, DATA_STAGES = 16, DATA_SKIPS = 64, DATA_PATH = 512, DATA_NAME = 64 };

enum data_format {
  DATA_AUTO,     /* by name and magic */
  DATA_TEXT,     /* .txt, .md, .rst: a file is a document; .jsonl: a line is; each also compressed */
  DATA_JSONL,    /* every file is JSON lines, whatever its name */
  DATA_MEGATRON, /* .bin with .idx */
  DATA_LLMC,     /* llm.c's .bin */
  DATA_RAW_U16,  /* token ids and nothing else: nanoGPT, OLMo; with NAME.offsets.npy or offsets.npy: torchtitan */
  DATA_RAW_U32,
  DATA_NPY       /* a true .npy, one axis of integers */
};

struct data_source {
  char path[DATA_PATH]; /* a file, or a folder searched for files of the format: all levels, in byte order of names,
                         * leaving out names that begin with a dot and links to folders */
  char name[DATA_NAME]; /* unique among the sources */
  double weight;        /* share of the tokens, to be normalised; 0 in every source: no mixing, each document once */
  double max_repetition; /* of its tokens, at most this many times */
  enum data_format format;
  char text_key[DATA_NAME]; /* of a JSON line */
  int64_t bos, eos; /* token files without documents of their own: a document begins at / ends after this id; -1: none */
};

/* From the first document boundary at or after `at` tokens on these weights hold. */
struct data_stage {
  int64_t at;
  double weight[DATA_SOURCES]; /* by source; 0: not used in this stage */
  int64_t n_weights;
};

struct data_skip {
  int64_t range[2]; /* samples of the order, first and last */
};

enum data_invalid_utf8 { DATA_UTF8_REPLACE, DATA_UTF8_DROP, DATA_UTF8_ERROR };
enum data_dedup { DATA_DEDUP_NONE, DATA_DEDUP_EXACT, DATA_DEDUP_MINHASH };
/* The target that is the first token of another document. */
enum data_boundary { DATA_BOUNDARY_PREDICT, DATA_BOUNDARY_MASK };
/* What a position attends to: all before it in the sample, or in its document. */
enum data_attention { DATA_ATTENTION_WHOLE, DATA_ATTENTION_DOCUMENT };

#endif
