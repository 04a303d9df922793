// Products of the bytes of weights and rows, in vector registers.

#pragma once

#include "quantized_rows.h"

namespace specinfer {

// ---- pairs of numbers of 16 bits ----

inline int32_t pair_of(int32_t low, int32_t high) {
  return static_cast<int32_t>((static_cast<uint32_t>(low) & 0xffff) | static_cast<uint32_t>(high) << 16);
}
[[gnu::always_inline]] inline Ints in_pairs(Ints low, Ints high) {
  return bits_as<int32_t>((bits_as<uint32_t>(low) & 0xffff) | bits_as<uint32_t>(high) << 16);
}

// sums[c] += the two numbers of pairs[c] times those of `values`.
[[gnu::always_inline]] inline Ints add_pairs(Ints sums, Ints pairs, int32_t values) {
#if defined(__AVX512F__)
  sums.part[0] = (Ints::Part)_mm512_dpwssd_epi32((__m512i)sums.part[0], (__m512i)pairs.part[0],
                                                 _mm512_set1_epi32(values));
  return sums;
#elif defined(__AVX2__)
  return by_parts<int32_t>(
      [&](auto s, auto p) {
#if defined(__AVXVNNI__)
        return _mm256_dpwssd_avx_epi32((__m256i)s, (__m256i)p, _mm256_set1_epi32(values));
#else
        return s + (Ints::Part)_mm256_madd_epi16((__m256i)p, _mm256_set1_epi32(values));
#endif
      },
      sums, pairs);
#else
  return by_parts<int32_t>(
      [&](auto s, auto p) { return s + (p << 16 >> 16) * static_cast<int16_t>(values) + (p >> 16) * (values >> 16); },
      sums, pairs);
#endif
}

// ---- four products per channel at once ----

// 64 unsigned bytes: four inner elements of 16 channels.
struct Bytes {
  using Part = uint8_t __attribute__((vector_size(kRegister)));
  Part part[kParts];
};

inline Bytes load_bytes(const uint8_t* from) {
  Bytes bytes;
  each<kParts>([&](auto i) { std::memcpy(&bytes.part[i], from + i * kRegister, kRegister); });
  return bytes;
}

inline int32_t word_at(const int8_t* a) {
  int32_t four;
  std::memcpy(&four, a, sizeof four);
  return four;
}

#if (defined(__AVX512VNNI__) && defined(__AVX512BW__)) || defined(__AVXVNNI__) || \
    (defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8))

// The unsigned bytes of weights, to be multiplied with the signed ones of rows.
inline Bytes multiplicand(Bytes weights) { return weights; }
constexpr bool kOffset = true;  // int8 weights have an offset of 128, which the sum of the row corrects

// The halves of bytes, 16 times too large, as in the high half's position.
inline Bytes low_halves(Bytes v) {
  using Shorts = uint16_t __attribute__((vector_size(kRegister)));
  each<kParts>([&](auto i) { v.part[i] = (Bytes::Part)((Shorts)v.part[i] << 4) & 0xf0; });
  return v;
}
inline Bytes high_halves(Bytes v) {
  each<kParts>([&](auto i) { v.part[i] = v.part[i] & 0xf0; });
  return v;
}
constexpr int kTimes = 16;

// sums[c] += four elements of channel c times the four of `a`.
inline Ints add_products(Ints sums, Bytes weights, const int8_t* a) {
  const int32_t four = word_at(a);
#if defined(__AVX512F__)
  sums.part[0] = (Ints::Part)_mm512_dpbusd_epi32((__m512i)sums.part[0], (__m512i)weights.part[0],
                                                 _mm512_set1_epi32(four));
#elif defined(__aarch64__)
  each<kParts>([&](auto i) {
    sums.part[i] = (Ints::Part)vusdotq_s32((int32x4_t)sums.part[i], (uint8x16_t)weights.part[i],
                                           vreinterpretq_s8_s32(vdupq_n_s32(four)));
  });
#else
  each<kParts>([&](auto i) {
    sums.part[i] = (Ints::Part)_mm256_dpbusd_avx_epi32((__m256i)sums.part[i], (__m256i)weights.part[i],
                                                       _mm256_set1_epi32(four));
  });
#endif
  return sums;
}

#else

// Signed bytes: sums of two products, each at most 127 * 127, are exact in 16 bits.
inline Bytes multiplicand(Bytes weights) {
  each<kParts>([&](auto i) { weights.part[i] = weights.part[i] ^ 0x80; });
  return weights;
}
constexpr bool kOffset = false;

inline Bytes low_halves(Bytes v) {
  each<kParts>([&](auto i) { v.part[i] = v.part[i] & 15; });
  return v;
}

constexpr int kTimes = 1;

#if defined(__AVX2__)

inline Bytes high_halves(Bytes v) {
  using Shorts = uint16_t __attribute__((vector_size(kRegister)));
  each<kParts>([&](auto i) { v.part[i] = (Bytes::Part)((Shorts)v.part[i] >> 4) & 15; });
  return v;
}

// Sums of two products are added by an operation that may multiply them by two factors of 16 bits per channel.
constexpr bool kTakesFactors = true;
[[gnu::always_inline]] inline Ints factors_of(Ints steps) { return in_pairs(steps, steps); }

inline Ints add_products(Ints sums, Bytes weights, const int8_t* a, Ints factors = 0x10001) {
  const __m256i four = _mm256_set1_epi32(word_at(a)), size = _mm256_abs_epi8(four);
  each<kParts>([&](auto i) {
    const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8((__m256i)weights.part[i], four));
    sums.part[i] += (Ints::Part)_mm256_madd_epi16(pairs, (__m256i)factors.part[i]);
  });
  return sums;
}

// The same for eight elements and levels of six bits, unsigned: sums of four products of at most 63 * 127 fit 16 bits.
inline Ints add_sixes(Ints sums, Bytes first, Bytes second, const int8_t* a, Ints factors) {
  const __m256i four = _mm256_set1_epi32(word_at(a)), next = _mm256_set1_epi32(word_at(a + 4));
  each<kParts>([&](auto i) {
    const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16((__m256i)first.part[i], four),
                                           _mm256_maddubs_epi16((__m256i)second.part[i], next));
    sums.part[i] += (Ints::Part)_mm256_madd_epi16(pairs, (__m256i)factors.part[i]);
  });
  return sums;
}

// -32 times a sum of 16 values, which corrects the levels' offset: as two halves of 16 bits, and times the factors.
inline int32_t offset_of_sixes(int32_t sum) { return static_cast<int32_t>((-16 * sum & 0xffff) * 0x10001u); }
inline Ints offsets_of_sixes(int32_t offset, Ints factors) {
  return by_parts<int32_t>([&](auto f) { return _mm256_madd_epi16((__m256i)f, _mm256_set1_epi32(offset)); }, factors);
}

#else

inline Bytes high_halves(Bytes v) {
  each<kParts>([&](auto i) { v.part[i] = v.part[i] >> 4; });
  return v;
}

inline Ints add_products(Ints sums, Bytes weights, const int8_t* a) {
  const int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(word_at(a)));
  each<kParts>([&](auto i) {
    const auto w = (int8x16_t)weights.part[i];
#if defined(__ARM_FEATURE_DOTPROD)
    sums.part[i] = (Ints::Part)vdotq_s32((int32x4_t)sums.part[i], w, four);
#else
    const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(four)), high = vmull_high_s8(w, four);
    sums.part[i] += (Ints::Part)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#endif
  });
  return sums;
}

#endif
#endif

#if !defined(__AVX2__) || defined(__AVX512F__) || defined(__AVXVNNI__)
constexpr bool kTakesFactors = false;
[[gnu::always_inline]] inline Ints factors_of(Ints steps) { return steps; }
inline Ints add_products(Ints sums, Bytes weights, const int8_t* a, Ints) { return add_products(sums, weights, a); }
inline Ints add_sixes(Ints sums, Bytes first, Bytes second, const int8_t* a, Ints) {
  return add_products(add_products(sums, first, a), second, a + 4);
}
inline int32_t offset_of_sixes(int32_t sum) { return -32 * sum; }
inline Ints offsets_of_sixes(int32_t offset, Ints) { return offset; }
#endif

// Four words of levels of six bits from three, whose upper two bits have the fourth.
[[gnu::always_inline]] inline void load_sixes(const uint8_t* from, Bytes* four) {
  each<3>([&](auto j) { four[j] = load_bytes(from + 64 * j); });
  each<kParts>([&](auto i) {
    using Shorts = uint16_t __attribute__((vector_size(kRegister)));
    const auto upper = [&](int j) { return (Shorts)four[j].part[i]; };
    const Shorts fourth = (upper(0) >> 6 & 0x0303) | (upper(1) >> 4 & 0x0c0c) | (upper(2) >> 2 & 0x3030);
    each<3>([&](auto j) { four[j].part[i] = four[j].part[i] & 63; });
    four[3].part[i] = (Bytes::Part)fourth;
  });
}

// ---- a group of 4-bit levels ----
//
// A GroupSum accumulates a row's products with a group, eight elements at a time. sums() is 16 times their sum, and
// with(zeros, values) that + zeros times `values`, minus the sum of the row's values (quantized_rows.h); both fit 16 bits.
// times(factors_of(steps)) is kTimes times the sum, times the steps.

#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)

// Eight sums of two products of at most 15 * 127 fit 16 bits.
struct GroupSum {
  using Shorts = int16_t __attribute__((vector_size(kRegister)));
  Shorts pairs[kParts] = {};

  void add(const Bytes& low, const Bytes& high, const int8_t* a) {
    const __m256i four = _mm256_set1_epi32(word_at(a)), next = _mm256_set1_epi32(word_at(a + 4));
    each<kParts>([&](auto i) {
      pairs[i] += (Shorts)_mm256_maddubs_epi16((__m256i)low.part[i], four);
      pairs[i] += (Shorts)_mm256_maddubs_epi16((__m256i)high.part[i], next);
    });
  }

  Ints times(Ints factors) const {
    each<kParts>([&](auto i) {
      factors.part[i] = (Ints::Part)_mm256_madd_epi16((__m256i)pairs[i], (__m256i)factors.part[i]);
    });
    return factors;
  }

  Ints sums() const { return times(0x100010); }
  Ints with(Ints zeros, int32_t values) const { return add_pairs(sums(), zeros, values); }
};

#else

struct GroupSum {
  Ints products = 0;

  void add(const Bytes& low, const Bytes& high, const int8_t* a) {
    products = add_products(add_products(products, low, a), high, a + 4);
  }

  Ints times(Ints factors) const { return products * factors; }
  Ints sums() const { return bits_as<int32_t>(bits_as<uint32_t>(products) << (kTimes == 16 ? 0 : 4)); }

  Ints with(Ints zeros, int32_t values) const {
#if defined(__AVX2__)
    return add_pairs(sums(), zeros, values);
#else
    return sums() + zeros * values;
#endif
  }
};

#endif

// ---- rows in order ----

struct StraightRow {
  int8_t* to;

  int8_t* values(int64_t group) const { return to + group * kGroup; }
};

struct StraightRows {
  int8_t* to;
  int64_t groups;

  StraightRow operator()(int64_t row) const { return {to + row * groups * kGroup}; }
};

}  // namespace specinfer
