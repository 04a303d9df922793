// Vector arithmetic: sums of products, transposes, exponentials.

#pragma once

#include "vector.h"

namespace specinfer {

// a b + c, rounded once, of one register.
[[gnu::always_inline]] inline Floats::Part fma_part(Floats::Part a, Floats::Part b, Floats::Part c) {
#if defined(__AVX512F__)
  return (Floats::Part)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Floats::Part)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return (Floats::Part)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#endif
}

[[gnu::always_inline]] inline Floats fma(Floats a, Floats b, Floats c) { return by_parts<float>(fma_part, a, b, c); }

inline Floats max(Floats a, Floats b) { return select(a > b, a, b); }

// Calls f(0), ..., f(N - 1) with compile-time constants.
template <int N, typename F>
[[gnu::always_inline]] inline void each(F f) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (f(std::integral_constant<int, I>{}), ...);
  }(std::make_integer_sequence<int, N>{});
}

// One register: lanes I... of a, and of b from its lane count on.
template <typename Part, size_t... I>
[[gnu::always_inline]] inline Part shuffle_part(Part a, Part b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, I...);
#else  // GCC has __builtin_shufflevector since version 12 only
  return __builtin_shuffle(a, b, Words::Part{static_cast<uint32_t>(I)...});
#endif
}

// Each lane's partner: the lane whose number differs in that bit.
template <int Bit, typename T>
[[gnu::always_inline]] inline Vector<T> partners(Vector<T> v) {
  Vector<T> out;
  each<kParts>([&](auto i) {
    if constexpr (Bit >= kPartLanes) {
      out.part[i] = v.part[i ^ (Bit / kPartLanes)];
    } else {
      [&]<size_t... Lane>(std::index_sequence<Lane...>) __attribute__((always_inline)) {
        out.part[i] = shuffle_part<typename Vector<T>::Part, (Lane ^ Bit)...>(v.part[i], v.part[i]);
      }(std::make_index_sequence<kPartLanes>{});
    }
  });
  return out;
}

// Exchanges the lanes of a with `Bit` set in their number and those of b with it clear.
template <int Bit>
[[gnu::always_inline]] inline void exchange(Words& a, Words& b) {
  Words first, second;
  each<kParts>([&](auto i) {
    if constexpr (Bit >= kPartLanes) {
      constexpr int bit = Bit / kPartLanes;
      first.part[i] = (i & bit) != 0 ? b.part[i ^ bit] : a.part[i];
      second.part[i] = (i & bit) != 0 ? b.part[i] : a.part[i ^ bit];
    } else {
      [&]<size_t... Lane>(std::index_sequence<Lane...>) __attribute__((always_inline)) {
        first.part[i] = shuffle_part<Words::Part, (Lane & Bit ? kPartLanes + Lane - Bit : Lane)...>(a.part[i], b.part[i]);
        second.part[i] = shuffle_part<Words::Part, (Lane & Bit ? kPartLanes + Lane : Lane + Bit)...>(a.part[i], b.part[i]);
      }(std::make_index_sequence<kPartLanes>{});
    }
  });
  a = first;
  b = second;
}

// Transposes: rows become columns.
[[gnu::always_inline]] inline void transpose(Words (&v)[kLanes]) {
  each<4>([&](auto bit) {
    constexpr int d = 1 << bit;
    each<kLanes / 2>([&](auto n) {
      constexpr int i = n / d * 2 * d + n % d;
      exchange<d>(v[i], v[i + d]);
    });
  });
}

template <typename T>
[[gnu::always_inline]] inline T sum(Vector<T> v) {
  each<4>([&](auto i) { v = v + partners<(8 >> i)>(v); });
  return v[0];
}

[[gnu::always_inline]] inline float max(Floats v) {
  each<4>([&](auto i) { v = max(v, partners<(8 >> i)>(v)); });
  return v[0];
}

// e^x to 2 units in the last place. Clamps at the range of normal numbers; keeps NaN.
inline Floats exp(Floats x) {
  x = select(x > 88.0f, Floats(88.0f), x);
  x = select(x < -87.0f, Floats(-87.0f), x);
  const Floats magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Floats shifted = fma(x, Floats(1.44269504f), magic);
  const Floats n = shifted - magic;
  Floats r = fma(n, Floats(-0.693359375f), x);
  r = fma(n, Floats(2.12194440e-4f), r);
  Floats p = 1.9875691500e-4f;
  p = fma(p, r, Floats(1.3981999507e-3f));
  p = fma(p, r, Floats(8.3334519073e-3f));
  p = fma(p, r, Floats(4.1665795894e-2f));
  p = fma(p, r, Floats(1.6666665459e-1f));
  p = fma(p, r, Floats(5.0000001201e-1f));
  p = fma(p * r, r, r + 1.0f);
  return bits_as<float>(bits_as<uint32_t>(p) + (bits_as<uint32_t>(shifted) << 23));
}

}  // namespace specinfer
