/* What is known to go wrong with NCCL: by its version, this machine and the environment. */
#ifndef FP4D_COMM_NCCL_KNOWN_H
#define FP4D_COMM_NCCL_KNOWN_H

#include <stdbool.h>

enum { NCCL_KNOWN_MOST = 8 };

struct nccl_known_machine {
  bool aarch64, unlimited_stack;
  const char *(*environment)(const char *name); /* NULL: not set */
};

/* This machine and its environment. */
struct nccl_known_machine nccl_known_here(void);

/* What is wrong with "2.28.9" on it, a sentence each; how many. */
int nccl_known(const char *version, const struct nccl_known_machine *m, const char *sentences[NCCL_KNOWN_MOST]);

#endif
