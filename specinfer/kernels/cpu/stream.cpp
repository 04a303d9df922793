#include "stream.h"

#include <atomic>
#include <chrono>

#include "pool.h"
#include "arithmetic.h"

namespace specinfer {
namespace {

constexpr int64_t kLine = 64;     // bytes
constexpr int kStreams = 4;       // per thread: several streams reach a higher bandwidth than one
constexpr int64_t kAhead = 128;   // lines between the current and the prefetched address
constexpr int64_t kLeast = 4096;  // minimum lines of a job

}  // namespace

double stream(const void* from, int64_t bytes) {
  const int64_t lines = bytes / kLine / kStreams;
  std::atomic<uint32_t> total{0};  // keeps the reads from being optimized away
  const auto began = std::chrono::steady_clock::now();
  Pool::get().split(lines, kLeast, [&](int64_t first, int64_t last) {
    const char* const at = static_cast<const char*>(from) + first * kStreams * kLine;
    Words sums[kStreams];
    for (Words& sum : sums) sum = Words(0);
    for (int64_t line = 0; line < last - first; ++line) {
      each<kStreams>([&](auto s) {
        const char* const here = at + (s * (last - first) + line) * kLine;
        __builtin_prefetch(here + kAhead * kLine);
        sums[s] = sums[s] + load_vector<uint32_t>(here);
      });
    }
    for (const Words& part : sums) total += sum(part);
  });
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - began;
  return static_cast<double>(lines * kStreams * kLine) / taken.count();
}

}  // namespace specinfer
