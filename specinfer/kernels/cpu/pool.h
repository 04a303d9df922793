// Threads that share work out in pieces.
//
// Whoever has work, the caller, cuts it into pieces and takes pieces itself; sleeping or busy threads cost it
// nothing, for it waits only for pieces that a thread has begun. A thread without work looks for some as long
// as work usually is apart, then sleeps: on cores that are shared, a thread that spins keeps the one it waits
// for from running (docs/log.md has the measurements).
//
//   ticket    number of the job << 32 | pieces nobody has taken: one compare-and-swap takes one
//   done      pieces that are finished; the caller goes on when it is all of them
//
// Whoever has taken a piece keeps its job from ending, so what a job consists of can be read without a lock.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace specinfer {

class Pool {
 public:
  static Pool& get();

  // How many threads work, the caller among them; 1 <= threads.
  void resize(int threads);
  int threads() const { return threads_; }

  // f(0), ..., f(pieces - 1), each once, on any thread, in any order; returns when all have returned.
  template <typename F>
  void run(int64_t pieces, const F& f) {
    if (pieces <= 1 || threads_ == 1) {
      for (int64_t i = 0; i < pieces; ++i) f(i);
      return;
    }
    for (int64_t first = 0; first < pieces; first += kMostPieces) {
      const Part<F> part{&f, first};
      share(static_cast<uint32_t>(std::min(kMostPieces, pieces - first)), &Part<F>::call, &part);
    }
  }

  // f(begin, end) over [0, n), cut into ranges of at least `least`, a few for every thread.
  template <typename F>
  void split(int64_t n, int64_t least, const F& f) {
    const int64_t most = kPiecesPerThread * threads_;
    const int64_t pieces = std::max<int64_t>(1, std::min(most, n / std::max<int64_t>(1, least)));
    run(pieces, [&](int64_t i) { f(n * i / pieces, n * (i + 1) / pieces); });
  }

  // Held by whoever calls into the library: one piece of work at a time.
  std::mutex& turn() { return turn_; }

 private:
  static constexpr int64_t kMostPieces = 1 << 16;
  static constexpr int64_t kPiecesPerThread = 4;

  using Call = void (*)(const void*, int64_t);

  template <typename F>
  struct Part {
    const F* f;
    int64_t first;
    static void call(const void* part, int64_t i) {
      const auto* p = static_cast<const Part*>(part);
      (*p->f)(p->first + i);
    }
  };

  Pool() = default;
  void share(uint32_t pieces, Call call, const void* what);
  bool work();
  void serve();
  void start();
  void stop();

  int threads_ = 1;
  std::vector<std::thread> workers_;
  std::mutex turn_;
  Call call_ = nullptr;
  const void* what_ = nullptr;
  uint32_t pieces_ = 0;
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> done_{0};
  std::atomic<uint32_t> caller_sleeps_{0};
  alignas(64) std::atomic<uint32_t> jobs_{0};
  std::atomic<uint32_t> sleepers_{0};
};

}  // namespace specinfer
