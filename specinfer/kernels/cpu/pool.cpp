#include "pool.h"

#include <pthread.h>

#include <chrono>
#include <new>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace specinfer {
namespace {

using Clock = std::chrono::steady_clock;

// How long to look before sleeping: what lies between two jobs of a pass, and a little more (docs/log.md).
constexpr auto kPatience = std::chrono::microseconds(50);
constexpr int kLooks = 32;  // between two readings of the clock

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Whether `there` became true within kPatience.
template <typename F>
bool look_for(const F& there) {
  for (int i = 0; i < kLooks; ++i) {
    if (there()) return true;
    pause();
  }
  const auto until = Clock::now() + kPatience;
  do {
    for (int i = 0; i < kLooks; ++i) {
      if (there()) return true;
      pause();
    }
  } while (Clock::now() < until);
  return false;
}

}  // namespace

Pool& Pool::get() {
  // Never destroyed: threads may still sleep in it when the process ends. A forked child has no threads but the
  // one that forked it, and starts afresh.
  static Pool* pool = [] {
    static std::aligned_storage_t<sizeof(Pool), alignof(Pool)> memory;
    pthread_atfork(nullptr, nullptr, [] {
      const int threads = reinterpret_cast<Pool*>(&memory)->threads_;
      (new (&memory) Pool)->threads_ = threads;
    });
    return new (&memory) Pool;
  }();
  return *pool;
}

void Pool::resize(int threads) {
  const std::lock_guard lock(turn_);
  if (threads == threads_) return;
  stop();
  threads_ = threads;
}

void Pool::start() {
  stopping_ = false;
  for (int i = 1; i < threads_; ++i) workers_.emplace_back([this] { serve(); });
}

void Pool::stop() {
  stopping_ = true;
  jobs_.fetch_add(1);
  jobs_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
}

void Pool::share(uint32_t pieces, Call call, const void* what) {
  if (workers_.empty()) start();
  call_ = call;
  what_ = what;
  pieces_ = pieces;
  done_.store(0, std::memory_order_relaxed);
  const uint32_t job = jobs_.load(std::memory_order_relaxed) + 1;
  ticket_.store(static_cast<uint64_t>(job) << 32 | pieces, std::memory_order_release);
  jobs_.store(job);
  if (sleepers_.load() > 0) jobs_.notify_all();
  while (work()) {
  }
  const auto all_done = [&] { return done_.load(std::memory_order_acquire) == pieces; };
  while (!look_for(all_done)) {
    caller_sleeps_.store(1);
    const uint32_t done = done_.load();
    if (done != pieces) done_.wait(done);
    caller_sleeps_.store(0);
  }
}

// Take a piece and do it; false when there is none.
bool Pool::work() {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  do {
    if (static_cast<uint32_t>(ticket) == 0) return false;
  } while (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel));
  // The highest piece is taken first; callers number theirs from the front.
  const uint32_t pieces = pieces_;
  call_(what_, pieces - static_cast<uint32_t>(ticket));
  if (done_.fetch_add(1) + 1 == pieces && caller_sleeps_.load() != 0) done_.notify_one();
  return true;
}

void Pool::serve() {
  while (!stopping_) {
    const uint32_t seen = jobs_.load();
    while (work()) {
    }
    if (look_for([&] { return jobs_.load(std::memory_order_acquire) != seen; })) continue;
    sleepers_.fetch_add(1);
    jobs_.wait(seen);
    sleepers_.fetch_sub(1);
  }
}

}  // namespace specinfer
