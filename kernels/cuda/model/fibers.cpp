/* Fibers, blocks and the order in which they run.
 *
 * A fiber is begun once by makecontext and then switched to and from with
 * _setjmp and _longjmp, which make no system call; it runs one thread after
 * another, of all launches of the process.
 */
#include "kernels/cuda/model/fibers.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include "kernels/cuda/model/block.h"
#include "kernels/cuda/model/runtime.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

extern "C" {
extern char __start_cuda_model_shared[] __attribute__((weak));
extern char __stop_cuda_model_shared[] __attribute__((weak));
void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));
}

namespace {

enum { STACK = 256 << 10, PAGE = 4096, AGENTS = 8 };

struct fiber {
  ucontext_t first;
  jmp_buf context;
  bool begun, ended;
  uint3 index;
  bool (*ready)(const void *); /* NULL: can run */
  const void *subject;
  const char *what, *file;
  int line;
};

fiber fibers[CUDA_MODEL_BLOCK_MAX];
char *stacks;
ucontext_t home;
jmp_buf scheduler;
fiber *current;
int threads;

const char *kernel; /* NULL: none runs */
void (*body)(void *);
void *body_context;

const cuda_model_agent *agents[AGENTS];
int agent_count;

uint64_t random_state;

/* Dynamic shared memory lies before a page that may not be touched. */
char *shared_area, *dynamic_shared;
size_t dynamic_bytes;
enum { SHARED_AREA = (CUDA_MODEL_SHARED_MAX + 2 * PAGE) / PAGE * PAGE, SHARED_BEFORE = 1024, RUBBISH = 0xF5 };

size_t static_bytes() { return (size_t)(__stop_cuda_model_shared - __start_cuda_model_shared); }

void say_where() {
  char line[256];
  int n;
  if (!kernel) n = snprintf(line, sizeof line, "cuda model: outside a kernel: ");
  else if (!current) n = snprintf(line, sizeof line, "cuda model: %s, block (%u, %u, %u): ", kernel, blockIdx.x, blockIdx.y, blockIdx.z);
  else
    n = snprintf(line, sizeof line, "cuda model: %s, block (%u, %u, %u), thread (%u, %u, %u): ", kernel, blockIdx.x, blockIdx.y,
                 blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z);
  if (write(STDERR_FILENO, line, (size_t)n) != n) _exit(71);
}

void bad_address(int, siginfo_t *info, void *) {
  say_where();
  const char *at = static_cast<const char *>(info->si_addr);
  char line[200];
  int n = snprintf(line, sizeof line, "%s\n",
                   at >= shared_area && at < shared_area + SHARED_AREA + PAGE ? "an address outside its dynamic shared memory"
                   : at >= stacks && at < stacks + (size_t)STACK * CUDA_MODEL_BLOCK_MAX ? "more local memory than the model has"
                                                                                       : "an address outside every allocation, or of device memory outside a kernel");
  if (write(STDERR_FILENO, line, (size_t)n) != n) _exit(71);
  _exit(70);
}

void sanitizer_death() {
  say_where();
  static const char line[] = "undefined behaviour, reported above\n";
  if (write(STDERR_FILENO, line, sizeof line - 1) < 0) _exit(71);
}

void *pages(size_t bytes) {
  void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    perror("cuda model: memory");
    _exit(71);
  }
  return p;
}

void open_once() {
  if (stacks) return;
  stacks = static_cast<char *>(pages((size_t)STACK * CUDA_MODEL_BLOCK_MAX));
  for (int i = 0; i < CUDA_MODEL_BLOCK_MAX; i++) mprotect(stacks + (size_t)STACK * (size_t)i, PAGE, PROT_NONE);
  shared_area = static_cast<char *>(pages(SHARED_AREA + PAGE));
  mprotect(shared_area + SHARED_AREA, PAGE, PROT_NONE);
  stack_t own = {};
  own.ss_size = 1 << 16;
  own.ss_sp = pages(own.ss_size);
  sigaltstack(&own, NULL);
  struct sigaction action = {};
  action.sa_sigaction = bad_address;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, NULL);
  sigaction(SIGBUS, &action, NULL);
  if (__sanitizer_set_death_callback) __sanitizer_set_death_callback(sanitizer_death);
  if (!random_state) {
    const char *seed = getenv("FP4D_MODEL_SEED");
    cuda_model_seed(seed ? strtoull(seed, NULL, 10) : 1);
  }
}

[[noreturn]] void to_scheduler_for_good() { _longjmp(scheduler, 1); }

void run_threads() {
  for (;;) {
    body(body_context);
    current->ended = true;
    if (_setjmp(current->context) == 0) to_scheduler_for_good();
  }
}

void resume(fiber *f) {
  current = f;
  threadIdx = f->index;
  f->ready = NULL;
  if (_setjmp(scheduler) == 0) {
    if (f->begun) _longjmp(f->context, 1);
    f->begun = true;
    getcontext(&f->first);
    f->first.uc_stack.ss_sp = stacks + (size_t)STACK * (size_t)(f - fibers) + PAGE;
    f->first.uc_stack.ss_size = STACK - PAGE;
    f->first.uc_link = &home;
    makecontext(&f->first, run_threads, 0);
    setcontext(&f->first);
  }
  current = NULL;
}

bool agents_step() {
  bool any = false;
  for (int i = 0; i < agent_count; i++) any = agents[i]->step() || any;
  return any;
}

[[noreturn]] void deadlock() {
  int waiting = 0, ended = 0;
  const fiber *one = NULL;
  for (int i = 0; i < threads; i++) {
    ended += fibers[i].ended;
    waiting += !fibers[i].ended;
    if (!fibers[i].ended && !one) one = &fibers[i];
  }
  const fiber *other = NULL;
  for (int i = 0; i < threads; i++)
    if (!fibers[i].ended && (fibers[i].line != one->line || fibers[i].what != one->what)) other = &fibers[i];
  threadIdx = one->index;
  current = &fibers[one - fibers];
  if (other)
    cuda_model_fail("deadlock: waits for %s (%s:%d); thread (%u, %u, %u) for %s (%s:%d); %d threads wait, %d have ended", one->what,
                    one->file, one->line, other->index.x, other->index.y, other->index.z, other->what, other->file, other->line,
                    waiting, ended);
  cuda_model_fail("deadlock: waits for %s (%s:%d); %d threads wait, %d have ended", one->what, one->file, one->line, waiting, ended);
}

/* 0..n-1 in a random order. */
void shuffle(int *order, int n) {
  for (int i = 0; i < n; i++) order[i] = i;
  for (int i = n - 1; i > 0; i--) {
    const int j = (int)(cuda_model_random() % (uint32_t)(i + 1)), t = order[i];
    order[i] = order[j];
    order[j] = t;
  }
}

/* A pass over a warp's lanes: whether any ran. */
bool pass(int warp, const int *lanes, int *left) {
  bool ran = false;
  for (int i = 0; i < 32; i++) {
    const int t = warp * 32 + lanes[i];
    if (t >= threads) continue;
    fiber *f = &fibers[t];
    if (f->ended || (f->ready && !f->ready(f->subject))) continue;
    resume(f);
    ran = true;
    if (f->ended) --*left;
    if (agent_count && cuda_model_random() % 64 == 0) agents_step();
  }
  return ran;
}

void run_block() {
  const int warps = (threads + 31) / 32;
  int order[32], lanes[32], left = threads;
  for (int i = 0; i < threads; i++) {
    fiber *f = &fibers[i];
    const unsigned u = (unsigned)i;
    f->index = uint3{u % blockDim.x, u / blockDim.x % blockDim.y, u / blockDim.x / blockDim.y};
    f->ended = false;
    f->ready = NULL;
  }
  if (static_bytes()) memset(__start_cuda_model_shared, RUBBISH, static_bytes());
  if (dynamic_bytes)
    memset(dynamic_shared - SHARED_BEFORE, RUBBISH, (size_t)(shared_area + SHARED_AREA - dynamic_shared) + SHARED_BEFORE);
  cuda_model_block_begin(threads);
  for (int i = 0; i < agent_count; i++)
    if (agents[i]->reset) agents[i]->reset();
  while (left) {
    bool ran = false;
    shuffle(order, warps);
    shuffle(lanes, 32);
    for (int w = 0; w < warps; w++) {
      /* A warp mostly goes on until all its lanes wait for others. */
      bool again = true;
      while (again && left) {
        again = pass(order[w], lanes, &left);
        ran = ran || again;
        if (again && cuda_model_random() % 8 == 0) break;
      }
    }
    if (!ran && left && !agents_step()) deadlock();
  }
  while (agents_step()) {}
  cuda_model_block_end();
  for (int i = 0; i < agent_count; i++)
    if (agents[i]->ended) agents[i]->ended();
  if (!dynamic_bytes) return;
  for (ptrdiff_t i = -SHARED_BEFORE; i < shared_area + SHARED_AREA - dynamic_shared; i = i == -1 ? (ptrdiff_t)dynamic_bytes : i + 1)
    if (dynamic_shared[i] != (char)RUBBISH)
      cuda_model_fail("wrote outside its %zu bytes of dynamic shared memory, at byte %td", dynamic_bytes, i);
}

}  // namespace

void cuda_model_fail(const char *format, ...) {
  char text[1024];
  va_list list;
  va_start(list, format);
  int n = vsnprintf(text, sizeof text - 1, format, list);
  va_end(list);
  if (n > (int)sizeof text - 2) n = (int)sizeof text - 2;
  text[n++] = '\n';
  fflush(stdout);
  say_where();
  if (write(STDERR_FILENO, text, (size_t)n) != n) _exit(71);
  _exit(70);
}

void cuda_model_wait(bool (*ready)(const void *), const void *subject, const char *what, const char *file, int line) {
  if (!current) cuda_model_fail("%s (%s:%d) where no thread runs", what, file, line);
  fiber *f = current;
  f->what = what;
  f->file = file;
  f->line = line;
  f->subject = subject;
  f->ready = ready;
  if (_setjmp(f->context) == 0) to_scheduler_for_good();
}

void cuda_model_yield() {
  cuda_model_wait([](const void *) { return true; }, NULL, "its turn", "", 0);
}

void cuda_model_agent_add(const cuda_model_agent *agent) {
  if (agent_count == AGENTS) cuda_model_fail("more than %d agents", AGENTS);
  agents[agent_count++] = agent;
}

int cuda_model_thread() { return (int)(current - fibers); }
int cuda_model_threads() { return threads; }

void cuda_model_seed(uint64_t seed) { random_state = seed * 2 + 1; }

uint32_t cuda_model_random() {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  const uint64_t x = random_state ^ random_state >> 33;
  return (uint32_t)(x * 0x9E3779B97F4A7C15u >> 32);
}

char *cuda_model_dynamic_shared() { return dynamic_shared; }
size_t cuda_model_dynamic_shared_bytes() { return dynamic_bytes; }

static size_t dynamic_address() { return (static_bytes() + 1023) / 1024 * 1024; }

uint32_t cuda_model_shared_address(const void *p) {
  const char *c = static_cast<const char *>(p);
  if (c >= dynamic_shared && c <= dynamic_shared + dynamic_bytes) return (uint32_t)(dynamic_address() + (size_t)(c - dynamic_shared));
  if (c >= __start_cuda_model_shared && c < __stop_cuda_model_shared) return (uint32_t)(c - __start_cuda_model_shared);
  cuda_model_fail("a pointer that is not into shared memory");
}

void *cuda_model_shared_pointer(uint32_t address, size_t bytes) {
  const size_t a = address, d = dynamic_address();
  if (a >= d && a + bytes <= d + dynamic_bytes) return dynamic_shared + (a - d);
  if (a + bytes <= static_bytes()) return __start_cuda_model_shared + a;
  cuda_model_fail("%zu bytes at shared address %u: outside the block's shared memory", bytes, address);
}

void cuda_model_launch(const char *name, dim3 grid, dim3 block, size_t dynamic, void (*run)(void *), void *context) {
  open_once();
  kernel = name;
  blockIdx = uint3{0, 0, 0};
  const uint64_t in_block = (uint64_t)block.x * block.y * block.z;
  if (!grid.x || !grid.y || !grid.z || grid.x > 0x7FFFFFFFu || grid.y > 65535 || grid.z > 65535)
    cuda_model_fail("no grid has %u x %u x %u blocks", grid.x, grid.y, grid.z);
  if (!in_block || in_block > CUDA_MODEL_BLOCK_MAX || block.z > 64)
    cuda_model_fail("no block has %u x %u x %u threads", block.x, block.y, block.z);
  if (dynamic > CUDA_MODEL_SHARED_MAX)
    cuda_model_fail("%zu bytes of dynamic shared memory: a block has at most %d", dynamic, CUDA_MODEL_SHARED_MAX);
  blockDim = block;
  gridDim = grid;
  threads = (int)in_block;
  body = run;
  body_context = context;
  dynamic_bytes = dynamic;
  dynamic_shared = shared_area + (SHARED_AREA - dynamic) / 1024 * 1024;
  /* Blocks in the order first, first + step, ... modulo their number. */
  const uint64_t n = (uint64_t)grid.x * grid.y * grid.z, first = cuda_model_random() % n;
  uint64_t step = 1 + cuda_model_random() % n;
  for (;; step++) {
    uint64_t a = n, b = step % n;
    while (b) {
      const uint64_t r = a % b;
      a = b;
      b = r;
    }
    if (a == 1) break;
  }
  cuda_model_enter();
  for (uint64_t i = 0, at = first; i < n; i++, at = (at + step) % n) {
    blockIdx = uint3{(unsigned)(at % grid.x), (unsigned)(at / grid.x % grid.y), (unsigned)(at / grid.x / grid.y)};
    run_block();
  }
  cuda_model_leave();
  kernel = NULL;
}
