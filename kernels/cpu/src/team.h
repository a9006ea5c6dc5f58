// A few threads that compute one step together. The caller is the first of them; the others wait between steps.
//
//     run(work): every active thread calls work(its index); returns when all have
//     barrier(): inside `run`, until all active threads are there
//     resize(n): from now on the first n threads are active; the others sleep, also through `run`
//
// Waiting spins first, because the next work is microseconds away, and sleeps when it is not, or when spinning was of no
// use: another thread needs the core. One thread: no waiting.
// Included for every instruction set, so nothing but templates over types of the includer is defined here.
#pragma once

#include <cstdint>

class Team {
 public:
  const int capacity;  // threads
  int size;            // of those, active

  // cores: one a thread, or null to leave them to the kernel. The caller's own is not touched.
  Team(int capacity, int num_active, const int32_t *cores);
  ~Team();
  Team(const Team &) = delete;

  // Only outside `run`. cores: one for each active thread, or null to leave them where they are.
  void resize(int num_active, const int32_t *cores);

  template <class Work>
  void run(Work &&work) {
    call([](void *of, int index) { (*static_cast<Work *>(of))(index); }, &work);
  }

  void barrier();

 private:
  struct State;
  State *state_;
  void call(void (*job)(void *, int), void *of);
};

// The part of `count` that thread `index` of `size` does, in multiples of `grain`: [first, last).
struct Span {
  int64_t first, last;
};

static inline Span span_of(int64_t count, int64_t grain, int index, int size) {
  int64_t num = (count + grain - 1) / grain;
  int64_t first = num * index / size * grain, last = num * (index + 1) / size * grain;
  return {first < count ? first : count, last < count ? last : count};
}
