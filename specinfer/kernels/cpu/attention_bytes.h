// Attention over int8 rows: its products are of bytes, with exact int32 sums.
//
// Queries and weights stay exact to 15 bits of the largest of their row: each row of them is two rows of bytes. So a
// score, and a block's weighted sum, is a number of int32 times factors, whatever the order of its terms.

#pragma once

#include "attention_blocks.h"
#include "scratch.h"

namespace specinfer {

constexpr int kPartsOfRow = 2;  // high and low bytes

// A row x = factor * (128 high + low), in bytes.
struct SplitRow {
  float factor;
  int32_t sum;  // of 128 high + low

  // The products of a row with 16 columns, from those of its parts, whose rows are `stride` apart.
  Floats product(const int32_t* parts, int64_t stride) const {
    const Words both = (load_vector<uint32_t>(parts) << 7) + load_vector<uint32_t>(parts + stride);
    const uint32_t excess = kOffset ? 128u * static_cast<uint32_t>(sum) : 0u;
    return to_floats(bits_as<int32_t>(both - excess)) * factor;
  }
};

// Splits a row of `count` numbers, whole vectors that at(i) returns, into the bytes of its parts.
template <typename F>
SplitRow split_row(int64_t count, const F& at, int8_t* high, int8_t* low) {
  constexpr float kMost = 127 * 128;
  Ints most = 0, sums = 0;
  for (int64_t i = 0; i < count; i += kLanes) most = larger(most, at(i));
  const float highest = largest(most), inverse = highest < 1e-30f ? 0.0f : kMost / highest;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Ints whole = rounded(at(i) * inverse);
    // The offset makes it positive: shifts are of unsigned words.
    const Ints upper = bits_as<int32_t>(bits_as<uint32_t>(whole + (128 * 128 + 64)) >> 7) - 128;
    store_bytes(high + i, upper);
    store_bytes(low + i, whole - bits_as<int32_t>(bits_as<uint32_t>(upper) << 7));
    sums = sums + whole;
  }
  return {highest / kMost, sum(sums)};
}

// The products of up to `most` queries with int8 keys and values that are laid out; memory is allocated in Scratch.
class ByteProducts {
 public:
  ByteProducts(int64_t most, const CacheShape& shape, int64_t kv_heads)
      : shape_(shape),
        kv_heads_(kv_heads),
        queries_(Scratch::get().take<SplitRow>(most)),
        weights_(Scratch::get().take<SplitRow>(most)),
        bytes_(Scratch::get().take<int8_t>(most * kPartsOfRow * kKeys)),
        products_(Scratch::get().take<int32_t>(most * kPartsOfRow * std::max<int64_t>(kKeys, shape.padded))) {}

  // Read the scales of a head's keys or values that are laid out; for other caches than int8 there are none.
  void read_key_scales(const BFloat16* scales, const int32_t* slots, int64_t count) {
    read(scales, slots, count, key_scales_);
  }
  void read_value_scales(const BFloat16* scales, const int32_t* slots, int64_t count) {
    read(scales, slots, count, value_scales_);
  }

  // Splits query i into the bytes of its two rows of words.
  template <typename T>
  void take_query(int64_t i, const T* query, uint32_t* words) {
    auto* const bytes = reinterpret_cast<int8_t*>(words);
    const auto at = [&](int64_t n) { return load(query + n, shape_.head - n); };
    queries_[i] = split_row(shape_.padded, at, bytes, bytes + shape_.steps * sizeof(uint32_t));
  }

  // Scores of `some` queries from number `first` on, whose words are given. Rows of `to` are `stride` apart.
  void score(int64_t first, int64_t some, const uint32_t* words, const uint32_t* keys, int64_t columns,
             float* to, int64_t stride, Ahead& ahead) {
    multiply_block<int8_t, true>(some * kPartsOfRow, words, shape_.steps, keys, kKeys, products_, kKeys,
                                 (shape_.head + 3) / 4, columns, ahead);
    for (int64_t i = 0; i < some; ++i) {
      for (int64_t n = 0; n < columns; n += kLanes) {
        const Floats product = queries_[first + i].product(products_ + i * kPartsOfRow * kKeys + n, kKeys);
        store(to + i * stride + n, product * load(key_scales_ + n));
      }
    }
  }

  // sums += weights * values.
  void add_values(int64_t some, const float* weights, const uint32_t* values, int64_t steps, float* sums,
                  Ahead& ahead) {
    const int64_t padded = shape_.padded;
    for (int64_t i = 0; i < some; ++i) {
      int8_t* const bytes = bytes_ + i * kPartsOfRow * kKeys;
      const auto at = [&](int64_t n) { return load(weights + i * kKeys + n) * load(value_scales_ + n); };
      weights_[i] = split_row(kKeys, at, bytes, bytes + kKeys);
    }
    multiply_block<int8_t, true>(some * kPartsOfRow, reinterpret_cast<const uint32_t*>(bytes_), kKeys / 4, values,
                                 padded, products_, padded, steps, padded, ahead);
    for (int64_t i = 0; i < some; ++i) {
      for (int64_t n = 0; n < padded; n += kLanes) {
        float* const sum = sums + i * padded + n;
        store(sum, load(sum) + weights_[i].product(products_ + i * kPartsOfRow * padded + n, padded));
      }
    }
  }

 private:
  void read(const BFloat16* scales, const int32_t* slots, int64_t count, float* to) const {
    for (int64_t n = 0; scales != nullptr && n < kKeys; ++n) {
      to[n] = n < count ? std::bit_cast<float>(uint32_t{scales[slots[n] * kv_heads_].bits} << 16) : 0.0f;
    }
  }

  const CacheShape shape_;
  const int64_t kv_heads_;
  SplitRow *const queries_, *const weights_;
  int8_t* const bytes_;  // of weights
  int32_t* const products_;
  float key_scales_[kKeys], value_scales_[kKeys];
};

}  // namespace specinfer
