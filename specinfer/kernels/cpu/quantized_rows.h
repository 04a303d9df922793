// Quantizes rows of activations to int8, written in the layout of the product that follows: place(row).values(group)
// is the address of the 32 values of a group.

#pragma once

#include <memory>

#include "product.h"

namespace specinfer {

struct GroupOf32 {
  Floats low, high;
};

template <typename T>
inline GroupOf32 load_group(const T* x, int64_t n) {
  return {load(x, n), load(x + kLanes, n - kLanes)};
}

// x H for the 32 x 32 Hadamard matrix H of ones and minus ones.
inline GroupOf32 rotate(GroupOf32 x) {
  x = {x.low + x.high, x.low - x.high};
  each<4>([&](auto i) {
    constexpr int bit = 8 >> i;
    const Floats sign = select((lane_numbers() & bit) != 0, Floats(-1.0f), Floats(1.0f));
    x.low = fma(x.low, sign, partners<bit>(x.low));
    x.high = fma(x.high, sign, partners<bit>(x.high));
  });
  return x;
}

// The larger of two absolute values by their bits: a NaN is the largest, and so reaches the scale and the output.
// Without the sign, the bits have the order of signed integers.
inline Ints larger(Ints most, Floats x) {
  const Ints bits = bits_as<int32_t>(x) & 0x7fffffff;
  return select(bits > most, bits, most);
}

inline float largest(Ints most) {
  each<4>([&](auto i) {
    const Ints other = partners<(8 >> i)>(most);
    most = select(other > most, other, most);
  });
  return std::bit_cast<float>(most[0]);
}

inline float inverse_of(float most) { return most < 1e-30f ? 0.0f : 127.0f / most; }
inline float int8_scale(float most) { return most / 127.0f; }

// The lanes as bytes; all values must fit.
inline void store_bytes(int8_t* to, Ints v) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)v.part[0]));
#elif defined(__AVX2__)
  const __m256i words = _mm256_packs_epi32((__m256i)v.part[0], (__m256i)v.part[1]);
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
#else
  const int16x8_t low = vcombine_s16(vmovn_s32((int32x4_t)v.part[0]), vmovn_s32((int32x4_t)v.part[1]));
  const int16x8_t high = vcombine_s16(vmovn_s32((int32x4_t)v.part[2]), vmovn_s32((int32x4_t)v.part[3]));
  vst1q_s8(to, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
#endif
}

// Adding 1.5 * 2^23 rounds to the nearest integer, ties to even.
inline Ints rounded(Floats x) {
  const Floats magic = 12582912.0f;
  return to_ints((x + magic) - magic);
}

// Writes a head of n elements as int8 and returns the factor of these, which is rounded before the elements are: the
// largest is below 127.5. attention/cached_rows.py has the same with the same bits.
template <typename T>
inline BFloat16 quantize_head(const T* x, int64_t n, int8_t* to) {
  Ints most = 0;
  for (int64_t i = 0; i < n; i += kLanes) most = larger(most, load(x + i, n - i));
  const bool none = largest(most) < 1e-30f;
  BFloat16 scales[kLanes];
  store(scales, Floats(none ? 0.0f : int8_scale(largest(most))));
  const Floats scale = none ? Floats(1.0f) : load(scales);
  for (int64_t i = 0; i < n; i += kLanes) {
    int8_t bytes[kLanes];
    store_bytes(bytes, rounded(load(x + i, n - i) / scale));
    std::memcpy(to + i, bytes, std::min<int64_t>(kLanes, n - i));
  }
  return scales[0];
}

// Writes the values of a group and returns their sum per lane.
inline Ints store_group(GroupOf32 x, float inverse, int8_t* values) {
  const Ints low = rounded(x.low * inverse), high = rounded(x.high * inverse);
  store_bytes(values, low);
  store_bytes(values + kLanes, high);
  return low + high;
}

// Calls f(group, its elements) for all groups of a row, rotated; returns the largest absolute value.
template <typename T, typename F>
inline float rotate_row(const T* x, int64_t n, int64_t groups, const F& f) {
  Ints bits = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const GroupOf32 group = rotate(load_group(x + g * kGroup, n - g * kGroup));
    bits = larger(larger(bits, group.low), group.high);
    f(g, group);
  }
  return largest(bits);
}

// One scale for the row, and -128 times the sum of its values, which corrects the weights' offset. `rotated` has room
// for a row; `whole` is the largest value of the row that x is a part of, or null if x is all of it.
template <typename T, typename Place>
void quantize_int8(const T* x, int64_t n, int64_t groups, int64_t row, const Place& place, const float* whole,
                   float* rotated, float* scales, int32_t* offsets) {
  const auto to = place(row);
  const float own = rotate_row(x, n, groups, [&](int64_t g, const GroupOf32& group) {
    store(rotated + g * kGroup, group.low);
    store(rotated + g * kGroup + kLanes, group.high);
  });
  const float most = whole == nullptr ? own : *whole, inverse = inverse_of(most);
  Ints total = 0;
  for (int64_t g = 0; g < groups; ++g) {
    total = total + store_group(load_group(rotated + g * kGroup, kGroup), inverse, to.values(g));
  }
  scales[row] = int8_scale(most);
  offsets[row] = -128 * sum(total);
}

// Per group a sixteenth of the scale, since sums are 16 times too large, and minus the sum, for the zeros: both
// [rows, groups].
template <typename T, typename Place>
void quantize_int4(const T* x, int64_t n, int64_t groups, int64_t row, const Place& place, float* scales,
                   int32_t* sums) {
  const auto to = place(row);
  for (int64_t g = 0; g < groups; ++g) {
    const GroupOf32 group = load_group(x + g * kGroup, n - g * kGroup);
    const float most = largest(larger(larger(Ints(0), group.low), group.high));
    const Ints total = store_group(group, inverse_of(most), to.values(g));
    const int64_t at = row * groups + g;
    scales[at] = most / (127.0f * 16.0f);
    sums[at] = -sum(total);
  }
}

// All rows, for a product with int8 or int4 weights; divided between threads if there are many.
template <Kind kind, typename Place>
void quantize(const Product& product, const Rows& rows, int64_t groups, const Place& place, float* scales,
              int32_t* sums) {
  constexpr int64_t kPieceElements = 1 << 10;  // minimum work of a job
  const auto all = [&](const auto* x) {
    Pool::get().split(rows.count, kPieceElements / (groups * kGroup) + 1, [&](int64_t first, int64_t last) {
      const std::unique_ptr<float[]> rotated(kind == Kind::kInt8 ? new float[groups * kGroup] : nullptr);
      for (int64_t r = first; r < last; ++r) {
        const auto* const from = x + r * product.inner;
        if constexpr (kind == Kind::kInt8) {
          const float* const whole = rows.maxima == nullptr ? nullptr : rows.maxima + r;
          quantize_int8(from, product.inner, groups, r, place, whole, rotated.get(), scales, sums);
        } else {
          quantize_int4(from, product.inner, groups, r, place, scales, sums);
        }
      }
    });
  };
  if (rows.type == Type::kBFloat16) {
    all(static_cast<const BFloat16*>(rows.data));
  } else {
    all(static_cast<const float*>(rows.data));
  }
}

}  // namespace specinfer
