// The target's own choice in many rows at once.
//
// verify/target_law.py and verify/coupled.py, the twins, define a row's choice. This code returns that choice if
// rounding cannot change it, and otherwise kUndecided, which is rare:
//
//   top_k       compares floats: exact
//   weights     exp of the same float64 number: two machines' exp differ by a relative 1e-16
//   sums        of at most 2^20 weights, in any order: they differ by less than a relative 3e-10
//   min_p       is certain if no weight is within kFar of it
//   top_p       takes a fraction of the mass, which in float32 is known within MASS_ERROR = 2^-17, as in the twin. A
//               cut that is the same at both ends of two such errors is the true one. The twin's is too, since it
//               compares both ends of its error, or sums in float64. If the ends differ, the mass is summed in
//               float64 here, and the cut is certain if no sum of weights is within kFar of the required fraction.
//   the race    is certain if one racer is left (kTie)

#include "logit_row.h"
#include "sampling.h"

namespace specinfer {
namespace {

constexpr double kGreedyBelow = 1e-5;     // as in sampling_params.py
constexpr double kFar = 1e-9;             // relative difference that rounding cannot bridge
constexpr double kFarFromMass = 0x1p-16;  // twice MASS_ERROR
constexpr double kSmallest = 1e-290;      // min_p below it: the weights have few digits
constexpr int64_t kMostSummed = 1 << 20;  // weights
constexpr int64_t kFirstPool = 64;        // likely ids of the first try; each further try has four times as many

int64_t winner(const std::vector<Racer>& racers, const int64_t* ids) {
  if (racers.size() != 1) return kUndecided;
  return ids == nullptr ? racers[0].index : ids[racers[0].index];
}

// The ids that a row's filters keep.
template <typename T>
class Filters {
 public:
  Filters(const T* row, int64_t size, const RowSampling& sampling) : row_(row), size_(size), sampling_(sampling) {}

  int64_t choose() {
    const bool few = 0 < sampling_.top_k && sampling_.top_k < size_;
    for (int64_t pool = few ? sampling_.top_k : std::min(kFirstPool, size_);; pool = std::min(4 * pool, size_)) {
      bool numbers = true;
      best_ = likeliest_of(row_, size_, pool, &numbers);
      if (!numbers || best_.empty() || best_[0].value == kInfinity) return kNone;
      if (sampling_.temperature > kHottest || size_ > kMostSummed) return kUndecided;
      const bool all = few || pool == size_ || static_cast<int64_t>(best_.size()) < pool;
      weigh();
      const int64_t kept = cut(few, all);
      if (kept == kMore && !all) continue;
      return kept > 0 ? among(kept) : kUndecided;
    }
  }

 private:
  static constexpr int64_t kUnsure = -1, kMore = -2;

  double weight(float logit) const {
    return std::exp((static_cast<double>(logit) - static_cast<double>(best_[0].value)) / sampling_.temperature);
  }

  void weigh() {
    weights_.resize(best_.size());
    sums_.resize(best_.size());
    double sum = 0.0;
    for (size_t i = 0; i < best_.size(); ++i) sums_[i] = sum += weights_[i] = weight(best_[i].value);
  }

  // The number of ids kept; kUnsure, or kMore if it depends on ids that were not read.
  int64_t cut(bool few, bool all) {
    auto kept = static_cast<int64_t>(best_.size());
    if (sampling_.top_p < 1) {
      kept = few ? prefix(sampling_.top_p * sums_.back(), kFar) : prefix(sampling_.top_p * rough_mass(), kFarFromMass);
      if (!few && (kept == kUnsure || (kept == kMore && all))) kept = prefix(sampling_.top_p * exact_mass(), kFar);
      if (kept < 0) return kept;
    }
    return sampling_.min_p > 0 ? likely(kept, all || sampling_.top_p < 1) : kept;
  }

  // The shortest prefix whose sum reaches `wanted`, within a relative error of `far`.
  int64_t prefix(double wanted, double far) const {
    const auto reached = [&](double sum) { return std::lower_bound(sums_.begin(), sums_.end(), sum) - sums_.begin(); };
    const int64_t least = reached(wanted * (1 - far)), most = reached(wanted * (1 + far));
    if (most == static_cast<int64_t>(sums_.size())) return kMore;
    return least == most ? least + 1 : kUnsure;
  }

  // Those of the first `kept` with at least min_p times the largest probability; `all`: no other id may have it.
  int64_t likely(int64_t kept, bool all) const {
    if (sampling_.min_p < kSmallest) return kUnsure;
    for (int64_t i = 0; i < kept; ++i) {
      if (best_[i].value == best_[0].value) continue;  // their weights are exactly 1
      if (weights_[i] < sampling_.min_p * (1 - kFar)) return i;
      if (weights_[i] <= sampling_.min_p * (1 + kFar)) return kUnsure;
    }
    return all ? kept : kMore;
  }

  double rough_mass() {
    if (rough_mass_ < 0) rough_mass_ = mass_of(row_, size_, best_[0].value, sampling_.temperature);
    return rough_mass_;
  }

  double exact_mass() {
    if (exact_mass_ < 0) {
      exact_mass_ = 0;
      for (int64_t i = 0; i < size_; ++i) exact_mass_ += weight(value_of(row_[i]));
    }
    return exact_mass_;
  }

  int64_t among(int64_t kept) const {
    if (kept == 1) return best_[0].id;
    std::vector<float> logits(kept);
    std::vector<int64_t> ids(kept);
    for (int64_t i = 0; i < kept; ++i) {
      logits[i] = best_[i].value;
      ids[i] = best_[i].id;
    }
    const auto noise = Noise::at(sampling_.seed, sampling_.position);
    return winner(race(logits.data(), kept, ids.data(), 0, sampling_.temperature, noise), ids.data());
  }

  const T* const row_;
  const int64_t size_;
  const RowSampling& sampling_;
  std::vector<Candidate> best_;         // likeliest first
  std::vector<double> weights_, sums_;  // of the best; cumulative sums
  double rough_mass_ = -1, exact_mass_ = -1;
};

template <typename T>
int64_t choose(const T* row, int64_t size, const RowSampling& sampling) {
  const bool greedy = sampling.temperature < kGreedyBelow;
  const bool filtered = (0 < sampling.top_k && sampling.top_k < size) || sampling.top_p < 1 || sampling.min_p > 0;
  if (!greedy && filtered) return Filters<T>(row, size, sampling).choose();
  const Candidate top = highest(row, size);
  if (greedy || top.id < 0) return top.id;
  if (sampling.temperature > kHottest) return kUndecided;
  const auto noise = Noise::at(sampling.seed, sampling.position);
  return winner(race(row, size, nullptr, top.id, sampling.temperature, noise), nullptr);
}

int64_t begin_of(const LogitChanges& changes, int64_t n) { return n == 0 ? 0 : changes.ends[n - 1]; }

// True if `count` rows of `size` logits have the logits to change.
bool there(const LogitChanges& changes, int64_t count, int64_t size) {
  for (int64_t n = 0; n < count; ++n) {
    if (begin_of(changes, n) > changes.ends[n]) return false;
  }
  const int64_t all = count == 0 ? 0 : changes.ends[count - 1];
  return std::all_of(changes.ids, changes.ids + all, [&](int64_t id) { return 0 <= id && id < size; });
}

float changed(float logit, const Terms& terms) {
  float v = terms.bias == -kInfinity ? -kInfinity : logit + terms.bias;
  v = v > 0 ? v / terms.repetition : v * terms.repetition;
  v -= terms.frequency;
  return v - terms.presence;
}

// The n-th row with its changes: a thread-local copy, valid until the next call.
template <typename T>
const float* changed_row(const T* row, int64_t size, const LogitChanges& changes, int64_t n) {
  thread_local std::vector<float> copy;
  if (static_cast<int64_t>(copy.size()) < size) copy.resize(size);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(copy.data() + i, load(row + i));
  for (; i < size; ++i) copy[i] = value_of(row[i]);
  for (int64_t at = begin_of(changes, n); at < changes.ends[n]; ++at) {
    float& logit = copy[changes.ids[at]];
    logit = changed(logit, changes.terms[at]);
  }
  return copy.data();
}

}  // namespace

int64_t choices(const LogitBlock& block, const ChosenRows& rows, const RowSampling* sampling,
                const LogitChanges& changes, int64_t* ids) {
  const bool any = changes.ends != nullptr;
  if (any && !there(changes, rows.count, block.size)) return -1;
  const bool done = for_rows(block, rows, [&](const auto* row, int64_t n) {
    const bool as_it_lies = !any || begin_of(changes, n) == changes.ends[n];
    ids[n] = as_it_lies ? choose(row, block.size, sampling[n])
                        : choose(changed_row(row, block.size, changes, n), block.size, sampling[n]);
  });
  return done ? std::count(ids, ids + rows.count, kUndecided) : -1;
}

}  // namespace specinfer
