// Converts scores to weights: caps, biases, and e^x.

#pragma once

#include <cstring>

#include "attention_blocks.h"

namespace specinfer {

template <typename T>
constexpr float kLog = kPerWord<T> == 1 ? 1.0f : 1.44269504f;  // log of e to the base of the weights

// e^x, or 2^x for a bfloat16 weight: 2^f on [-1/2, 1/2] has 14 correct bits, of which 8 are used. x <= 0 or NaN.
template <typename T>
[[gnu::always_inline]] inline Floats power(Floats x) {
  if constexpr (kPerWord<T> == 1) return exp(x);
#if defined(__AVX512F__)
  const __m512 n = _mm512_roundscale_ps((__m512)x.part[0], 0);
  const Floats f = x - std::bit_cast<Floats>(n);
#else
  x = select(x < -126.0f, Floats(-126.0f), x);
  const Floats shifted = x + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Floats f = x - (shifted - 12582912.0f);
#endif
  Floats p = fma(Floats(9.6181291e-3f), f, Floats(5.5504109e-2f));
  p = fma(p, f, Floats(2.4022651e-1f));
  p = fma(p, f, Floats(6.9314718e-1f));
  p = fma(p, f, Floats(1.0f));
#if defined(__AVX512F__)
  return std::bit_cast<Floats>(_mm512_scalef_ps((__m512)p.part[0], n));
#else
  return bits_as<float>(bits_as<uint32_t>(p) + (bits_as<uint32_t>(shifted) << 23));
#endif
}

inline void store_weights(float* to, Floats weights) { store(to, weights); }

// Subnormal weights may become zero, as in products.
inline void store_weights(BFloat16* to, Floats weights) {
#if defined(__AVX512BF16__)
  const __m256bh halves = _mm512_cvtneps_pbh((__m512)weights.part[0]);
  std::memcpy(to, &halves, sizeof halves);
#else
  store(to, weights);
#endif
}

// tanh(x) as 1 - 2 / (e^2x + 1), with relative error 2e-7.
inline Floats tanh(Floats x) { return Floats(1.0f) - Floats(2.0f) / (exp(x + x) + 1.0f); }

// Round to bfloat16, ties to even; for finite numbers.
inline Floats to_bfloat16(Floats v) {
  const Words bits = bits_as<uint32_t>(v);
  return bits_as<float>(((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) << 16);
}

// The exponent of the weights: scores of keys first..first + 15 of a path of `length` keys, scaled, capped, with
// ALiBi's biases of one head, times kLog.
template <typename T>
Floats changed(const Heads& heads, Floats scores, float slope, int64_t first, int64_t length) {
  scores = scores * heads.scale;
  if (heads.softcap > 0.0f) scores = tanh(scores / heads.softcap) * heads.softcap;
  if (heads.slopes == nullptr) return scores * kLog<T>;
  if (heads.rounded != 0) {
    const Floats at = to_bfloat16(to_floats(lane_numbers() + static_cast<int32_t>(first)));
    return (scores + to_bfloat16(at * slope) * heads.scale) * kLog<T>;
  }
  return (scores + to_floats(lane_numbers() + static_cast<int32_t>(first - length + 1)) * slope) * kLog<T>;
}

}  // namespace specinfer
