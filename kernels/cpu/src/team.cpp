// Built once, for any processor: the threads, and which instruction sets this one has.
#include "team.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSpins = 20000, kFewSpins = 500;  // some 200 and 5 us
constexpr std::chrono::milliseconds kYielding{1};
constexpr uint32_t kMaxThreads = 1024;
constexpr int32_t kNoCore = -1;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Binds the calling thread. Not by pthread_setaffinity_np, which needs glibc 2.34 where it was linked with that.
void bind_this_thread([[maybe_unused]] int core) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  sched_setaffinity(0, sizeof set, &set);
#endif
}

}  // namespace

struct Team::State {
  std::vector<std::thread> threads;
  std::vector<int32_t> cores;          // of each thread, which goes there for its next job; kNoCore: left to the kernel
  void (*job)(void *, int) = nullptr;  // null: end
  void *of = nullptr;
  // Of the last job: its number, and how many threads compute it. In one word, so that a thread which was not one of
  // them, and looks late, never takes one job's number for another job's.
  alignas(64) std::atomic<uint32_t> epoch{0};
  alignas(64) std::atomic<int> num_here{0};
  alignas(64) std::atomic<uint32_t> phase{0};
  alignas(64) std::atomic<int> num_active{0};  // where threads sleep that are not
  std::atomic<uint32_t> resumed_at{0};         // the epoch when that changed

  void begin(int size) {
    uint32_t number = epoch.load(std::memory_order_relaxed) / kMaxThreads + 1;
    epoch.store(number * kMaxThreads + uint32_t(size - 1));
    epoch.notify_all();
  }

  // Sleeps until the thread is active. Returns the last job that it must not do.
  uint32_t park(int index) {
    for (int active; (active = num_active.load(std::memory_order_acquire)) <= index;)
      num_active.wait(active, std::memory_order_acquire);
    return resumed_at.load(std::memory_order_acquire);
  }
};

Team::Team(int capacity, int num_active, const int32_t *cores)
    : capacity(capacity), size(num_active), state_(new State) {
  state_->cores.assign(capacity, kNoCore);
  state_->num_active = num_active;
  for (int i = 1; i < capacity; i++) {
    state_->threads.emplace_back([this, i] {
      int32_t core = kNoCore;
      for (uint32_t seen = state_->park(i);;) {
        for (int turn = 0; state_->epoch.load(std::memory_order_acquire) == seen && turn < kSpins; turn++) relax();
        state_->epoch.wait(seen, std::memory_order_acquire);
        seen = state_->epoch.load(std::memory_order_acquire);
        if (uint32_t(i) > seen % kMaxThreads) {
          seen = state_->park(i);
          continue;
        }
        if (!state_->job) return;
        if (core != state_->cores[i]) bind_this_thread(core = state_->cores[i]);
        state_->job(state_->of, i);
        barrier();
      }
    });
  }
  if (cores) resize(num_active, cores);
}

Team::~Team() {
  resize(capacity, nullptr);
  state_->job = nullptr;
  state_->begin(size);
  for (auto &thread : state_->threads) thread.join();
  delete state_;
}

void Team::resize(int num_active, const int32_t *cores) {
  if (cores) std::copy(cores + 1, cores + num_active, state_->cores.begin() + 1);
  if (num_active == size) return;
  size = num_active;
  state_->resumed_at.store(state_->epoch.load(std::memory_order_relaxed), std::memory_order_release);
  state_->num_active.store(num_active, std::memory_order_release);
  state_->num_active.notify_all();
}

void Team::call(void (*job)(void *, int), void *of) {
  if (size > 1) {
    state_->job = job;
    state_->of = of;
    state_->begin(size);
  }
  job(of, 0);
  barrier();
}

void Team::barrier() {
  const int num = size;  // read before we are counted: the caller may resize once all are
  if (num == 1) return;
  uint32_t phase = state_->phase.load(std::memory_order_relaxed);
  if (state_->num_here.fetch_add(1, std::memory_order_acq_rel) == num - 1) {
    state_->num_here.store(0, std::memory_order_relaxed);
    state_->phase.store(phase + 1);  // in one order with who goes to sleep
    state_->phase.notify_all();
    return;
  }
  auto is_here = [&] { return state_->phase.load(std::memory_order_acquire) != phase; };
  thread_local int spins = kSpins;  // fewer where they were of no use
  for (int turn = 0; turn < spins; turn++, relax())
    if (is_here()) {
      spins = std::min(2 * spins, kSpins);
      return;
    }
  // Another process has the core of one of us, or there are more threads than cores: who is late may need this one.
  spins = std::max(spins / 2, kFewSpins);
  for (const auto until = Clock::now() + kYielding; Clock::now() < until; std::this_thread::yield())
    if (is_here()) return;
  state_->phase.wait(phase, std::memory_order_acquire);
}

#define API extern "C" __attribute__((visibility("default")))

API void *diptych_team_create(int32_t capacity, int32_t num_active, const int32_t *cores) {
  return new Team(capacity, num_active, cores);
}

API void diptych_team_resize(void *team, int32_t num_active, const int32_t *cores) {
  static_cast<Team *>(team)->resize(num_active, cores);
}

API void diptych_team_destroy(void *team) { delete static_cast<Team *>(team); }

// What the library was built from; see build.py.
API const char *diptych_sources() { return DIPTYCH_SOURCES; }

// Whether this process may use the matrix unit: the processor has it, for bf16 and int8, and the system saves its tiles
// for a process that asks.
static bool may_use_tiles() {
#if defined(__x86_64__) && defined(__linux__) && !defined(DIPTYCH_NO_TILES)
  constexpr unsigned kNeeded = 1u << 22 | 1u << 24 | 1u << 25;  // of leaf 7's edx: AMX-BF16, AMX-TILE, AMX-INT8
  constexpr long kAskForState = 0x1023, kTileData = 18;         // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kNeeded) == kNeeded &&
         syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
#else
  return false;
#endif
}

// Those that this build and this processor have, best first, separated by spaces.
API const char *diptych_isas() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    bool has_dot = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
                   __builtin_cpu_supports("avx512vnni");
    if (has_dot && may_use_tiles()) return "amx avx512bf16 avx512 avx2 portable";
    return has_dot ? "avx512bf16 avx512 avx2 portable" : "avx512 avx2 portable";
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2 portable";
#endif
  return "portable";
}
