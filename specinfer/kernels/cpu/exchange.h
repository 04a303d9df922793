// Processes of one host, the ranks, that exchange numbers through shared memory.
//
// Every operation consists of one or more turns. In a turn a rank writes one of its two slots, publishes it, and reads
// the others' slots once they are published. A rank starts a turn when all have published the turn before. A rank that
// has published a turn has read the turn before, whose slots are written next. So no rank waits twice per turn.
//
// All ranks call the same operations in the same order. A lost rank stays lost: from then on every operation fails, on
// this rank and, after they are notified, on the others.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "patience.h"

namespace specinfer {

// Why a rank is lost: it has ended, it did not respond within the limit, or it is at another operation.
enum class Loss : int32_t { kNone, kGone, kLate, kElsewhere };

class Exchange {
 public:
  // Size of the shared memory, which must be all zeros before the first use.
  static int64_t bytes(int32_t ranks, int64_t slot) {
    return ranks * (static_cast<int64_t>(sizeof(Place)) + kSlots * round_up_to_line(slot));
  }

  // At most `slot` bytes move in a turn.
  Exchange(void* memory, int32_t ranks, int32_t rank, int64_t slot);
  // Leaves; the memory may be unmapped afterwards.
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Seconds that a turn waits for another rank.
  void set_limit(double seconds) { limit_ = std::chrono::duration<double>(seconds); }

  // ---- operations: true, or false if a rank is lost ----

  // Element-wise maximum over all ranks, compared by bits as in quantized_rows.h; numbers are >= 0.
  bool largest(float* numbers, int64_t count);
  // Element-wise sums over all ranks.
  bool add(int32_t* numbers, int64_t count);
  // Concatenates every rank's bytes, bytes[r] of rank r; null: this rank does not read them.
  bool gather(const void* own, const int64_t* bytes, void* into);

  // ---- state ----

  Loss loss() const { return loss_; }
  int32_t lost() const { return lost_; }  // the rank

  // Nanoseconds in operations, and in them waiting for others; turns; bytes written to slots.
  struct Figures {
    int64_t nanoseconds, waited, turns, bytes;
  } figures{};

 private:
  static constexpr int kSlots = 2;
  static constexpr int64_t kLine = 128;  // bytes that caches transfer together
  static int64_t round_up_to_line(int64_t n) { return (n + kLine - 1) / kLine * kLine; }

  enum class Operation : int32_t { kNone, kLargest, kAdd, kGather };
  struct Note {  // describes a slot
    Operation operation;
    int64_t bytes;
  };
  // State of a rank that others see; data that change at different times have separate cache lines.
  struct Place {
    alignas(kLine) std::atomic<uint32_t> turn;  // last written turn
    Note notes[kSlots];
    alignas(kLine) std::atomic<uint32_t> sleepers;  // waiting for `turn` to change
    std::atomic<int32_t> process;
    std::atomic<int32_t> gone;  // 0, or 1 + the lost rank; its own rank if it left
  };
  class Running;  // an operation

  uint8_t* slot_of(int32_t rank) const {
    return slots_ + (rank * kSlots + turn_ % kSlots) * round_up_to_line(slot_);
  }
  void leave(int32_t rank);  // a rank that this process knows to have ended
  uint8_t* begin();
  void say(Operation operation, int64_t bytes);
  const uint8_t* wait_for(int32_t rank, Operation operation, int64_t bytes);
  bool wait(int32_t rank, uint32_t turn);
  int32_t first_lost(int32_t rank) const;
  bool ended(int32_t rank);
  bool lose(int32_t rank, Loss loss);
  // f(number of the first element, count, a rank's slot) for all turns and other ranks.
  template <typename T, typename F>
  bool all_turns(Operation operation, T* numbers, int64_t count, const F& f);

  Place* const places_;
  uint8_t* const slots_;
  const int32_t ranks_, rank_;
  const int64_t slot_;
  std::chrono::duration<double> limit_{10.0};
  std::vector<int> watched_;  // a file descriptor per rank that shows when its process has ended
  uint32_t turn_ = 0;
  Loss loss_ = Loss::kNone;
  int32_t lost_ = 0;
};

}  // namespace specinfer
