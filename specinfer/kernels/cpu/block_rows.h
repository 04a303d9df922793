// Rows of activations in int8, for products with GGUF blocks.
//
// A level with a scale of its group is multiplied with activations that have a scale per group, too. In blocks of 256
// elements groups have integer steps, and share a scale: so do the activations, and such a span's products are added
// exactly. The same group or span of all rows is stored together, so that a tile addresses them from one pointer.

#pragma once

#include "byte_products.h"
#include "scratch.h"

namespace specinfer {

constexpr int kHalves = 2;  // of a group; each may have its own step

struct RowGroup {
  static constexpr int kGroups = 1;
  int8_t values[kGroup];
  float scale;               // a sixteenth for 4-bit levels, whose sums are 16 times too large
  float of_min;              // minus the sum of the group, times its scale
  int32_t offsets[kHalves];  // correct the offset of 6-bit and 8-bit levels
};

struct alignas(64) RowSpan {
  static constexpr int kGroups = kSpan;
  int8_t values[kSpan * kGroup];
  int32_t sums[kSpan];  // pairs of 16 bits: the sums of two groups for 4-bit levels, else of the halves of a group
  float scale;
};

// Small functions are inlined by force: compilers leave some out of line in a file of this size.
//
// Writes n values from x on; the sums of the values of each group's halves go to `halves`.
template <typename Row, typename T>
[[gnu::always_inline]] inline float quantize_values(const T* x, int64_t n, Row& to, int32_t* halves) {
  Ints bits = 0;
  for (int g = 0; g < Row::kGroups; ++g) {
    const GroupOf32 group = load_group(x + g * kGroup, n - g * kGroup);
    bits = larger(larger(bits, group.low), group.high);
  }
  const float most = largest(bits), inverse = inverse_of(most);
  for (int g = 0; g < Row::kGroups; ++g) {
    const GroupOf32 group = load_group(x + g * kGroup, n - g * kGroup);
    const Ints low = rounded(group.low * inverse), high = rounded(group.high * inverse);
    store_bytes(to.values + g * kGroup, low);
    store_bytes(to.values + g * kGroup + kLanes, high);
    halves[kHalves * g] = sum(low);
    halves[kHalves * g + 1] = sum(high);
  }
  return int8_scale(most);
}

template <typename T>
[[gnu::flatten]] void quantize_row(const T* x, int64_t n, int bits, RowGroup& to) {
  int32_t halves[kHalves];
  const float scale = quantize_values(x, n, to, halves);
  to.scale = bits == 4 ? scale * 0.0625f : scale;
  to.of_min = static_cast<float>(-(halves[0] + halves[1])) * scale;
  for (int i = 0; i < kHalves; ++i) to.offsets[i] = bits == 6 ? offset_of_sixes(halves[i]) : -128 * halves[i];
}

template <typename T>
[[gnu::flatten]] void quantize_row(const T* x, int64_t n, int bits, RowSpan& to) {
  int32_t halves[kHalves * kSpan];
  to.scale = quantize_values(x, n, to, halves);
  for (int i = 0; i < kSpan; ++i) {
    const int32_t* const of = halves + (bits == 4 ? 4 * i : 2 * i);
    to.sums[i] = bits != 4 ? pair_of(of[0], of[1]) : i < kSpan / 2 ? pair_of(of[0] + of[1], of[2] + of[3]) : 0;
  }
}

// All rows, [groups or spans, rows], and `behind` more that a tile may read; divided between threads if there are many.
template <typename Row>
const Row* quantized_rows(const Product& product, const Rows& rows, int bits, int64_t behind = 0) {
  constexpr int64_t kPieceElements = 1 << 10;  // minimum work of a job
  constexpr int64_t kElements = Row::kGroups * kGroup;
  const int64_t count = padded_inner(product.kind, product.inner) / kElements;
  auto* const to = Scratch::get().take<Row>(rows.count * count + behind);
  const auto each_row = [&](const auto* x) {
    Pool::get().split(rows.count, kPieceElements / (count * kElements) + 1, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        const auto* const from = x + r * product.inner;
        for (int64_t i = 0; i < count; ++i) {
          quantize_row(from + i * kElements, product.inner - i * kElements, bits, to[i * rows.count + r]);
        }
      }
    });
  };
  if (rows.type == Type::kBFloat16) {
    each_row(static_cast<const BFloat16*>(rows.data));
  } else {
    each_row(static_cast<const float*>(rows.data));
  }
  return to;
}

// The arrays of a matrix of blocks (product.h).
struct BlockArrays {
  explicit BlockArrays(const Product& product)
      : levels(static_cast<const uint8_t*>(product.weight)),
        scales(static_cast<const Half*>(product.scales)),
        steps(static_cast<const uint8_t*>(product.blocks.steps)),
        mins(static_cast<const Half*>(product.blocks.mins)),
        min_steps(static_cast<const uint8_t*>(product.blocks.min_steps)),
        groups(padded_inner(product.kind, product.inner) / kGroup) {}

  const uint8_t* levels;
  const Half* scales;
  const uint8_t* steps;
  const Half* mins;
  const uint8_t* min_steps;
  int64_t groups;
};

[[gnu::always_inline]] inline Ints steps_at(const uint8_t* from) { return bits_as<int32_t>(widened(from)) - 128; }

// The min steps of a span in pairs, as a row's sums are, for its groups from `begin` to `end`.
template <int Bits>
struct MinPairs {
  static constexpr int kCount = Bits == 4 ? kSpan / 2 : kSpan;
  Ints pairs[kCount];

  [[gnu::always_inline]] MinPairs(const uint8_t* steps, int64_t begin, int64_t end) {
    const auto at = [&](int g) __attribute__((always_inline)) {
      return g < begin || g >= end ? Ints(0) : bits_as<int32_t>(widened(steps + g * kBlock));
    };
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) pairs[i] = Bits == 4 ? in_pairs(at(2 * i), at(2 * i + 1)) : in_pairs(at(i), at(i));
  }

  [[gnu::always_inline]] Ints times(const int32_t* sums) const {
    Ints total = 0;
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) total = add_pairs(total, pairs[i], sums[i]);
    return total;
  }
};

}  // namespace specinfer
