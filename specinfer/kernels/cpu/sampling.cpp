// Reads of a whole row of logits, for sampling and verification; the twins are in verify/scan.py.
//
// Each op answers exactly (most_likely), or so that whoever asks can still decide in float64 (mass, racers):
// choices are then the twins' to the last token, whatever exp and log a machine has.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// How the screen's float32 may err; scan.py has the argument for it.
constexpr double kScreen = (1.0 + 1.0 / 1024) * 4294967296.0;
// Scores closer than this, relative to their size, are left to the caller: a thousand times what two
// machines' exp and log differ by.
constexpr double kTie = 1e-11;

struct Candidate {
  float value;
  int32_t id;
};

bool before(const Candidate& a, const Candidate& b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

at::Tensor as_ids(const std::vector<Candidate>& found) {
  at::Tensor ids = at::empty({static_cast<int64_t>(found.size())}, at::kLong);
  std::transform(found.begin(), found.end(), ids.mutable_data_ptr<int64_t>(),
                 [](const Candidate& c) { return static_cast<int64_t>(c.id); });
  return ids;
}

void check_row(const at::Tensor& logits) {
  TORCH_CHECK(logits.scalar_type() == at::kFloat && logits.dim() == 1 && logits.is_contiguous(),
              "a row of float32 logits is wanted, got ", logits.sizes(), " of ", logits.scalar_type());
}

// The n best so far; `bound` is what a later value must exceed to be among them. Equal values come in the
// order of their ids, so a later one never replaces an earlier one.
class Best {
 public:
  explicit Best(size_t n) : n_(n), capacity_(4 * n + 256) { found_.reserve(capacity_ + kLanes); }

  float bound() const { return bound_; }

  void add(float value, int32_t id) { found_.push_back({value, id}); }

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

at::Tensor most_likely(const at::Tensor& logits, int64_t n) {
  check_row(logits);
  const float* row = logits.const_data_ptr<float>();
  const int64_t size = logits.numel();
  TORCH_CHECK(n >= 1, "at least one token is wanted, got ", n);
  Best best(std::min(n, size));
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + kLanes <= size; i += kLanes) {
    const __m512 values = _mm512_loadu_ps(row + i);
    unsigned above = _mm512_cmp_ps_mask(values, _mm512_set1_ps(best.bound()), _CMP_GT_OQ);
    if (above == 0) continue;
    for (; above != 0; above &= above - 1) {
      const int lane = __builtin_ctz(above);
      best.add(row[i + lane], static_cast<int32_t>(i + lane));
    }
    best.tidy();
  }
#endif
  for (; i < size; ++i) {
    if (row[i] > best.bound()) {
      best.add(row[i], static_cast<int32_t>(i));
      best.tidy();
    }
  }
  return as_ids(best.sorted());
}

#if defined(__AVX512F__)
// exp of 16 values <= 0 to 2e-7: 2^k times a polynomial of degree 6 on |r| <= ln 2 / 2; 0 below -87.
__m512 exp16(__m512 x) {
  const __mmask16 some = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_GT_OQ);
  const __m512 k = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(k, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(k, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.3888889e-3f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3333333e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1666667e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666667e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(some, p, k);
}
#endif

double mass(const at::Tensor& logits, double highest, double inverse_temperature) {
  check_row(logits);
  const float* row = logits.const_data_ptr<float>();
  const int64_t size = logits.numel();
  const float top = static_cast<float>(highest), scale = static_cast<float>(inverse_temperature);
  double sum = 0.0;
  int64_t i = 0;
#if defined(__AVX512F__)
  __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
  for (; i + kLanes <= size; i += kLanes) {
    const __m512 x = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(row + i), _mm512_set1_ps(top)),
                                   _mm512_set1_ps(scale));
    const __m512 weights = exp16(x);
    low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(weights)));
    const __m256d upper = _mm512_extractf64x4_pd(_mm512_castps_pd(weights), 1);
    high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm256_castpd_ps(upper)));
  }
  sum = _mm512_reduce_add_pd(_mm512_add_pd(low, high));
#endif
  for (; i < size; ++i) sum += std::exp((row[i] - top) * scale);
  return sum;
}

// The noise of verify/noise.py, one id at a time.
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

  uint32_t high(uint32_t id) const {
    uint32_t h = id;
    h = (h ^ (h >> 16)) * 0x7FEB352Du;
    h = (h ^ (h >> 15)) * 0x846CA68Bu;
    h = (h ^ (h >> 16)) ^ static_cast<uint32_t>(key);
    h *= 0x7FEB352Du;
    h = ((h ^ (h >> 15)) + static_cast<uint32_t>(key >> 32)) * 0x846CA68Bu;
    return h ^ (h >> 16);
  }

#if defined(__AVX512F__)
  __m512i high16(__m512i h) const {
    const __m512i first = _mm512_set1_epi32(0x7FEB352D);
    const __m512i second = _mm512_set1_epi32(static_cast<int>(0x846CA68Bu));
    h = _mm512_mullo_epi32(_mm512_xor_si512(h, _mm512_srli_epi32(h, 16)), first);
    h = _mm512_mullo_epi32(_mm512_xor_si512(h, _mm512_srli_epi32(h, 15)), second);
    h = _mm512_xor_si512(h, _mm512_srli_epi32(h, 16));
    h = _mm512_xor_si512(h, _mm512_set1_epi32(static_cast<int>(key)));
    h = _mm512_mullo_epi32(h, first);
    h = _mm512_xor_si512(h, _mm512_srli_epi32(h, 15));
    h = _mm512_add_epi32(h, _mm512_set1_epi32(static_cast<int>(key >> 32)));
    h = _mm512_mullo_epi32(h, second);
    return _mm512_xor_si512(h, _mm512_srli_epi32(h, 16));
  }
#endif

  double log_exponential(uint32_t id) const {
    const uint64_t low = mix(id * kGolden + mixed_key) >> 32;
    const uint64_t h = (static_cast<uint64_t>(high(id)) << 32) | low;
    const double v = (static_cast<double>(h) + 0.5) * 0x1p-64;
    const double rest = (static_cast<double>(~h) + 0.5) * 0x1p-64;
    return std::log(v < 0.5 ? -std::log1p(-v) : -std::log(rest));
  }
};

// The entries of a support that may win the race argmin(E / w), w = exp((logit - highest) / temperature).
at::Tensor racers(const at::Tensor& logits, const std::optional<at::Tensor>& ids, int64_t top,
                  double temperature, double inverse_temperature, int64_t key) {
  check_row(logits);
  const float* row = logits.const_data_ptr<float>();
  const int64_t size = logits.numel();
  const int64_t* names = nullptr;
  if (ids.has_value()) {
    TORCH_CHECK(ids->scalar_type() == at::kLong && ids->numel() == size && ids->is_contiguous(),
                "an int64 id for each of ", size, " logits is wanted, got ", ids->sizes());
    names = ids->const_data_ptr<int64_t>();
  }
  TORCH_CHECK(0 <= top && top < size, "the largest logit is entry ", top, " of ", size);
  const Noise noise(static_cast<uint64_t>(key));
  const float highest = row[top], scale = static_cast<float>(inverse_temperature);
  struct Racer {
    int64_t index;
    double score;
  };
  std::vector<Racer> found;
  double best = std::numeric_limits<double>::infinity();
  float bound = 0.0f;  // an entry may win while the upper half of its hash is at most w * bound
  const auto run = [&](int64_t i) {
    const double score = noise.log_exponential(static_cast<uint32_t>(names ? names[i] : i)) -
                         (static_cast<double>(row[i]) - static_cast<double>(highest)) / temperature;
    if (!(score <= best + kTie * (1.0 + std::fabs(best)))) return;
    found.push_back({i, score});
    if (score < best) {
      best = score;
      bound = static_cast<float>(std::exp(best) * kScreen);
    }
  };
  run(top);
  int64_t i = 0;
#if defined(__AVX512F__)
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (; i + kLanes <= size; i += kLanes) {
    __m512i id = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(i)));
    if (names != nullptr) {
      id = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi64_epi32(_mm512_loadu_si512(names + i))),
                              _mm512_cvtepi64_epi32(_mm512_loadu_si512(names + i + 8)), 1);
    }
    const __m512 high = _mm512_cvtepu32_ps(noise.high16(id));
    const __m512 x = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(row + i), _mm512_set1_ps(highest)),
                                   _mm512_set1_ps(scale));
    const __m512 reach = _mm512_mul_ps(exp16(x), _mm512_set1_ps(bound));
    unsigned may_win = _mm512_cmp_ps_mask(high, reach, _CMP_LE_OQ);
    for (; may_win != 0; may_win &= may_win - 1) {
      const int64_t index = i + __builtin_ctz(may_win);
      if (index != top) run(index);
    }
  }
#endif
  for (; i < size; ++i) {
    const float high = static_cast<float>(noise.high(static_cast<uint32_t>(names ? names[i] : i)));
    if (i != top && high <= std::exp((row[i] - highest) * scale) * bound) run(i);
  }
  const double limit = best + kTie * (1.0 + std::fabs(best));
  found.erase(std::remove_if(found.begin(), found.end(), [&](const Racer& r) { return !(r.score <= limit); }),
              found.end());
  std::sort(found.begin(), found.end(), [](const Racer& a, const Racer& b) { return a.index < b.index; });
  at::Tensor indices = at::empty({static_cast<int64_t>(found.size())}, at::kLong);
  std::transform(found.begin(), found.end(), indices.mutable_data_ptr<int64_t>(),
                 [](const Racer& r) { return r.index; });
  return indices;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(specinfer, m) {
  m.def("most_likely(Tensor logits, int n) -> Tensor");
  m.def("mass(Tensor logits, float highest, float inverse_temperature) -> float");
  m.def(
      "racers(Tensor logits, Tensor? ids, int top, float temperature, float inverse_temperature, int key) "
      "-> Tensor");
  m.impl("most_likely", c10::DispatchKey::CPU, TORCH_FN(most_likely));
  m.impl("mass", c10::DispatchKey::CPU, TORCH_FN(mass));
  m.impl("racers", c10::DispatchKey::CPU, TORCH_FN(racers));
}
