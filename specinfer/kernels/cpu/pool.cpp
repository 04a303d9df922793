#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "patience.h"

namespace specinfer {
namespace {

constexpr int64_t kMostPieces = int64_t{1} << 31;

}  // namespace

// State shared by the caller and workers.
//
//   ticket    number of the job << 32 | number of untaken pieces: one compare-and-swap takes a piece
//   done      finished pieces; the caller continues when all are
//
// A job does not end while a thread has a piece of it, so the job can be read without a lock.
struct Pool::State {
  std::vector<std::thread> workers;
  std::mutex turn;
  Call call = nullptr;
  const void* what = nullptr;
  uint32_t pieces = 0;
  std::atomic<bool> stopping{false};
  alignas(64) std::atomic<uint64_t> ticket{0};
  alignas(64) std::atomic<uint32_t> done{0};
  std::atomic<uint32_t> caller_sleeps{0};
  alignas(64) std::atomic<uint32_t> jobs{0};
  std::atomic<uint32_t> sleepers{0};

  void start(int threads) {
    stopping = false;
    for (int i = 1; i < threads; ++i) workers.emplace_back([this] { serve(); });
  }

  void stop() {
    stopping = true;
    jobs.fetch_add(1);
    jobs.notify_all();
    for (std::thread& worker : workers) worker.join();
    workers.clear();
  }

  // Take a piece and run it; false if there is none.
  bool work() {
    uint64_t taken = ticket.load(std::memory_order_acquire);
    do {
      if (static_cast<uint32_t>(taken) == 0) return false;
    } while (!ticket.compare_exchange_weak(taken, taken - 1, std::memory_order_acq_rel));
    const uint32_t all = pieces;
    call(what, all - static_cast<uint32_t>(taken));
    if (done.fetch_add(1) + 1 == all && caller_sleeps.load() != 0) done.notify_one();
    return true;
  }

  void serve() {
    for (;;) {
      const uint32_t seen = jobs.load();  // before the check below, or a wake-up could be missed
      if (stopping) return;
      while (work()) {
      }
      if (look_for([&] { return jobs.load(std::memory_order_acquire) != seen; })) continue;
      sleepers.fetch_add(1);
      jobs.wait(seen);
      sleepers.fetch_sub(1);
    }
  }
};

Pool::Pool() : state_(new State) {}

Pool& Pool::get() {
  // Never destroyed, since threads may still sleep in it when the process ends. A forked child has only the thread
  // that forked it, and starts its own pool.
  static Pool* const pool = [] {
    static Pool* made = new Pool;
    pthread_atfork(nullptr, nullptr, [] { made->state_ = new State; });
    return made;
  }();
  return *pool;
}

void Pool::resize(int threads) {
  const Claim claim;
  if (threads == threads_) return;
  state_->stop();
  threads_ = threads;
}

void Pool::share(int64_t pieces, Call call, const void* what) {
  if (pieces >= kMostPieces) {  // more than a ticket can count
    for (int64_t i = 0; i < pieces; ++i) call(what, i);
    return;
  }
  State& state = *state_;
  if (state.workers.empty()) state.start(threads_);
  const auto all = static_cast<uint32_t>(pieces);
  state.call = call;
  state.what = what;
  state.pieces = all;
  state.done.store(0, std::memory_order_relaxed);
  const uint32_t job = state.jobs.load(std::memory_order_relaxed) + 1;
  state.ticket.store(static_cast<uint64_t>(job) << 32 | all, std::memory_order_release);
  state.jobs.store(job);
  if (state.sleepers.load() > 0) state.jobs.notify_all();
  while (state.work()) {
  }
  while (!look_for([&] { return state.done.load(std::memory_order_acquire) == all; })) {
    state.caller_sleeps.store(1);
    const uint32_t done = state.done.load();
    if (done != all) state.done.wait(done);
    state.caller_sleeps.store(0);
  }
}

Claim::Claim() { Pool::get().state_->turn.lock(); }
Claim::~Claim() { Pool::get().state_->turn.unlock(); }

}  // namespace specinfer
