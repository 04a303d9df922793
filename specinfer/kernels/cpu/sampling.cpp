#include "sampling.h"

#include "logit_row.h"

namespace specinfer {

int64_t most_likely(const float* row, int64_t size, int64_t n, int64_t* ids) {
  const auto found = likeliest_of(row, size, n);
  std::transform(found.begin(), found.end(), ids, [](const Candidate& c) { return c.id; });
  return static_cast<int64_t>(found.size());
}

double mass(const float* row, int64_t size, double highest, double temperature) {
  return mass_of(row, size, highest, temperature);
}

int64_t racers(const float* row, int64_t size, const int64_t* ids, int64_t top, double temperature, uint64_t key,
               int64_t* indices) {
  const auto found = race(row, size, ids, top, temperature, Noise(key));
  std::transform(found.begin(), found.end(), indices, [](const Racer& r) { return r.index; });
  return static_cast<int64_t>(found.size());
}

bool likeliest(const LogitBlock& block, const ChosenRows& rows, int64_t n, const double* temperatures, int64_t* ids,
               float* values, int64_t* found, double* masses) {
  return for_rows(block, rows, [&](const auto* row, int64_t at) {
    bool numbers = true;
    auto best = likeliest_of(row, block.size, n, &numbers);
    if (!numbers || (!best.empty() && best[0].value == kInfinity)) best.clear();
    const auto count = static_cast<int64_t>(best.size());
    for (int64_t i = 0; i < n; ++i) {
      ids[at * n + i] = i < count ? best[i].id : -1;
      values[at * n + i] = i < count ? best[i].value : -kInfinity;
    }
    found[at] = count;
    masses[at] = count == 0 ? std::numeric_limits<double>::quiet_NaN()
                            : mass_of(row, block.size, best[0].value, temperatures[at]);
  });
}

}  // namespace specinfer
