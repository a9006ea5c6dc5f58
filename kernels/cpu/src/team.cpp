// Built once, for any processor: the threads, and which instruction sets this one has.
#include "team.h"

#include <atomic>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int kSpins = 20000;  // some 200 us

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

void bind([[maybe_unused]] std::thread &thread, [[maybe_unused]] int core) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);
#endif
}

}  // namespace

struct Team::State {
  std::vector<std::thread> threads;
  void (*job)(void *, int) = nullptr;  // null: end
  void *of = nullptr;
  alignas(64) std::atomic<uint32_t> epoch{0};  // of the last job
  alignas(64) std::atomic<int> num_here{0};
  alignas(64) std::atomic<uint32_t> phase{0};

  void begin() {
    epoch.fetch_add(1, std::memory_order_release);
    epoch.notify_all();
  }
};

Team::Team(int num_threads, const int32_t *cores) : size(num_threads), state_(new State) {
  for (int i = 1; i < size; i++) {
    state_->threads.emplace_back([this, i] {
      for (uint32_t seen = 0;; seen++) {
        for (int turn = 0; state_->epoch.load(std::memory_order_acquire) == seen && turn < kSpins; turn++) relax();
        state_->epoch.wait(seen, std::memory_order_acquire);
        if (!state_->job) return;
        state_->job(state_->of, i);
        barrier();
      }
    });
    if (cores) bind(state_->threads.back(), cores[i]);
  }
}

Team::~Team() {
  state_->job = nullptr;
  state_->begin();
  for (auto &thread : state_->threads) thread.join();
  delete state_;
}

void Team::call(void (*job)(void *, int), void *of) {
  if (size > 1) {
    state_->job = job;
    state_->of = of;
    state_->begin();
  }
  job(of, 0);
  barrier();
}

void Team::barrier() {
  if (size == 1) return;
  uint32_t phase = state_->phase.load(std::memory_order_relaxed);
  if (state_->num_here.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
    state_->num_here.store(0, std::memory_order_relaxed);
    state_->phase.store(phase + 1, std::memory_order_release);
    return;
  }
  for (int turn = 0; state_->phase.load(std::memory_order_acquire) == phase; turn++) {
    if (turn < kSpins) relax();
    else std::this_thread::yield();  // another process has the core of one of us
  }
}

#define API extern "C" __attribute__((visibility("default")))

API void *diptych_team_create(int32_t num_threads, const int32_t *cores) { return new Team(num_threads, cores); }

API void diptych_team_destroy(void *team) { delete static_cast<Team *>(team); }

// What the library was built from; see build.py.
API const char *diptych_sources() { return DIPTYCH_SOURCES; }

// Those that this build and this processor have, best first, separated by spaces.
API const char *diptych_isas() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    bool has_dot = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
                   __builtin_cpu_supports("avx512vnni");
    return has_dot ? "avx512bf16 avx512 avx2 portable" : "avx512 avx2 portable";
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2 portable";
#endif
  return "portable";
}
