// Threads that share work in pieces.
//
// The caller divides its work into pieces and takes pieces itself. It waits only for pieces that a thread has started,
// so sleeping or busy threads do not delay it. An idle thread spins for the usual interval between jobs, then
// sleeps: on shared cores, a spinning thread would block the one it waits for.

#pragma once

#include <cstdint>

namespace specinfer {

class Pool {
 public:
  static Pool& get();

  // Sets the number of threads, including the caller; 1 <= threads.
  void resize(int threads);
  int threads() const { return threads_; }

  // Calls f(0), ..., f(pieces - 1), each once, on any thread; returns when all have returned. They start in that order,
  // so a call may wait for the end of an earlier one.
  template <typename F>
  void run(int64_t pieces, const F& f) {
    if (pieces <= 1 || threads_ == 1) {
      for (int64_t i = 0; i < pieces; ++i) f(i);
      return;
    }
    share(pieces, [](const void* what, int64_t i) { (*static_cast<const F*>(what))(i); }, &f);
  }

  // The number of ranges of [0, n), of at least `least`, a few per thread.
  int64_t ranges(int64_t n, int64_t least) const {
    const int64_t most = kPiecesPerThread * threads_, some = n / (least < 1 ? 1 : least);
    return some < 1 ? 1 : some < most ? some : most;
  }

  // Calls f(begin, end) over [0, n), in ranges of at least `least`.
  template <typename F>
  void split(int64_t n, int64_t least, const F& f) {
    const int64_t pieces = ranges(n, least);
    run(pieces, [&](int64_t i) { f(n * i / pieces, n * (i + 1) / pieces); });
  }

 private:
  friend class Claim;
  static constexpr int64_t kPiecesPerThread = 4;

  using Call = void (*)(const void*, int64_t);
  struct State;  // of the threads

  Pool();
  void share(int64_t pieces, Call call, const void* what);

  int threads_ = 1;
  State* state_;
};

// Exclusive use of the pool and the scratch memory during a call into the library.
class Claim {
 public:
  Claim();
  ~Claim();
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;
};

}  // namespace specinfer
