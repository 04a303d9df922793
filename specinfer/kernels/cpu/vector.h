// Sixteen floats at a time, in the compiler's own vectors: AVX-512 registers where there are any.
//
// Every function is a fixed sequence of operations, so a row's result never depends on where it lies in
// memory or on the rows beside it.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <c10/util/BFloat16.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace specinfer {

using c10::BFloat16;

constexpr int kLanes = 16;
using Floats = float __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
using Halves = uint16_t __attribute__((vector_size(32)));

inline Floats broadcast(float x) { return Floats{} + x; }

inline Floats load(const float* from) {
  Floats v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline Floats load(const BFloat16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  return std::bit_cast<Floats>(__builtin_convertvector(halves, Words) << 16);
}

inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }

// To the nearest, ties to even; a NaN stays one.
inline void store(BFloat16* to, Floats v) {
  const Words bits = std::bit_cast<Words>(v);
  const Words rounded = v == v ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : Words{} + 0x7fc0;
  const Halves halves = __builtin_convertvector(rounded, Halves);
  std::memcpy(to, &halves, sizeof halves);
}

// Lanes of a, and from kLanes on of b.
template <size_t... I, typename V>
inline V shuffle(V a, V b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, I...);
#else  // GCC has that one, too, but only since its version 12
  return __builtin_shuffle(a, b, Words{static_cast<uint32_t>(I)...});
#endif
}

// The first n lanes; zeros in the others.
template <typename T>
inline Floats load(const T* from, int64_t n) {
  if (n >= kLanes) return load(from);
  T lanes[kLanes] = {};
  std::memcpy(lanes, from, n * sizeof(T));
  return load(lanes);
}

template <typename T>
inline void store(T* to, Floats v, int64_t n) {
  if (n >= kLanes) return store(to, v);
  T lanes[kLanes];
  store(lanes, v);
  std::memcpy(to, lanes, n * sizeof(T));
}

inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

inline float sum(Floats v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

inline float max(Floats v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  }
  return lanes[0];
}

// e^x to 2 units in the last place; what would leave the normal numbers is held at their ends, a NaN stays one.
inline Floats exp(Floats x) {
  x = x > 88.0f ? broadcast(88.0f) : x;
  x = x < -87.0f ? broadcast(-87.0f) : x;
  const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats shifted = fma(x, broadcast(1.44269504f), magic);
  const Floats n = shifted - magic;
  Floats r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Floats p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p * r, r, r + 1.0f);
  return std::bit_cast<Floats>(std::bit_cast<Words>(p) + (std::bit_cast<Words>(shifted) << 23));
}

}  // namespace specinfer
