// Reads of a whole row of logits, for sampling and verification; the twins are in verify/scan.py.
//
// Each op answers exactly (most_likely), or so that whoever asks can still decide in float64 (mass, racers):
// choices are then the twins' to the last token, whatever exp and log a machine has.

#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vector.h"

namespace specinfer {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// How the screen's float32 may err; scan.py has the argument for it.
constexpr double kScreen = (1.0 + 1.0 / 1024) * 4294967296.0;
// Scores closer than this, relative to their size, are left to the caller: a thousand times what two
// machines' exp and log differ by.
constexpr double kTie = 1e-11;

struct Candidate {
  float value;
  int64_t id;
};

bool before(const Candidate& a, const Candidate& b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

// f(i) for the lanes of a mask, counted from `first`.
template <typename F>
void for_each_lane(uint32_t lanes, int64_t first, const F& f) {
  for (; lanes != 0; lanes &= lanes - 1) f(first + __builtin_ctz(lanes));
}

// The n best so far; `bound` is what a later value must exceed to be among them. Equal values come in the
// order of their ids, so a later one never replaces an earlier one.
class Best {
 public:
  explicit Best(size_t n) : n_(n), capacity_(4 * n + 256) { found_.reserve(capacity_ + kLanes); }

  float bound() const { return bound_; }

  void add(float value, int64_t id) { found_.push_back({value, id}); }

  void tidy() {
    if (found_.size() >= capacity_) keep();
  }

  std::vector<Candidate> sorted() {
    if (found_.size() > n_) keep();
    std::sort(found_.begin(), found_.end(), before);
    return std::move(found_);
  }

 private:
  void keep() {
    std::nth_element(found_.begin(), found_.begin() + (n_ - 1), found_.end(), before);
    found_.resize(n_);
    bound_ = found_[n_ - 1].value;
  }

  size_t n_;
  size_t capacity_;
  float bound_ = kMinusInfinity;
  std::vector<Candidate> found_;
};

// The noise of verify/noise.py.
struct Noise {
  uint64_t key;
  uint64_t mixed_key;

  explicit Noise(uint64_t k) : key(k), mixed_key(mix(k ^ kGolden)) {}

  static constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;

  static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
  }

  // Of one id, or of one in each lane.
  template <typename Id>
  Id high(Id h) const {
    h = (h ^ (h >> 16)) * 0x7FEB352Du;
    h = (h ^ (h >> 15)) * 0x846CA68Bu;
    h = (h ^ (h >> 16)) ^ static_cast<uint32_t>(key);
    h = h * 0x7FEB352Du;
    h = ((h ^ (h >> 15)) + static_cast<uint32_t>(key >> 32)) * 0x846CA68Bu;
    return h ^ (h >> 16);
  }

  double log_exponential(uint32_t id) const {
    const uint64_t low = mix(id * kGolden + mixed_key) >> 32;
    const uint64_t h = (static_cast<uint64_t>(high(id)) << 32) | low;
    const double v = (static_cast<double>(h) + 0.5) * 0x1p-64;
    const double rest = (static_cast<double>(~h) + 0.5) * 0x1p-64;
    return std::log(v < 0.5 ? -std::log1p(-v) : -std::log(rest));
  }
};

}  // namespace

int64_t most_likely(const float* row, int64_t size, int64_t n, int64_t* ids) {
  Best best(std::min(n, size));
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const uint32_t above = lanes_of(load(row + i) > best.bound());
    if (above == 0) continue;
    for_each_lane(above, i, [&](int64_t at) { best.add(row[at], at); });
    best.tidy();
  }
  for (; i < size; ++i) {
    if (row[i] > best.bound()) {
      best.add(row[i], i);
      best.tidy();
    }
  }
  const auto found = best.sorted();
  std::transform(found.begin(), found.end(), ids, [](const Candidate& c) { return c.id; });
  return static_cast<int64_t>(found.size());
}

double mass(const float* row, int64_t size, double highest, double inverse_temperature) {
  const auto top = static_cast<float>(highest), scale = static_cast<float>(inverse_temperature);
  double sums[kLanes] = {}, sum = 0.0;
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    float weights[kLanes];
    store(weights, exp((load(row + i) - top) * scale));
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] += weights[lane];
  }
  for (; i < size; ++i) sum += std::exp((row[i] - top) * scale);
  for (const double part : sums) sum += part;
  return sum;
}

int64_t racers(const float* row, int64_t size, const int64_t* ids, int64_t top, double temperature,
               double inverse_temperature, uint64_t key, int64_t* indices) {
  const Noise noise(key);
  const float highest = row[top], scale = static_cast<float>(inverse_temperature);
  struct Racer {
    int64_t index;
    double score;
  };
  std::vector<Racer> found;
  double best = std::numeric_limits<double>::infinity();
  float bound = 0.0f;  // an entry may win while the upper half of its hash is at most w * bound
  const auto run = [&](int64_t i) {
    const double score = noise.log_exponential(static_cast<uint32_t>(ids ? ids[i] : i)) -
                         (static_cast<double>(row[i]) - static_cast<double>(highest)) / temperature;
    if (!(score <= best + kTie * (1.0 + std::fabs(best)))) return;
    found.push_back({i, score});
    if (score < best) {
      best = score;
      bound = static_cast<float>(std::exp(best) * kScreen);
    }
  };
  const auto run_others = [&](int64_t i) {
    if (i != top) run(i);
  };
  run(top);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    Words id = bits_as<uint32_t>(lane_numbers()) + static_cast<uint32_t>(i);
    if (ids != nullptr) {
      uint32_t names[kLanes];
      std::copy(ids + i, ids + i + kLanes, names);
      id = load_vector<uint32_t>(names);
    }
    const Floats reach = exp((load(row + i) - highest) * scale) * bound;
    for_each_lane(lanes_of(to_floats(noise.high(id)) <= reach), i, run_others);
  }
  for (; i < size; ++i) {
    const auto high = static_cast<float>(noise.high(static_cast<uint32_t>(ids ? ids[i] : i)));
    if (high <= std::exp((row[i] - highest) * scale) * bound) run_others(i);
  }
  const double limit = best + kTie * (1.0 + std::fabs(best));
  found.erase(std::remove_if(found.begin(), found.end(), [&](const Racer& r) { return !(r.score <= limit); }),
              found.end());
  std::sort(found.begin(), found.end(), [](const Racer& a, const Racer& b) { return a.index < b.index; });
  std::transform(found.begin(), found.end(), indices, [](const Racer& r) { return r.index; });
  return static_cast<int64_t>(found.size());
}

}  // namespace specinfer
