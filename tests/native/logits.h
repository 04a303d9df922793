// Scans of rows of logits.

#pragma once

#include <numeric>
#include <string>
#include <vector>

#include "numbers.h"

namespace proof {

inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// race_key(seed, position) of verify/noise.py.
inline uint64_t race_key(uint64_t seed, uint64_t position) {
  uint64_t key = 0;
  for (const uint64_t word : {uint64_t{0}, seed, position}) key = mix((key ^ word) + 0x9E3779B97F4A7C15ull);
  return key;
}

// ln(E) of verify/noise.py.
inline double log_exponential(uint64_t key, uint32_t id) {
  constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;
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
  check(std::fabs(library.mass(logits.data(), size, highest, temperature) / total - 1) < 1e-5, "the mass is off");
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
        library.racers(logits.data(), size, nullptr, order[0], temperature, key, found.data());
    check(count == 1 && found[0] == winner, "race " + std::to_string(trial) + " has another winner");
  }
}

// The winner of the race among the ids that pass the filters, in plain loops.
inline int64_t chosen(const std::vector<float>& logits, const std::vector<int64_t>& order, const RowSampling& ask) {
  const auto size = static_cast<int64_t>(logits.size());
  if (ask.temperature == 0) return order[0];
  const auto weight = [&](int64_t id) { return std::exp((logits[id] - logits[order[0]]) / ask.temperature); };
  int64_t kept = ask.top_k > 0 && ask.top_k < size ? ask.top_k : size;
  if (ask.top_p < 1) {
    double total = 0, sum = 0;
    for (int64_t i = 0; i < kept; ++i) total += weight(order[i]);
    int64_t n = 0;
    while (sum < ask.top_p * total) sum += weight(order[n++]);
    kept = n;
  }
  while (weight(order[kept - 1]) < ask.min_p) --kept;
  const uint64_t key = race_key(ask.seed, ask.position);
  int64_t winner = -1;
  double best = INFINITY;
  for (int64_t i = 0; i < kept; ++i) {
    const double score =
        log_exponential(key, static_cast<uint32_t>(order[i])) - (logits[order[i]] - logits[order[0]]) / ask.temperature;
    if (score < best) {
      best = score;
      winner = order[i];
    }
  }
  return winner;
}

template <typename T>
void prove_rows_of_logits(const Library& library, Chance& chance) {
  constexpr int64_t count = 3, size = 1003, stride = 1010, n = 5;
  const auto block = chance.normals<T>(count * stride, 3);
  const std::vector<int64_t> rows{2, 0, 2, 1};
  const std::vector<double> temperatures{0.7, 1, 2, 0.1};
  std::vector<std::vector<float>> logits(count);
  std::vector<std::vector<int64_t>> orders(count, std::vector<int64_t>(size));
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t i = 0; i < size; ++i) logits[r].push_back(widen(block[r * stride + i]));
    std::iota(orders[r].begin(), orders[r].end(), 0);
    std::stable_sort(orders[r].begin(), orders[r].end(),
                     [&](int64_t a, int64_t b) { return logits[r][a] > logits[r][b]; });
  }
  std::vector<int64_t> ids(rows.size() * n), found(rows.size());
  std::vector<float> values(ids.size());
  std::vector<double> masses(rows.size());
  library.likeliest(kType<T>, block.data(), count, size, stride, rows.data(), rows.size(), n, temperatures.data(),
                    ids.data(), values.data(), found.data(), masses.data());
  const std::string name = std::string(" of rows of ") + kName<T>;
  for (size_t at = 0; at < rows.size(); ++at) {
    const auto& row = logits[rows[at]];
    const auto& order = orders[rows[at]];
    double total = 0;
    for (const float x : row) total += std::exp((x - row[order[0]]) / temperatures[at]);
    check(found[at] == n && same(&ids[at * n], order.data(), n) && values[at * n] == row[order[0]] &&
              values[at * n + n - 1] == row[order[n - 1]],
          "the most likely tokens" + name + " differ");
    check(std::fabs(masses[at] / total - 1) < 1e-5, "the mass" + name + " is off");
  }
  const RowSampling kinds[] = {{0, 0, 1, 0},   {0.8, 0, 1, 0},  {1, 40, 1, 0},
                               {1, 0, 0.9, 0}, {1, 0, 1, 0.02}, {1.5, 300, 0.8, 0.01}};
  // In each chosen row but one the likeliest id is banned, and some ids have penalties, the banned one too.
  std::vector<int64_t> changed_ids, ends;
  std::vector<Terms> terms;
  std::vector<std::vector<float>> changed;
  std::vector<std::vector<int64_t>> changed_orders;
  for (size_t at = 0; at < rows.size(); ++at) {
    auto row = logits[rows[at]];
    const auto& order = orders[rows[at]];
    const auto change = [&](int64_t id, const Terms& by) {
      changed_ids.push_back(id);
      terms.push_back(by);
      float v = std::isinf(by.bias) ? by.bias : row[id] + by.bias;
      v = v > 0 ? v / by.repetition : v * by.repetition;
      v = v - by.frequency;
      row[id] = v - by.presence;
    };
    if (at != 1) {
      change(order[0], {-INFINITY, 1, 0, 0});
      change(order[1], {-0.4f, 1, 0, 0});
      for (int64_t i = 0; i < size; i += at + 1) change(order[i], {-0.0f, 1.1f, 0.3f * (i % 3), 0.7f});
    }
    ends.push_back(static_cast<int64_t>(changed_ids.size()));
    auto& sorted = changed_orders.emplace_back(order);
    std::sort(sorted.begin(), sorted.end());
    std::stable_sort(sorted.begin(), sorted.end(), [&](int64_t a, int64_t b) { return row[a] > row[b]; });
    changed.push_back(std::move(row));
  }
  for (const RowSampling& kind : kinds) {
    std::vector<RowSampling> asks(rows.size(), kind);
    for (uint64_t trial = 0; trial < 50; ++trial) {
      for (size_t at = 0; at < rows.size(); ++at) {
        asks[at].seed = trial * 0xD1342543DE82EF95ull;
        asks[at].position = static_cast<int64_t>(at + trial);
      }
      for (const bool change : {false, true}) {
        const int64_t undecided = library.choices(
            kType<T>, block.data(), count, size, stride, rows.data(), rows.size(), asks.data(), changed_ids.data(),
            terms.data(), change ? ends.data() : nullptr, ids.data());
        check(undecided < static_cast<int64_t>(rows.size()), "choices" + name + " are left to others");
        for (size_t at = 0; at < rows.size(); ++at) {
          const auto& row = change ? changed[at] : logits[rows[at]];
          const auto& order = change ? changed_orders[at] : orders[rows[at]];
          check(ids[at] == kUndecided || ids[at] == chosen(row, order, asks[at]), "a choice" + name + " differs");
        }
      }
    }
  }
}

}  // namespace proof
