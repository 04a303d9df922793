#include "exchange.h"

#include <sched.h>

#include <cstring>
#include <type_traits>

#if defined(__linux__)
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#endif

namespace specinfer {
namespace {

constexpr auto kNap = std::chrono::milliseconds(50);  // between checks that a process is alive
// Values for a file descriptor that was not opened yet, that cannot be opened, and that was closed.
constexpr int kUnknown = -1, kNone = -2, kForgotten = -3;

#if defined(__linux__)

// Sleep while `number` equals `seen`, at most kNap. FUTEX_PRIVATE works within one process only.
void sleep_on(std::atomic<uint32_t>& number, uint32_t seen) {
  const timespec nap{0, std::chrono::nanoseconds(kNap).count()};
  syscall(SYS_futex, &number, FUTEX_WAIT, seen, &nap, nullptr, 0);
}

void wake(std::atomic<uint32_t>& number) { syscall(SYS_futex, &number, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

int32_t this_process() { return getpid(); }

// A file descriptor that becomes readable when the process has ended.
int watch(int32_t process) {
  constexpr long kPidfdOpen = 434;  // the same on every architecture
  const long watched = syscall(kPidfdOpen, process, 0);
  return watched >= 0 ? static_cast<int>(watched) : errno == ESRCH ? kForgotten : kNone;
}

bool has_ended(int watched) {
  if (watched < 0) return watched == kForgotten;
  pollfd ask{watched, POLLIN, 0};
  return poll(&ask, 1, 0) == 1;
}

void forget(int watched) { close(watched); }

#else

void sleep_on(std::atomic<uint32_t>&, uint32_t) { sched_yield(); }
void wake(std::atomic<uint32_t>&) {}
int32_t this_process() { return 0; }
int watch(int32_t) { return kNone; }
bool has_ended(int) { return false; }
void forget(int) {}

#endif

}  // namespace

// Measures an operation.
class Exchange::Running {
 public:
  explicit Running(Exchange& of) : of_(of), began_(Clock::now()) {}
  ~Running() { of_.figures.nanoseconds += (Clock::now() - began_) / std::chrono::nanoseconds(1); }

 private:
  Exchange& of_;
  const Clock::time_point began_;
};

Exchange::Exchange(void* memory, int32_t ranks, int32_t rank, int64_t slot)
    : places_(static_cast<Place*>(memory)),
      slots_(reinterpret_cast<uint8_t*>(places_ + ranks)),
      ranks_(ranks),
      rank_(rank),
      slot_(slot),
      watched_(ranks, kUnknown),
      turn_(places_[rank].turn.load()) {
  places_[rank].process.store(this_process());
}

Exchange::~Exchange() {
  leave(rank_);
  for (const int watched : watched_) {
    if (watched >= 0) forget(watched);
  }
}

void Exchange::leave(int32_t rank) {
  int32_t none = 0;
  places_[rank].gone.compare_exchange_strong(none, rank + 1);
  wake(places_[rank].turn);
}

bool Exchange::lose(int32_t rank, Loss loss) {
  loss_ = loss;
  lost_ = rank;
  int32_t none = 0;
  places_[rank_].gone.compare_exchange_strong(none, rank + 1);
  wake(places_[rank_].turn);
  return false;
}

bool Exchange::ended(int32_t rank) {
  int& watched = watched_[rank];
  if (watched == kUnknown) {
    const int32_t process = places_[rank].process.load();
    if (process == 0) return false;  // it has not attached yet
    watched = watch(process);
  }
  return has_ended(watched);
}

// The first rank that any rank has lost, or this one if it left; -1: none.
int32_t Exchange::first_lost(int32_t rank) const {
  for (int32_t r = 0; r < ranks_; ++r) {
    const int32_t gone = places_[r].gone.load() - 1;
    if (gone >= 0 && (gone != r || r == rank)) return gone;
  }
  return -1;
}

bool Exchange::wait(int32_t rank, uint32_t turn) {
  Place& peer = places_[rank];
  // Turn numbers wrap around.
  const auto there = [&] { return static_cast<int32_t>(peer.turn.load(std::memory_order_acquire) - turn) >= 0; };
  if (there()) return true;
  const auto began = Clock::now();
  const auto waited = [&] { return Clock::now() - began; };
  bool came = look_for(there);
  while (!came) {
    peer.sleepers.fetch_add(1);
    const uint32_t seen = peer.turn.load();  // after the line above, or a wake-up could be missed
    const int32_t gone = first_lost(rank);
    if (static_cast<int32_t>(seen - turn) < 0 && gone < 0) sleep_on(peer.turn, seen);
    peer.sleepers.fetch_sub(1);
    came = there();
    if (came) break;
    if (gone >= 0) return lose(gone, Loss::kGone);
    if (ended(rank)) return there() || lose(rank, Loss::kGone);
    if (waited() > limit_) return lose(rank, Loss::kLate);
  }
  figures.waited += waited() / std::chrono::nanoseconds(1);
  return true;
}

// The slot of the turn that starts; null if a rank is lost.
uint8_t* Exchange::begin() {
  if (loss_ != Loss::kNone) return nullptr;
  for (int32_t r = 0; r < ranks_; ++r) {
    if (r != rank_ && !wait(r, turn_)) return nullptr;
  }
  ++turn_;
  return slot_of(rank_);
}

void Exchange::say(Operation operation, int64_t bytes) {
  Place& own = places_[rank_];
  own.notes[turn_ % kSlots] = {operation, bytes};
  own.turn.store(turn_);
  if (own.sleepers.load() > 0) wake(own.turn);
  ++figures.turns;
  figures.bytes += bytes;
}

// A rank's slot of this turn, once it is written; null if the rank is lost.
const uint8_t* Exchange::wait_for(int32_t rank, Operation operation, int64_t bytes) {
  if (!wait(rank, turn_)) return nullptr;
  const Note& note = places_[rank].notes[turn_ % kSlots];
  if (note.operation == operation && note.bytes == bytes) return slot_of(rank);
  lose(rank, Loss::kElsewhere);
  return nullptr;
}

template <typename T, typename F>
bool Exchange::all_turns(Operation operation, T* numbers, int64_t count, const F& f) {
  const Running running(*this);
  const int64_t most = slot_ / static_cast<int64_t>(sizeof(T));
  for (int64_t first = 0; first < count; first += most) {
    const int64_t some = std::min(most, count - first), bytes = some * static_cast<int64_t>(sizeof(T));
    uint8_t* const own = begin();
    if (own == nullptr) return false;
    std::memcpy(own, numbers + first, bytes);
    say(operation, bytes);
    for (int32_t n = 1; n < ranks_; ++n) {
      const uint8_t* const slot = wait_for((rank_ + n) % ranks_, operation, bytes);
      if (slot == nullptr) return false;
      f(numbers + first, some, reinterpret_cast<const T*>(slot));
    }
  }
  return true;
}

bool Exchange::largest(float* numbers, int64_t count) {
  return all_turns(Operation::kLargest, numbers, count, [](float* to, int64_t some, const float* from) {
    for (int64_t i = 0; i < some; ++i) {
      int32_t own, other;
      std::memcpy(&own, to + i, sizeof own);
      std::memcpy(&other, from + i, sizeof other);
      if (other > own) std::memcpy(to + i, &other, sizeof other);
    }
  });
}

bool Exchange::add(int32_t* numbers, int64_t count) {
  // Unsigned, since overflow must wrap around.
  auto* const words = reinterpret_cast<uint32_t*>(numbers);
  return all_turns(Operation::kAdd, words, count, [](uint32_t* to, int64_t some, const uint32_t* from) {
    for (int64_t i = 0; i < some; ++i) to[i] += from[i];
  });
}

bool Exchange::gather(const void* own, const int64_t* bytes, void* into) {
  const Running running(*this);
  const int64_t most = *std::max_element(bytes, bytes + ranks_);
  for (int64_t first = 0; first < most; first += slot_) {
    const auto here = [&](int32_t rank) { return std::clamp(bytes[rank] - first, int64_t{0}, slot_); };
    uint8_t* const slot = begin();
    if (slot == nullptr) return false;
    if (here(rank_) > 0) std::memcpy(slot, static_cast<const uint8_t*>(own) + first, here(rank_));
    say(Operation::kGather, here(rank_));
    if (into == nullptr) continue;
    auto* to = static_cast<uint8_t*>(into) + first;
    for (int32_t r = 0; r < ranks_; to += bytes[r], ++r) {
      const uint8_t* const from = r == rank_ ? slot : wait_for(r, Operation::kGather, here(r));
      if (from == nullptr) return false;
      if (here(r) > 0) std::memcpy(to, from, here(r));
    }
  }
  return true;
}

}  // namespace specinfer
