/* Streams and events: queues of work that one thread at a time runs, whichever waits.
 *
 * A stream that waits for an event has the event's stream run as far as that, and no
 * further.  Where work is put off a question makes no haste, but for one in four, and other
 * streams may be ahead of one that is waited for.  Work that is not done when it is called (NCCL's, while other ranks have not
 * come) stays at its stream's head. */
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <deque>
#include <mutex>

#include "kernels/cuda/model/runtime.h"

struct cuda_model_stream {
  std::deque<std::function<bool()>> work;
  uint64_t given, done;
  bool running;
};

struct cuda_model_event {
  cudaStream_t stream;
  uint64_t place; /* what the stream had been given, the record included; 0: never recorded */
  unsigned flags;
  double seconds;
};

namespace {

std::recursive_mutex machine;
std::deque<cudaStream_t> streams;
uint32_t chance = 1;

bool one_in(uint32_t n) { return ((chance = chance * 1664525u + 1013904223u) >> 16) % n == 0; }

bool lazy() {
  const char *text = getenv("FP4D_MODEL_STREAMS");
  return text && strcmp(text, "lazy") == 0;
}

/* Whether the stream has come to `place`. */
bool run_to(cudaStream_t s, uint64_t place) {
  if (s->running) return s->done >= place; /* it waits for itself, by way of another */
  s->running = true;
  while (s->done < place && s->work.front()()) {
    s->work.pop_front();
    s->done++;
  }
  s->running = false;
  return s->done >= place;
}

void rest() { usleep(20); }

}  // namespace

void cuda_model_submit(cudaStream_t s, std::function<bool()> work) {
  const std::lock_guard<std::recursive_mutex> held(machine);
  s->work.push_back(std::move(work));
  s->given++;
  if (!lazy()) run_to(s, s->given);
}

bool cuda_model_reached(cudaStream_t s, uint64_t given) {
  const std::lock_guard<std::recursive_mutex> held(machine);
  return run_to(s, given);
}

uint64_t cuda_model_given(cudaStream_t s) {
  const std::lock_guard<std::recursive_mutex> held(machine);
  return s->given;
}

void cuda_model_finish(cudaStream_t s) {
  const uint64_t given = cuda_model_given(s);
  if (lazy()) {
    const std::lock_guard<std::recursive_mutex> held(machine);
    if (one_in(2))
      for (cudaStream_t other : streams)
        if (other != s) run_to(other, other->given);
  }
  while (!cuda_model_reached(s, given)) rest();
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
  const std::lock_guard<std::recursive_mutex> held(machine);
  *stream = new cuda_model_stream{};
  streams.push_back(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int) { return cudaStreamCreateWithFlags(stream, flags); }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t s) {
  const std::lock_guard<std::recursive_mutex> held(machine);
  run_to(s, s->given); /* what cannot be done now never is */
  for (auto i = streams.begin(); i != streams.end(); ++i)
    if (*i == s) {
      streams.erase(i);
      break;
    }
  delete s;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  cuda_model_finish(s);
  return cuda_model_machine.fault;
}

cudaError_t cudaStreamQuery(cudaStream_t s) {
  if (cuda_model_machine.fault != cudaSuccess) return cuda_model_machine.fault;
  const std::lock_guard<std::recursive_mutex> held(machine);
  return s->done == s->given ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  *event = new cuda_model_event{NULL, 0, flags, 0};
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t s) {
  const std::lock_guard<std::recursive_mutex> held(machine);
  event->stream = s;
  event->place = s->given + 1;
  cuda_model_submit(s, [event] {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    event->seconds = (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
    return true;
  });
  return cudaSuccess;
}

/* As the event stands now; one that was never recorded keeps nobody waiting. */
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t event, unsigned) {
  const std::lock_guard<std::recursive_mutex> held(machine);
  const cudaStream_t other = event->stream;
  const uint64_t place = event->place;
  if (place && other != s) cuda_model_submit(s, [other, place] { return run_to(other, place); });
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (cuda_model_machine.fault != cudaSuccess) return cuda_model_machine.fault;
  const std::lock_guard<std::recursive_mutex> held(machine);
  const bool haste = !lazy() || one_in(4);
  return !event->place || (haste ? run_to(event->stream, event->place) : event->stream->done >= event->place) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  cudaError_t code;
  while ((code = cudaEventQuery(event)) == cudaErrorNotReady) rest();
  return code;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  if ((begin->flags | end->flags) & cudaEventDisableTiming) cuda_model_fail("the time of an event that has none");
  for (cudaEvent_t event : {begin, end}) {
    const cudaError_t code = cudaEventQuery(event);
    if (code != cudaSuccess) return code;
  }
  *milliseconds = (float)((end->seconds - begin->seconds) * 1e3);
  return cudaSuccess;
}
