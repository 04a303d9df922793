// An int4 weight, and rows for it, as tiles of bfloat16.
//
// A weight is scale (level - zero / 16). scale * level and scale * zero become bfloat16; the zeros are separate weights
// and are multiplied with -1/16 of the sum of a row's group. That sum is split into two bfloat16, its first eight bits
// and the next ones, since one bfloat16 would be too coarse if a few activations are large.
//
// As bits, the exponent of a float16 number is that of a bfloat16 number 2^112 times smaller. So levels become weights in
// four steps:
//
//   0x6400 | level, 0x5400 | level << 4         1024 + level and 64 + level, as float16, where levels are stored
//   (1024 + level) scale - 1024 scale           scale * level: one operation, which rounds to 11 bits
//   times 2^12, and the upper half of that      three places to the right, rounded to 8 bits: bfloat16
//
// Scales are first multiplied by a power of two, so that a matrix's largest is between 32 and 64: 1024 times it is a
// float16 number, and a scale 2^19 times smaller is still normal. Rows are multiplied by 2^64, since products would
// be too small.

#pragma once

#include <cmath>

#include "quantized_rows.h"
#include "tiles.h"

#if defined(SPECINFER_TILED)

namespace specinfer {

constexpr int64_t kSumBytes = 4;  // of a group's sum in a row: two bfloat16
constexpr float kOfRows = 0x1p64f, kOfWeights = 0x1p-112f;

// Numbers of 16 channels times their scales, as bfloat16.
class Scaled {
 public:
#if defined(SPECINFER_TILES)
  // Scales times a power of two.
  Scaled(const Half* scales, float factor) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales));
    scales_ = product(in_pairs(_mm512_cvtepu16_epi32(halves)), factor);
    times64_ = product(scales_, 64.0f);
    times1024_ = product(scales_, 1024.0f);
  }

  // The four lowest bits of every 16, the next four, and one number for both halves of 32.
  Words of_low(Words levels) const { return times<0x000f, 0x6400>(levels, times1024_); }
  Words of_high(Words levels) const { return times<0x00f0, 0x5400>(levels, times64_); }
  Words of_both(Words zeros) const {
    return times<0x00ff, 0x6400>(std::bit_cast<Words>(in_pairs((__m512i)zeros.part[0])), times1024_);
  }

 private:
  static __m512i in_pairs(__m512i words) { return _mm512_or_si512(words, _mm512_slli_epi32(words, 16)); }

  // GCC has intrinsics for these two instructions since version 12, its assembler since binutils 2.38.
  static __m512i product(__m512i x, float factor) {
    const __m256i half = _mm512_cvtps_ph(_mm512_set1_ps(factor), _MM_FROUND_TO_NEAREST_INT);
    __m512i out;
    asm("vmulph %2, %1, %0" : "=v"(out) : "v"(x), "v"(_mm512_broadcastw_epi16(_mm256_castsi256_si128(half))));
    return out;
  }

  template <int kMask, int kNumber>
  Words times(Words levels, __m512i offset) const {
    constexpr int kMaskedOr = 0xea;
    __m512i product = _mm512_ternarylogic_epi32((__m512i)levels.part[0], _mm512_set1_epi16(kMask),
                                                _mm512_set1_epi16(kNumber), kMaskedOr);
    asm("vfmsub213ph %2, %1, %0" : "+v"(product) : "v"(scales_), "v"(offset));
    return std::bit_cast<Words>(_mm512_mulhrs_epi16(product, _mm512_set1_epi16(1 << 12)));
  }

  __m512i scales_, times64_, times1024_;
#else
  Scaled(const Half* scales, float factor)
      : scales_(bits_as<float>(halves(load(scales) * Floats(factor)) << 13) * Floats(1 / kOfWeights)) {}

  Words of_low(Words levels) const { return times(levels & 15) | times(levels >> 16 & 15) << 16; }
  Words of_high(Words levels) const { return of_low(levels >> 4); }
  Words of_both(Words zeros) const { return times(zeros) | times(zeros) << 16; }

 private:
  // The bits of the nearest float16 numbers.
  static Words halves(Floats x) {
    const Words bits = bits_as<uint32_t>(x * Floats(kOfWeights));
    return (bits + 0xfff + ((bits >> 13) & 1)) >> 13;
  }

  Words times(Words numbers) const {
    return (halves(to_floats(bits_as<int32_t>(numbers)) * scales_) + 4) >> 3;
  }

  Floats scales_;
#endif
};

class Int4Tiles {
 public:
  explicit Int4Tiles(const Product& product)
      : levels_(static_cast<const uint8_t*>(product.weight)),
        scales_(static_cast<const Half*>(product.scales)),
        zeros_(static_cast<const uint8_t*>(product.zeros)),
        groups_(padded_inner(product.kind, product.inner) / kGroup),
        of_scales_(factor(product.largest)) {}

  int64_t groups() const { return groups_; }
  // Factor of the sums of tiles. NaN if a scale is NaN, which the steps above would turn into a number.
  float unit() const { return 1 / kOfWeights / kOfRows / of_scales_; }

  // A group of a block as the weights of a tile, and its zeros as a row of one.
  [[gnu::always_inline]] void expand(int64_t block, int64_t group, uint8_t* weights, uint8_t* zeros) const {
    const int64_t at = block * groups_ + group;
    const uint8_t* const levels = levels_ + at * kGroupBytes;
    // The three arrays are separate: prefetch the same number of groups ahead in each.
    constexpr int64_t kGroupsAhead = 48;
    __builtin_prefetch(scales_ + (at + kGroupsAhead) * kBlock);
    __builtin_prefetch(zeros_ + (at + kGroupsAhead) * kBlock);
    const Scaled scaled(scales_ + at * kBlock, of_scales_);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      __builtin_prefetch(levels + kGroupsAhead * kGroupBytes + j * kRowBytes);
      const Words low = load_vector<uint32_t>(levels + j * kRowBytes), high = low >> 8;
      uint8_t* const to = weights + 4 * j * kRowBytes;
      store_vector(to, scaled.of_low(low));
      store_vector(to + kRowBytes, scaled.of_high(low));
      store_vector(to + 2 * kRowBytes, scaled.of_low(high));
      store_vector(to + 3 * kRowBytes, scaled.of_high(high));
    }
    store_vector(zeros, scaled.of_both(widened(zeros_ + at * kBlock)));
  }

 private:
  static float factor(float largest) {
    constexpr int kMost = 14;  // 2^14 is a float16 number
    int exponent = 0;
    std::frexp(largest, &exponent);
    return std::isnan(largest) ? largest : std::ldexp(1.0f, std::min(6 - exponent, kMost));
  }

  const uint8_t* levels_;
  const Half* scales_;
  const uint8_t* zeros_;
  int64_t groups_;
  float of_scales_;
};

// Store a group of a row in the tile's order, and the factors of its zeros. In each eight elements the even ones come
// first, as levels are stored (product.h).
inline void store_int4_row(GroupOf32 group, uint8_t* to, uint8_t* of_zeros) {
  alignas(64) BFloat16 given[kGroup];
  store(given, group.low * Floats(kOfRows));
  store(given + kLanes, group.high * Floats(kOfRows));
  auto* const out = reinterpret_cast<BFloat16*>(to);
#if defined(__AVX512BW__)
  alignas(64) static constexpr uint16_t kOrder[kGroup] = {
      0,  2,  4,  6,  1,  3,  5,  7,  8,  10, 12, 14, 9,  11, 13, 15,
      16, 18, 20, 22, 17, 19, 21, 23, 24, 26, 28, 30, 25, 27, 29, 31};
  _mm512_storeu_si512(out, _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), _mm512_load_si512(given)));
#else
  for (int i = 0; i < kGroup; ++i) out[i] = given[i / 8 * 8 + i % 4 * 2 + i / 4 % 2];
#endif
  const float total = sum(load(given) + load(given + kLanes)) / -16;
  BFloat16 first, rest;
  store(&first, Floats(total), 1);
  store(&rest, Floats(total) - load(&first, 1), 1);
  std::memcpy(of_zeros, &first, sizeof first);
  std::memcpy(of_zeros + sizeof first, &rest, sizeof rest);
}

}  // namespace specinfer

#endif
