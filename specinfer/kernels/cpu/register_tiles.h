// Divides rows and blocks into tiles of vector registers. A kind of weight computes a tile:
//
//   tile<R, B>(row, block)    R rows from `row` on by B blocks from `block` on
//   kRows, kPairRows          maximum rows of a tile of one block, and of two; 0: no such tile
//   block_bytes, blocks, rows, out

#pragma once

#include <array>
#include <type_traits>

#include "part_tree.h"

namespace specinfer {

constexpr int64_t kAhead = 4096;  // bytes between the current and the prefetched address

// Prefetch the weights that are read next. Unless there are more rows than registers hold, a large model's weights
// are read once per pass. Reading them past the caches keeps data there that is needed sooner: keys and values,
// activations, and the process's data between two passes.
template <bool Nontemporal>
inline void prefetch(const void* weights) {
  __builtin_prefetch(static_cast<const char*>(weights) + kAhead, 0, Nontemporal ? 0 : 3);
}

// Calls f with a compile-time constant, true if the product's weights are read past the caches. This is done on
// x86-64 alone; it was not measured on other CPUs.
template <typename F>
void by_temporality(const Product& product, const F& f) {
#if defined(__x86_64__)
  if (product.nontemporal != 0) return f(std::true_type{});
#endif
  f(std::false_type{});
}

// The same with a constant that is true if the inner elements are divided, so that other tiles need no check.
template <typename F>
void by_division(const Product& product, const Division& division, const F& f) {
  by_temporality(product, [&](auto nontemporal) {
    if (division.divided()) return f(nontemporal, std::true_type{});
    f(nontemporal, std::false_type{});
  });
}

// Results of a tile, stored in a loop: unrolled, it would take longer to compile than all sums.
template <int R, int B, typename Numbers = Floats>
struct TileResults {
  Numbers of[R][B];

  void store(const Output& out, int64_t row, int64_t block) const {
    for (int r = 0; r < R; ++r) {
      for (int b = 0; b < B; ++b) out.store(row + r, block + b, of[r][b]);
    }
  }

  void store_branch(const Output& out, int branch, int64_t row, int64_t block) const {
    for (int r = 0; r < R; ++r) {
      for (int b = 0; b < B; ++b) out.store_branch(branch, row + r, block + b, of[r][b]);
    }
  }

  // Exact sums, for rows with these scales.
  void store(const Output& out, int64_t row, int64_t block, const float* row_scales) const {
    for (int r = 0; r < R; ++r) {
      for (int b = 0; b < B; ++b) out.store(row + r, block + b, of[r][b], row_scales[row + r]);
    }
  }
};

// A tile of R rows by B blocks of a product that is divided or not: sum(results, first inner element, end) is one of
// its sums. A part's sum stays in registers until nothing more is added to it.
template <int R, int B, bool Divided, typename Sum>
[[gnu::always_inline]] inline void add_tile(const Division& division, const Output& out, int64_t row, int64_t block,
                                            const Sum& sum) {
  using Results = TileResults<R, B>;
  if constexpr (Divided) {
    Results branches[PartTree::kMost];
    int size = 0;
    for (int64_t p = 0, begin = 0; p < division.count; ++p) {
      const int64_t end = division.end(p);
      Results own;
      sum(own, begin, end);
      for (int n = division.merges(p); n > 0; --n) {
        const Results& before = branches[--size];
        each<R>([&](auto r) { each<B>([&](auto b) { own.of[r][b] = before.of[r][b] + own.of[r][b]; }); });
      }
      Results& to = branches[size++];
      each<R>([&](auto r) { each<B>([&](auto b) { to.of[r][b] = own.of[r][b]; }); });
      begin = end;
    }
    for (int n = 0; n < size; ++n) branches[n].store_branch(out, n, row, block);
  } else {
    Results results;
    sum(results, 0, division.inner);
    results.store(out, row, block);
  }
}

// R rows by the blocks from `block` to `last`, B at a time.
template <typename Weight, int B, int R>
void register_tile(const Weight& weight, int64_t row, int64_t block, int64_t last) {
  for (; block + B <= last; block += B) weight.template tile<R, B>(row, block);
  if constexpr (B > 1) {
    for (; block < last; ++block) weight.template tile<R, 1>(row, block);
  }
}

template <typename Weight, int B, size_t... R>
constexpr auto tiles_by_rows(std::index_sequence<R...>) {
  return std::array{register_tile<Weight, B, static_cast<int>(R) + 1>...};
}

// All rows by all blocks, B blocks and at most MaxRows rows at a time.
template <int B, int MaxRows, typename Weight>
void multiply_in_registers(const Weight& weight) {
  static constexpr auto tiles = tiles_by_rows<Weight, B>(std::make_index_sequence<MaxRows>{});
  const int64_t count = (weight.rows + MaxRows - 1) / MaxRows;
  const int64_t size = (weight.rows + count - 1) / count;  // tiles of nearly equal height
  share_blocks(weight.out, weight.blocks, B, weight.block_bytes, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; block += B) {
      for (int64_t row = 0; row < weight.rows; row += size) {
        tiles[std::min(size, weight.rows - row) - 1](weight, row, block, std::min(block + B, last));
      }
    }
  });
}

// While one tile holds all rows, reading the weights takes the time, and is fastest sequentially. For more rows
// arithmetic does, and two blocks share loaded activations.
template <typename Weight>
void multiply_in_registers(const Weight& weight) {
  if constexpr (Weight::kPairRows > 0) {
    if (weight.rows > Weight::kRows) return multiply_in_registers<2, Weight::kPairRows>(weight);
  }
  multiply_in_registers<1, Weight::kRows>(weight);
}

}  // namespace specinfer
