// Processes of one host, the ranks, that exchange numbers through memory they share.
//
// Every operation is a turn, or several. In a turn a rank writes one of its two slots, says so, and reads what it
// needs of the others' slots once they have said so. A rank begins a turn when all have said that of the turn before;
// whoever has said it has read the turn before that one, whose slots are written now. So nobody waits twice.
//
// All ranks call the same operations in the same order. A rank that is lost stays lost: from then on every operation
// fails, of this rank and, as they are told, of the others.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "patience.h"

namespace specinfer {

// Why a rank is lost: it has ended, it did not come within the limit, it is at another operation than this one.
enum class Loss : int32_t { kNone, kGone, kLate, kElsewhere };

class Exchange {
 public:
  // The size of the shared memory, which is all zeros before anybody uses it.
  static int64_t bytes(int32_t ranks, int64_t slot) {
    return ranks * (static_cast<int64_t>(sizeof(Place)) + kSlots * round_up_to_line(slot));
  }

  // `slot` bytes move in a turn, at the most.
  Exchange(void* memory, int32_t ranks, int32_t rank, int64_t slot);
  // Leaves; the memory may go then.
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Seconds that a turn waits for another rank.
  void set_limit(double seconds) { limit_ = std::chrono::duration<double>(seconds); }

  // ---- operations: true, or false where a rank is lost ----

  // The largest of all ranks' numbers, compared by their bits as quantized_rows.h does; none is below 0.
  bool largest(float* numbers, int64_t count);
  // The sums of all ranks' numbers.
  bool add(int32_t* numbers, int64_t count);
  // Every rank's bytes, so many of each, side by side; null: this rank does not read them.
  bool gather(const void* own, const int64_t* bytes, void* into);

  // ---- what became of it ----

  Loss loss() const { return loss_; }
  int32_t lost() const { return lost_; }  // the rank

  // Nanoseconds within operations, those of them in which others were waited for; turns; bytes written to slots.
  struct Figures {
    int64_t nanoseconds, waited, turns, bytes;
  } figures{};

 private:
  static constexpr int kSlots = 2;
  static constexpr int64_t kLine = 128;  // bytes that caches move together
  static int64_t round_up_to_line(int64_t n) { return (n + kLine - 1) / kLine * kLine; }

  enum class Operation : int32_t { kNone, kLargest, kAdd, kGather };
  struct Note {  // on a slot
    Operation operation;
    int64_t bytes;
  };
  // What the others see of a rank; each has a cache line of its own for what changes at other times.
  struct Place {
    alignas(kLine) std::atomic<uint32_t> turn;  // that it has written
    Note notes[kSlots];
    alignas(kLine) std::atomic<uint32_t> sleepers;  // that wait for `turn` to change
    std::atomic<int32_t> process;
    std::atomic<int32_t> gone;  // 0, or the rank that is lost, its own where it left, + 1
  };
  class Running;  // an operation

  uint8_t* slot_of(int32_t rank) const {
    return slots_ + (rank * kSlots + turn_ % kSlots) * round_up_to_line(slot_);
  }
  void leave(int32_t rank);  // a rank that has ended, as this process knows
  uint8_t* begin();
  void say(Operation operation, int64_t bytes);
  const uint8_t* wait_for(int32_t rank, Operation operation, int64_t bytes);
  bool wait(int32_t rank, uint32_t turn);
  int32_t first_lost(int32_t rank) const;
  bool ended(int32_t rank);
  bool lose(int32_t rank, Loss loss);
  // f(number of the first one, how many, the slot of a rank) for all turns and other ranks.
  template <typename T, typename F>
  bool all_turns(Operation operation, T* numbers, int64_t count, const F& f);

  Place* const places_;
  uint8_t* const slots_;
  const int32_t ranks_, rank_;
  const int64_t slot_;
  std::chrono::duration<double> limit_{10.0};
  std::vector<int> watched_;  // of each rank a file descriptor that tells when its process has ended
  uint32_t turn_ = 0;
  Loss loss_ = Loss::kNone;
  int32_t lost_ = 0;
};

}  // namespace specinfer
