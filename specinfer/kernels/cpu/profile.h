// Time of native calls by operation, while profiling is on.

#pragma once

#include <chrono>
#include <cstdint>

namespace specinfer {

enum class Stage : int32_t { kNorm, kProduct, kRope, kAttention, kGate, kEmbed, kRecurrence, kStages };

class Profile {
 public:
  static Profile& get() {
    static Profile profile;
    return profile;
  }

  bool on = false;
  int64_t nanoseconds[static_cast<int>(Stage::kStages)] = {};
};

// Counts time for its stage while it exists.
class Timed {
 public:
  explicit Timed(Stage stage) : stage_(stage), on_(Profile::get().on) {
    if (on_) began_ = Clock::now();
  }
  ~Timed() {
    if (!on_) return;
    const auto taken = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - began_);
    Profile::get().nanoseconds[static_cast<int>(stage_)] += taken.count();
  }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  const Stage stage_;
  const bool on_;
  Clock::time_point began_;
};

}  // namespace specinfer
