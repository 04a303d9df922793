// How threads and processes wait for each other: they spin for a while before they sleep.

#pragma once

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace specinfer {

using Clock = std::chrono::steady_clock;

// Spinning time: the interval between two jobs of a pass, and a little more.
constexpr auto kPatience = std::chrono::microseconds(50);
constexpr int kLooks = 32;  // checks between two readings of the clock

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// True if `there` became true within kPatience.
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

}  // namespace specinfer
