// Reads of a whole row of logits.

#pragma once

#include <numeric>
#include <string>
#include <vector>

#include "numbers.h"

namespace proof {

// ln(E) of verify/noise.py.
inline double log_exponential(uint64_t key, uint32_t id) {
  constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;
  const auto mix = [](uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
  };
  uint32_t h = id;
  h = (h ^ (h >> 16)) * 0x7FEB352Du;
  h = (h ^ (h >> 15)) * 0x846CA68Bu;
  h = (h ^ (h >> 16)) ^ static_cast<uint32_t>(key);
  h = h * 0x7FEB352Du;
  h = ((h ^ (h >> 15)) + static_cast<uint32_t>(key >> 32)) * 0x846CA68Bu;
  h = h ^ (h >> 16);
  const uint64_t both = static_cast<uint64_t>(h) << 32 | mix(id * kGolden + mix(key ^ kGolden)) >> 32;
  const double v = (static_cast<double>(both) + 0.5) * 0x1p-64;
  return std::log(v < 0.5 ? -std::log1p(-v) : -std::log((static_cast<double>(~both) + 0.5) * 0x1p-64));
}

inline void prove_reads(const Library& library, Chance& chance) {
  constexpr int64_t size = 1003, n = 20;
  auto logits = chance.normals<float>(size, 4);
  logits[7] = logits[500];
  std::vector<int64_t> order(size), found(size);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
  check(library.most_likely(logits.data(), size, n, found.data()) == n && same(found.data(), order.data(), n),
        "the most likely tokens differ");
  constexpr double temperature = 0.7;
  double total = 0;
  const float highest = logits[order[0]];
  for (const float x : logits) total += std::exp((x - highest) / temperature);
  check(std::fabs(library.mass(logits.data(), size, highest, 1 / temperature) / total - 1) < 1e-5, "the mass is off");
  for (uint64_t trial = 0; trial < 200; ++trial) {
    const uint64_t key = (trial + 1) * 0xD1342543DE82EF95ull;
    int64_t winner = 0;
    double best = INFINITY;
    for (int64_t i = 0; i < size; ++i) {
      const double score = log_exponential(key, static_cast<uint32_t>(i)) - (logits[i] - highest) / temperature;
      if (score < best) {
        best = score;
        winner = i;
      }
    }
    const int64_t count =
        library.racers(logits.data(), size, nullptr, order[0], temperature, 1 / temperature, key, found.data());
    check(count == 1 && found[0] == winner, "race " + std::to_string(trial) + " has another winner");
  }
}

}  // namespace proof
