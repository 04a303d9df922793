// Float types, random numbers, and comparisons of results.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "library.h"

namespace proof {

inline int faults = 0;

inline void check(bool holds, const std::string& what) {
  if (holds) return;
  ++faults;
  std::printf("%s\n", what.c_str());
}

inline float widen(float x) { return x; }
inline float widen(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

template <typename T>
T narrow(float x) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return x;
  } else {
    const auto bits = std::bit_cast<uint32_t>(x);
    return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
  }
}

inline float widen_half(uint16_t normal) { return std::ldexp(1.0f + (normal & 1023) / 1024.0f, (normal >> 10) - 15); }

template <typename T>
constexpr int32_t kType = static_cast<int32_t>(sizeof(T) == 4 ? Type::kFloat32 : Type::kBFloat16);
template <typename T>
const char* const kName = sizeof(T) == 4 ? "float32" : "bfloat16";
template <typename T>
constexpr double kNear = sizeof(T) == 4 ? 1e-5 : 1e-2;

class Chance {
 public:
  double uniform(double from, double to) { return from + (to - from) * (next_() / 4294967296.0); }
  int integer(int from, int to) { return from + static_cast<int>(next_() % (to - from)); }
  float normal() {
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform(0, 1);
    return static_cast<float>(sum);
  }
  template <typename T>
  std::vector<T> normals(int64_t n, float size = 1) {
    std::vector<T> all(n);
    for (T& x : all) x = narrow<T>(normal() * size);
    return all;
  }

 private:
  std::mt19937 next_{0};
};

template <typename T>
bool same(const T* a, const T* b, int64_t n) {
  return std::memcmp(a, b, n * sizeof(T)) == 0;
}

template <typename T>
bool near(const std::vector<T>& got, const std::vector<double>& want, double tolerance = kNear<T>) {
  double size = 0, off = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    size = std::max(size, std::fabs(want[i]));
    const double error = std::fabs(widen(got[i]) - want[i]);
    if (!(error <= off)) off = error;
  }
  return off <= tolerance * size;
}

}  // namespace proof
