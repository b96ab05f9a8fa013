#include "comm/nccl_known.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/utsname.h>

static bool set_to(const struct nccl_known_machine *m, const char *name, const char *value) {
  const char *text = m->environment(name);
  return text && strcmp(text, value) == 0;
}

static bool leaks_slots(int version, const struct nccl_known_machine *m) { return m->aarch64 && version == 22809; }
static bool overflows_stack(int version, const struct nccl_known_machine *m) { return m->unlimited_stack && version < 23004; }
static bool no_memory_handles(int version, const struct nccl_known_machine *m) {
  (void)version;
  return set_to(m, "NCCL_CUMEM_ENABLE", "0");
}
static bool no_rack_links(int version, const struct nccl_known_machine *m) {
  (void)version;
  return set_to(m, "NCCL_MNNVL_ENABLE", "0");
}

static const struct {
  bool (*applies)(int version, const struct nccl_known_machine *m);
  const char *sentence;
} known[] = {
    {leaks_slots, "NCCL 2.28.9 on aarch64 leaks proxy slots until ranks stand still without a word (marin issue 7344): install another version"},
    {overflows_stack, "with an unlimited stack NCCL before 2.30.4 crashes at its start with 44 ranks and more (nccl issue 2186): ulimit -s 8192"},
    {no_memory_handles, "NCCL_CUMEM_ENABLE=0 turns NVLink between the hosts of a rack off, too: they fall back to the network"},
    {no_rack_links, "NCCL_MNNVL_ENABLE=0: hosts of a rack exchange over the network, not over NVLink"},
};

static const char *environment(const char *name) { return getenv(name); }

struct nccl_known_machine nccl_known_here(void) {
  struct utsname system;
  struct rlimit stack;
  return (struct nccl_known_machine){.aarch64 = uname(&system) == 0 && strcmp(system.machine, "aarch64") == 0,
                                     .unlimited_stack = getrlimit(RLIMIT_STACK, &stack) == 0 && stack.rlim_cur == RLIM_INFINITY,
                                     .environment = environment};
}

int nccl_known(const char *version, const struct nccl_known_machine *m, const char *sentences[NCCL_KNOWN_MOST]) {
  int major = 0, minor = 0, patch = 0, n = 0;
  (void)sscanf(version, "%d.%d.%d", &major, &minor, &patch);
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (known[i].applies(major * 10000 + minor * 100 + patch, m)) sentences[n++] = known[i].sentence;
  return n;
}
