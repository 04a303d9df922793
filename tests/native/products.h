// Products with float32, bfloat16, int8 and int4 weights.

#pragma once

#include <string>
#include <vector>

#include "numbers.h"

namespace proof {

constexpr int64_t kShapes[][2] = {{33, 96}, {80, 800}, {17, 70}};  // channels, inner
constexpr int64_t kRowCounts[] = {1, 2, 5, 16, 17, 33, 64};
constexpr int64_t kMostRows = 64;
constexpr float kLargest = 0.125f;  // scale of int4
const char* const kKinds[] = {"float32", "bfloat16", "int8", "int4"};

inline float inverse_of_largest(float most) { return most < 1e-30f ? 0.0f : 127.0f / most; }

// A random matrix, and rows of type T to multiply with it.
template <typename T>
struct Trial {
  Kind kind;
  bool exact;                                       // true if results are known to the last bit
  int64_t channels, inner, padded, groups, blocks;  // padded to groups
  std::vector<float> weight;                        // [channels, padded] of float32, bfloat16 and int8
  std::vector<uint8_t> levels;                      // [channels, padded] of int4
  std::vector<uint8_t> data, zeros;
  std::vector<float> scales, bias;
  std::vector<uint16_t> halves;
  Product product;

  Trial(const Library& library, Kind kind, int64_t channels, int64_t inner, Chance& chance)
      : kind(kind),
        exact(kind == Kind::kInt8 || (kind == Kind::kInt4 && library.int4_is_exact() != 0)),
        channels(channels),
        inner(inner),
        padded(kind == Kind::kFloat32 || kind == Kind::kBFloat16 ? inner : round_up(inner, kGroup)),
        groups(padded / kGroup),
        blocks(blocks_of(channels)),
        bias(chance.normals<float>(channels)) {
    if (kind == Kind::kInt4) {
      make_int4(chance);
    } else {
      data.resize(blocks * kBlock * padded_inner(kind, padded) * 4);
      make_others(chance);
    }
    const void* const scale = kind == Kind::kInt4 ? static_cast<const void*>(halves.data()) : scales.data();
    product = {kind, data.data(), scale, zeros.data(), bias.data(), channels, inner, kLargest};
  }

  void make_others(Chance& chance) {
    const auto lay_out = [&](const auto& from) {
      using Element = typename std::decay_t<decltype(from)>::value_type;
      constexpr int64_t word = 4 / sizeof(Element);  // elements of a row side by side
      const int64_t columns = padded_inner(kind, padded);
      auto* const to = reinterpret_cast<Element*>(data.data());
      for (int64_t r = 0; r < channels; ++r) {
        for (int64_t i = 0; i < padded; ++i) {
          const int64_t first = ((r / kBlock) * columns + i / word * word) * kBlock;  // of these words of 16 rows
          to[first + r % kBlock * word + i % word] = from[r * padded + i];
        }
      }
      if (kind == Kind::kInt8) {
        for (uint8_t& value : data) value ^= 0x80;
      }
    };
    for (int64_t i = 0; i < channels * padded; ++i) {
      const float x = kind == Kind::kInt8 ? static_cast<float>(chance.integer(-127, 128)) : chance.normal();
      weight.push_back(kind == Kind::kBFloat16 ? widen(narrow<BFloat16>(x)) : x);
    }
    if (kind == Kind::kFloat32) return lay_out(weight);
    if (kind == Kind::kInt8) {
      for (int64_t i = 0; i < blocks * kBlock; ++i) scales.push_back(static_cast<float>(chance.uniform(0.01, 0.1)));
      return lay_out(std::vector<int8_t>(weight.begin(), weight.end()));
    }
    std::vector<BFloat16> narrowed;
    for (const float x : weight) narrowed.push_back(narrow<BFloat16>(x));
    lay_out(narrowed);
  }

  void make_int4(Chance& chance) {
    for (int64_t i = 0; i < blocks * kBlock * padded; ++i) levels.push_back(chance.integer(0, 16));
    for (int64_t i = 0; i < blocks * groups * kBlock; ++i) {
      halves.push_back(static_cast<uint16_t>(chance.integer(8, 12) << 10 | chance.integer(0, 1024)));
      zeros.push_back(static_cast<uint8_t>(chance.integer(0, 256)));
    }
    for (int64_t block = 0; block < blocks; ++block) {
      for (int64_t eight = 0; eight < padded / 8; ++eight) {
        for (int64_t channel = 0; channel < kBlock; ++channel) {
          const uint8_t* const from = &levels[(block * kBlock + channel) * padded + eight * 8];
          for (int i = 0; i < 4; ++i) data.push_back(static_cast<uint8_t>(from[i] | from[i + 4] << 4));
        }
      }
    }
  }

  std::vector<T> multiply(const Library& library, const T* x, int64_t rows) const {
    std::vector<T> out(rows * channels);
    library.multiply(&product, kType<T>, x, rows, out.data());
    return out;
  }

  std::vector<double> row(const T* x) const {
    std::vector<float> floats(padded);
    for (int64_t i = 0; i < inner; ++i) floats[i] = widen(x[i]);
    if (kind == Kind::kInt8) return int8_row(floats);
    if (kind == Kind::kInt4 && exact) return int4_row(floats);
    std::vector<double> out(bias.begin(), bias.end());
    for (int64_t c = 0; c < channels; ++c) {
      for (int64_t i = 0; i < inner; ++i) {
        out[c] += kind == Kind::kInt4 ? static_cast<double>(widen(narrow<BFloat16>(floats[i]))) * int4_weight(c, i)
                                      : static_cast<double>(floats[i]) * weight[c * padded + i];
      }
    }
    return out;
  }

  double int4_weight(int64_t channel, int64_t i) const {
    const int64_t at = group_of(channel, i / kGroup);
    return widen_half(halves[at]) * (levels[channel * padded + i] - zeros[at] / 16.0);
  }

  // Index of the scale and the zero of a group.
  int64_t group_of(int64_t channel, int64_t group) const {
    return (channel / kBlock * groups + group) * kBlock + channel % kBlock;
  }

  std::vector<double> int8_row(std::vector<float> x) const {
    for (int64_t g = 0; g < groups; ++g) {
      for (int width = 16; width > 0; width /= 2) {
        for (int i = 0; i < kGroup; ++i) {
          if ((i & width) != 0) continue;
          float &a = x[g * kGroup + i], &b = x[g * kGroup + i + width];
          const float sum = a + b, difference = a - b;
          a = sum;
          b = difference;
        }
      }
    }
    float most = 0;
    for (const float v : x) most = std::max(most, std::fabs(v));
    const float inverse = inverse_of_largest(most), scale = most / 127.0f;
    std::vector<double> out;
    for (int64_t c = 0; c < channels; ++c) {
      int64_t sum = 0;
      for (int64_t i = 0; i < padded; ++i) {
        sum += static_cast<int64_t>(std::nearbyint(x[i] * inverse)) * static_cast<int64_t>(weight[c * padded + i]);
      }
      const float scaled = static_cast<float>(sum) * scales[c] * scale;
      out.push_back(scaled + bias[c]);
    }
    return out;
  }

  std::vector<double> int4_row(const std::vector<float>& x) const {
    std::vector<float> total(channels);
    for (int64_t g = 0; g < groups; ++g) {
      const float* const group = &x[g * kGroup];
      float most = 0;
      for (int i = 0; i < kGroup; ++i) most = std::max(most, std::fabs(group[i]));
      const float inverse = inverse_of_largest(most), scale = most / (127.0f * 16.0f);
      for (int64_t c = 0; c < channels; ++c) {
        const int64_t at = group_of(c, g);
        int64_t sum = 0;
        for (int i = 0; i < kGroup; ++i) {
          sum += static_cast<int64_t>(std::nearbyint(group[i] * inverse)) *
                 (16 * levels[c * padded + g * kGroup + i] - zeros[at]);
        }
        const float both = widen_half(halves[at]) * scale, product = static_cast<float>(sum) * both;
        total[c] = total[c] + product;
      }
    }
    std::vector<double> out;
    for (int64_t c = 0; c < channels; ++c) out.push_back(total[c] + bias[c]);
    return out;
  }
};

template <typename T>
void prove_product(const Library& library, Kind kind, int64_t channels, int64_t inner, Chance& chance) {
  const Trial<T> trial(library, kind, channels, inner, chance);
  const std::string name = std::string(kKinds[static_cast<int>(kind)]) + " " + std::to_string(channels) + " x " +
                           std::to_string(inner) + " of " + kName<T> + " rows: ";
  const auto x = chance.normals<T>(kMostRows * inner, 3);
  const auto whole = trial.multiply(library, x.data(), kMostRows);
  for (const int64_t rows : kRowCounts) {
    for (const int64_t first : {int64_t{0}, kMostRows - rows}) {
      const auto some = trial.multiply(library, x.data() + first * inner, rows);
      check(same(some.data(), whole.data() + first * channels, rows * channels),
            name + std::to_string(rows) + " rows are not what they are among all");
    }
  }
  std::vector<double> want;
  for (int64_t r = 0; r < kMostRows; ++r) {
    const auto row = trial.row(x.data() + r * inner);
    want.insert(want.end(), row.begin(), row.end());
  }
  if (trial.exact) {
    int64_t differing = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      const T exact = narrow<T>(static_cast<float>(want[i]));
      differing += same(&exact, &whole[i], 1) ? 0 : 1;
    }
    check(differing == 0, name + std::to_string(differing) + " results differ");
  } else {
    const double tolerance = kind == Kind::kInt4 ? kNear<BFloat16> : kNear<T>;  // int4 weights become bfloat16
    check(near(whole, want, tolerance), name + "results are off");
  }
}

}  // namespace proof
