// Scans of one row of logits, float32 or bfloat16 in place; the twins are in verify/target_law.py.
//
// Each result is exact (highest, likeliest_of), or accurate enough that the caller can decide in float64 (mass_of,
// race). So choices equal those of target_law.py and do not depend on the machine's exp and log.

#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "arithmetic.h"

namespace specinfer {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Error bound of the float32 screen; target_law.py has the proof.
constexpr double kScreen = (1.0 + 1.0 / 1024) * 4294967296.0;
// The caller decides between scores whose relative difference is smaller: a thousand times the difference between
// two machines' exp and log.
constexpr double kTie = 1e-11;

struct Candidate {
  float value;
  int64_t id;
};

inline bool before(const Candidate& a, const Candidate& b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

inline float value_of(float x) { return x; }
inline float value_of(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

// f(i) for the lanes of a mask, counted from `first`.
template <typename F>
void for_each_lane(uint32_t lanes, int64_t first, const F& f) {
  for (; lanes != 0; lanes &= lanes - 1) f(first + __builtin_ctz(lanes));
}

// The first of the largest logits; id -1 if that is not finite, or if a logit is NaN.
template <typename T>
Candidate highest(const T* row, int64_t size) {
  constexpr int kAtOnce = 4;  // vectors: independent dependency chains
  Floats best[kAtOnce];
  Ints wrong = 0;
  each<kAtOnce>([&](auto n) { best[n] = Floats(-kInfinity); });
  int64_t i = 0;
  for (; i + kAtOnce * kLanes <= size; i += kAtOnce * kLanes) {
    each<kAtOnce>([&](auto n) {
      const Floats v = load(row + i + n * kLanes);
      wrong = wrong | (v != v);
      best[n] = max(v, best[n]);
    });
  }
  float top = max(max(max(best[0], best[1]), max(best[2], best[3])));
  bool wrong_number = lanes_of(wrong) != 0;
  for (; i < size; ++i) {
    const float v = value_of(row[i]);
    wrong_number = wrong_number || v != v;
    top = std::max(top, v);
  }
  if (wrong_number || !(std::fabs(top) < kInfinity)) return {top, -1};
  for (i = 0; i + kLanes <= size; i += kLanes) {
    const uint32_t there = lanes_of(load(row + i) == Floats(top));
    if (there != 0) return {top, i + __builtin_ctz(there)};
  }
  while (value_of(row[i]) != top) ++i;
  return {top, i};
}

// A lower bound of the n-th largest logit: the row is divided into n parts, each of which has a maximum of at least
// that. Returns -inf if that would take long.
template <typename T>
float least_of(const T* row, int64_t size, int64_t n) {
  constexpr int kAtOnce = 4;  // vectors; each lane has a separate part
  constexpr int64_t kFewest = 256, kStep = kAtOnce * kLanes;
  const int64_t deep = size / std::max(4 * n, kFewest), parts = deep < 2 ? 0 : size / (kStep * deep) * kStep;
  if (parts < n) return -kInfinity;
  std::vector<float> tops(parts);
  for (int64_t at = 0; at < parts; at += kStep) {
    Floats best[kAtOnce];
    each<kAtOnce>([&](auto k) { best[k] = Floats(-kInfinity); });
    for (int64_t i = at * deep; i < (at + kStep) * deep; i += kStep) {
      each<kAtOnce>([&](auto k) { best[k] = max(load(row + i + k * kLanes), best[k]); });
    }
    each<kAtOnce>([&](auto k) { store(&tops[at + k * kLanes], best[k]); });
  }
  std::nth_element(tops.begin(), tops.begin() + (n - 1), tops.end(), std::greater<float>());
  return tops[n - 1];
}

// The n best so far; a later value must exceed `bound`. Equal values arrive in order of their ids, so a later one
// never replaces an earlier one.
class Best {
 public:
  // least: a lower bound of the n-th largest.
  Best(size_t n, float least) : n_(n), capacity_(4 * n + 256), bound_(std::nextafter(least, -kInfinity)) {
    found_.reserve(capacity_ + kLanes);
  }

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
  float bound_;
  std::vector<Candidate> found_;
};

// The n >= 1 largest logits, descending, ties lowest id first; never -inf. `numbers`: true if no logit is NaN.
template <typename T>
std::vector<Candidate> likeliest_of(const T* row, int64_t size, int64_t n, bool* numbers = nullptr) {
  n = std::min(n, size);
  Best best(n, least_of(row, size, n));
  Ints wrong = 0;
  bool wrong_number = false;
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Floats v = load(row + i);
    wrong = wrong | (v != v);
    const uint32_t above = lanes_of(v > best.bound());
    if (above == 0) continue;
    for_each_lane(above, i, [&](int64_t at) { best.add(value_of(row[at]), at); });
    best.tidy();
  }
  for (; i < size; ++i) {
    const float v = value_of(row[i]);
    wrong_number = wrong_number || v != v;
    if (v > best.bound()) {
      best.add(v, i);
      best.tidy();
    }
  }
  if (numbers != nullptr) *numbers = !wrong_number && lanes_of(wrong) == 0;
  return best.sorted();
}

// As in target_law.py: higher temperatures exceed the range of float32.
constexpr double kHottest = 1e29;

// The sum of exp((logit - top) / temperature), within MASS_ERROR of target_law.py.
template <typename T>
double mass_of(const T* row, int64_t size, double highest, double temperature) {
  if (temperature > kHottest) {
    double sum = 0.0;
    for (int64_t i = 0; i < size; ++i) sum += std::exp((static_cast<double>(value_of(row[i])) - highest) / temperature);
    return sum;
  }
  const auto top = static_cast<float>(highest), scale = static_cast<float>(1.0 / temperature);
  constexpr int kAtOnce = 4, kSteps = 4;  // vectors summed in float32: five roundings, a relative error of 3e-7
  double sums[kLanes] = {}, sum = 0.0;
  int64_t i = 0;
  const auto weight = [&](int64_t at) { return exp((load(row + at) - top) * scale); };
  const auto add = [&](Floats weights) {
    float parts[kLanes];
    store(parts, weights);
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] += parts[lane];
  };
  while (i + kSteps * kAtOnce * kLanes <= size) {
    Floats some[kAtOnce];
    each<kAtOnce>([&](auto k) { some[k] = weight(i + k * kLanes); });
    i += kAtOnce * kLanes;
    for (int step = 1; step < kSteps; ++step, i += kAtOnce * kLanes) {
      each<kAtOnce>([&](auto k) { some[k] = some[k] + weight(i + k * kLanes); });
    }
    add((some[0] + some[1]) + (some[2] + some[3]));
  }
  for (; i + kLanes <= size; i += kLanes) add(weight(i));
  for (; i < size; ++i) sum += std::exp((value_of(row[i]) - top) * scale);
  for (const double part : sums) sum += part;
  return sum;
}

// The noise of verify/noise.py.
struct Noise {
  uint64_t key;
  uint64_t mixed_key;

  explicit Noise(uint64_t k) : key(k), mixed_key(mix(k ^ kGolden)) {}

  // race_key(seed, position).
  static Noise at(uint64_t seed, int64_t position) {
    constexpr uint64_t kRaceStream = 0;
    uint64_t key = 0;
    for (const uint64_t word : {kRaceStream, seed, static_cast<uint64_t>(position)}) key = mix((key ^ word) + kGolden);
    return Noise(key);
  }

  static constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;

  static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
  }

  // Hash of one id, or of one per lane.
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

struct Racer {
  int64_t index;
  double score;
};

// The entries of a support that may win the race argmin(E / w), w = exp((logit - logits[top]) / temperature),
// ascending: one, unless there is a tie. The temperature is at most kHottest. ids: of the entries, or null if entry i
// is token i.
template <typename T>
std::vector<Racer> race(const T* row, int64_t size, const int64_t* ids, int64_t top, double temperature,
                        const Noise& noise) {
  const float highest = value_of(row[top]);
  // The screen uses 2^n (1 + f) for the weight 2^(n + f): never less, at most 6% more, and the bits of a float.
  constexpr float kBias = 127.0f, kMantissa = 8388608.0f;
  const auto scale = static_cast<float>(1.0 / (temperature * 0.6931471805599453));
  std::vector<Racer> found;
  double best = std::numeric_limits<double>::infinity();
  float bound = 0.0f;  // an entry may win while the upper half of its hash is at most w * bound
  const auto run = [&](int64_t i) {
    const double score = noise.log_exponential(static_cast<uint32_t>(ids ? ids[i] : i)) -
                         (static_cast<double>(value_of(row[i])) - static_cast<double>(highest)) / temperature;
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
    const Floats power = max(fma(load(row + i) - highest, Floats(scale), Floats(kBias)), Floats(0.0f));
    const Floats reach = bits_as<float>(to_ints(power * kMantissa)) * bound;
    for_each_lane(lanes_of(to_floats(noise.high(id)) <= reach), i, run_others);
  }
  for (; i < size; ++i) {
    const auto high = static_cast<float>(noise.high(static_cast<uint32_t>(ids ? ids[i] : i)));
    if (high <= std::exp2((value_of(row[i]) - highest) * scale) * bound) run_others(i);
  }
  const double limit = best + kTie * (1.0 + std::fabs(best));
  found.erase(std::remove_if(found.begin(), found.end(), [&](const Racer& r) { return !(r.score <= limit); }),
              found.end());
  std::sort(found.begin(), found.end(), [](const Racer& a, const Racer& b) { return a.index < b.index; });
  return found;
}

}  // namespace specinfer
