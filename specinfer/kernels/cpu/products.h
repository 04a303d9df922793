// Products of rows with weights that lie in blocks of 16 output channels: how rows and blocks are cut into
// tiles, shared out among threads, and where results go. A kind of weight says how a tile is computed:
//
//   tile<R, B>(rows, out, row, block)    R rows from `row` on by B blocks from `block` on
//   kRows, kPairRows                     the most rows of a tile of one block, and of two; 0: there is none
//   block_bytes(inner)                   of one block
//   blocks

#pragma once

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "vector.h"

namespace specinfer {

constexpr int64_t kBlock = 16;             // output channels side by side
constexpr int64_t kThreadBytes = 1 << 16;  // of weights, or elements of x: worth another thread
constexpr int64_t kAhead = 4096;           // bytes between what is used and what is asked for

inline void prefetch(const void* weights) { __builtin_prefetch(static_cast<const char*>(weights) + kAhead); }

// ---- sums -> outputs ----

// Where results go: + bias, in x's dtype.
struct Output {
  at::Tensor tensor;
  const float* bias;  // [channels], or null
  int64_t channels;
  bool halves;  // bfloat16
  void* data;

  Output(const at::Tensor& x, int64_t channels, const std::optional<at::Tensor>& bias)
      : tensor(at::empty({x.size(0), channels}, x.options())),
        bias(bias ? bias->const_data_ptr<float>() : nullptr),
        channels(channels),
        halves(x.scalar_type() == at::kBFloat16),
        data(tensor.mutable_data_ptr()) {
    TORCH_CHECK(!bias || (bias->numel() == channels && bias->is_contiguous()), "bias must be [", channels,
                "], got ", bias ? bias->sizes() : at::IntArrayRef());
  }

  // The channels from 16 * block on.
  void store(int64_t row, int64_t block, Floats y) const {
    const int64_t first = block * kBlock, n = std::min(kBlock, channels - first);
    if (bias != nullptr) y = y + load(bias + first, n);
    const int64_t at = row * channels + first;
    if (halves) {
      specinfer::store(static_cast<BFloat16*>(data) + at, y, n);
    } else {
      specinfer::store(static_cast<float*>(data) + at, y, n);
    }
  }
};

// ---- all rows by all blocks ----

// R rows by the blocks from `block` to `last`, B at a time.
template <typename Weight, typename Rows, int B, int R>
void tile(const Weight& weight, const Rows& rows, const Output& out, int64_t row, int64_t block, int64_t last) {
  for (; block + B <= last; block += B) weight.template tile<R, B>(rows, out, row, block);
  if constexpr (B > 1) {
    for (; block < last; ++block) weight.template tile<R, 1>(rows, out, row, block);
  }
}

template <typename Weight, typename Rows, int B, size_t... R>
constexpr auto tiles_by_rows(std::index_sequence<R...>) {
  return std::array{tile<Weight, Rows, B, static_cast<int>(R) + 1>...};
}

// All rows by all blocks, B blocks and at most MaxRows rows at a time.
template <int B, int MaxRows, typename Weight, typename Rows>
void multiply_tiles(const Weight& weight, const Rows& rows, const Output& out) {
  static constexpr auto tiles = tiles_by_rows<Weight, Rows, B>(std::make_index_sequence<MaxRows>{});
  const int64_t count = (rows.count + MaxRows - 1) / MaxRows;
  const int64_t size = (rows.count + count - 1) / count;  // tiles of nearly the same height
  const int64_t grain = kThreadBytes / (B * Weight::block_bytes(rows.inner)) + 1;
  at::parallel_for(0, (weight.blocks + B - 1) / B, grain, [&](int64_t first, int64_t last) {
    for (int64_t block = first * B; block < std::min(last * B, weight.blocks); block += B) {
      for (int64_t row = 0; row < rows.count; row += size) {
        const int64_t n = std::min(size, rows.count - row);
        tiles[n - 1](weight, rows, out, row, block, std::min(block + B, weight.blocks));
      }
    }
  });
}

// While one tile holds all rows, the weights take the time, and come fastest when they are read straight
// through. For more rows it is the arithmetic, and two blocks share the activations they load.
template <typename Weight, typename Rows>
void multiply(const Weight& weight, const Rows& rows, const Output& out) {
  if (rows.count == 0) return;
  if constexpr (Weight::kPairRows > 0) {
    if (rows.count > Weight::kRows) return multiply_tiles<2, Weight::kPairRows>(weight, rows, out);
  }
  multiply_tiles<1, Weight::kRows>(weight, rows, out);
}

}  // namespace specinfer
