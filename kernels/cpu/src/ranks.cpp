// Processes of one machine that compute a step together, through memory that all have mapped. Built once.
//
//     each puts its part into its slot  ->  meet: until all have  ->  each reads what all have put
//
// There are two slots a rank, used in turn: who writes one has met the others since they read it last. Waiting spins
// for a moment, because ranks are microseconds apart, then lets other threads run, and then sleeps.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <thread>

#if defined(__linux__)
#include <climits>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int kSpins = 4000;  // some 50 us
constexpr std::chrono::milliseconds kYielding{1};
constexpr int64_t kBlock = 1024;              // floats that are added at a time: they stay in cache
enum Met : int32_t { kAll = 0, kAbandoned = 1, kLate = 2, kUnlike = 3 };

struct alignas(64) Rank {
  std::atomic<uint32_t> met;       // how often it has met the others, modulo 2^32
  std::atomic<uint32_t> sleepers;  // that wait for it
  std::atomic<int64_t> stated[2];  // bytes of the whole that its even and its odd meetings were last about
};

// Zeros at first; after it, from the next multiple of 4096 bytes, the slots: [2][size] of slot_bytes.
struct Shared {
  alignas(64) std::atomic<uint32_t> is_abandoned;
  Rank ranks[1];  // of `size`
};

int64_t now_ms() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

void sleep_while([[maybe_unused]] std::atomic<uint32_t> &word, [[maybe_unused]] uint32_t value,
                 [[maybe_unused]] int64_t most_ms) {
#if defined(__linux__)
  timespec time{most_ms / 1000, most_ms % 1000 * 1000000};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &time, nullptr, 0);
#else
  std::this_thread::yield();
#endif
}

void wake([[maybe_unused]] std::atomic<uint32_t> &word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

// look_ms: a sleeper looks again after as long at most: an abandonment may come just before it sleeps.
Met wait_for(Shared &shared, Rank &other, uint32_t count, int64_t timeout_ms, int64_t look_ms) {
  auto is_there = [&](std::memory_order order) { return int32_t(other.met.load(order) - count) >= 0; };
  for (int turn = 0; turn < kSpins; turn++, relax())
    if (is_there(std::memory_order_acquire)) return kAll;
  using Clock = std::chrono::steady_clock;
  for (const auto until = Clock::now() + kYielding; Clock::now() < until; std::this_thread::yield())
    if (is_there(std::memory_order_acquire)) return kAll;
  const int64_t until = now_ms() + timeout_ms;
  other.sleepers.fetch_add(1);
  Met found = kAll;
  for (;;) {
    uint32_t seen = other.met.load();
    if (int32_t(seen - count) >= 0) break;
    if (shared.is_abandoned.load()) found = kAbandoned;
    const int64_t left_ms = until - now_ms();
    if (found == kAll && left_ms <= 0) found = kLate;
    if (found != kAll) break;
    sleep_while(other.met, seen, left_ms < look_ms ? left_ms : look_ms);
  }
  other.sleepers.fetch_sub(1);
  return found;
}

// whole: the bytes that all must mean to meet about. Ranks whose steps are not the same end here, before anyone reads
// what was meant otherwise.
Met meet(Shared &shared, int rank, int size, int64_t timeout_ms, int64_t look_ms, int64_t whole) {
  Rank &own = shared.ranks[rank];
  const uint32_t count = own.met.load(std::memory_order_relaxed) + 1;
  own.stated[count % 2].store(whole);
  own.met.store(count);
  if (own.sleepers.load()) wake(own.met);
  for (int other = 0; other < size; other++) {
    Met found = other == rank ? kAll : wait_for(shared, shared.ranks[other], count, timeout_ms, look_ms);
    if (found != kAll) return found;
  }
  for (int other = 0; other < size; other++)
    if (shared.ranks[other].stated[count % 2].load() != whole) return kUnlike;
  return kAll;
}

char *slot_of(Shared &shared, int rank, int size, int64_t slot_bytes, uint32_t count) {
  const int64_t head = (int64_t(size + 1) * 64 + 4095) / 4096 * 4096;
  return (char *)&shared + head + (int64_t(count % 2) * size + rank) * slot_bytes;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

// Puts num_bytes, at most slot_bytes, into this rank's next slot, and waits until all ranks have put theirs. whole: of
// what they are parts of, in bytes; it is the same at all ranks, or kUnlike.
API int32_t diptych_ranks_put(void *memory, int32_t rank, int32_t size, int64_t slot_bytes, int64_t timeout_ms,
                              int64_t look_ms, const void *part, int64_t num_bytes, int64_t whole) {
  Shared &shared = *(Shared *)memory;
  std::memcpy(slot_of(shared, rank, size, slot_bytes, shared.ranks[rank].met.load() + 1), part, num_bytes);
  return meet(shared, rank, size, timeout_ms, look_ms, whole);
}

// part: num_floats of every rank; becomes their sum, added in the order of the ranks: the same bits at each.
API int32_t diptych_ranks_sum(void *memory, int32_t rank, int32_t size, int64_t slot_bytes, int64_t timeout_ms,
                              int64_t look_ms, float *part, int64_t num_floats) {
  Shared &shared = *(Shared *)memory;
  const int64_t most = slot_bytes / int64_t(sizeof(float)), whole = num_floats * int64_t(sizeof(float));
  for (int64_t start = 0; start < num_floats; start += most) {
    const int64_t num = num_floats - start < most ? num_floats - start : most;
    const void *own = part + start;
    Met found =
        Met(diptych_ranks_put(memory, rank, size, slot_bytes, timeout_ms, look_ms, own, num * sizeof(float), whole));
    if (found != kAll) return found;
    const uint32_t count = shared.ranks[rank].met.load();
    for (int64_t first = 0; first < num; first += kBlock) {
      float *to = part + start + first;
      const int64_t length = num - first < kBlock ? num - first : kBlock;
      for (int other = 0; other < size; other++) {
        const float *from = (const float *)slot_of(shared, other, size, slot_bytes, count) + first;
        if (other == 0) std::memcpy(to, from, length * sizeof(float));
        else
          for (int64_t i = 0; i < length; i++) to[i] += from[i];
      }
    }
  }
  return kAll;
}

// Whoever waits, or will, returns: a rank is gone.
API void diptych_ranks_abandon(void *memory, int32_t size) {
  Shared &shared = *(Shared *)memory;
  shared.is_abandoned.store(1);
  for (int rank = 0; rank < size; rank++) wake(shared.ranks[rank].met);
}
