// Products of bfloat16 rows with bfloat16 weights; kernels/bfloat16.py says when they are the fastest.
//
//   weights  [blocks, inner/2, 16, 2]
//
// One operation adds two products per channel in float32. Each channel has two sums, of every second pair, so
// that one operation need not wait for the last; they are made in the same order for every number of rows.

#include "ops.h"
#include "products.h"

#include <torch/library.h>

namespace {

using specinfer::BFloat16;
using specinfer::Floats;
using specinfer::kBlock;
using specinfer::Output;
using specinfer::Words;

constexpr int64_t kPairs = 2;          // sums of a channel
constexpr int64_t kStep = 2 * kPairs;  // inner elements of one round; inner sizes are padded to it

struct Rows {
  const BFloat16* values;
  int64_t count, inner;
};

// sums[c] += two elements of channel c times the two of `a`.
inline Floats add_products(Floats sums, Words weights, const BFloat16* a) {
  uint32_t two;
  std::memcpy(&two, a, sizeof two);
#if defined(__AVX512BF16__)
  return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(two));
#else
  const Words pair = Words{} + two;
  sums += std::bit_cast<Floats>(weights << 16) * std::bit_cast<Floats>(pair << 16);
  return sums + std::bit_cast<Floats>(weights & 0xffff0000) * std::bit_cast<Floats>(pair & 0xffff0000);
#endif
}

struct Weight {
  const BFloat16* values;
  int64_t blocks;

  static constexpr int kRows = 12;  // each takes two registers of 32
  static constexpr int kPairRows = 6;

  static int64_t block_bytes(int64_t inner) { return inner * kBlock * sizeof(BFloat16); }

  template <int R, int B>
  void tile(const Rows& rows, const Output& out, int64_t row, int64_t block) const {
    const int64_t inner = rows.inner;
    const BFloat16* const a = rows.values + row * inner;
    const BFloat16* const from = values + block * inner * kBlock;
    Floats sums[R][B][kPairs] = {};
    for (int64_t k = 0; k < inner; k += kStep) {
#pragma GCC unroll 2
      for (int p = 0; p < kPairs; ++p) {
        Words weights[B];
#pragma GCC unroll 2
        for (int b = 0; b < B; ++b) {
          const BFloat16* const two = from + (b * inner + k + 2 * p) * kBlock;
          specinfer::prefetch(two);
          std::memcpy(&weights[b], two, sizeof weights[b]);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
          for (int b = 0; b < B; ++b) {
            sums[r][b][p] = add_products(sums[r][b][p], weights[b], a + r * inner + k + 2 * p);
          }
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int b = 0; b < B; ++b) out.store(row + r, block + b, sums[r][b][0] + sums[r][b][1]);
    }
  }
};

}  // namespace

// x [rows, inner] and weight [blocks, inner/2, 16, 2] bfloat16, inner padded; bias [channels] float32.
at::Tensor specinfer::bfloat16_linear(const at::Tensor& given, const at::Tensor& weight,
                                      const std::optional<at::Tensor>& bias, int64_t channels) {
  TORCH_CHECK(given.dim() == 2 && given.is_contiguous() && given.scalar_type() == at::kBFloat16,
              "x must be contiguous rows of bfloat16, got ", given.sizes());
  const int64_t missing = (kStep - given.size(1) % kStep) % kStep;
  const at::Tensor x = missing == 0 ? given : at::constant_pad_nd(given, {0, missing});
  const int64_t blocks = (channels + kBlock - 1) / kBlock;
  TORCH_CHECK(weight.numel() == blocks * kBlock * x.size(1) && weight.is_contiguous() &&
                  weight.scalar_type() == at::kBFloat16,
              "bfloat16_linear: a weight of ", weight.numel(), " elements for ", channels, " x ", x.size(1));
  const Output out(x, channels, bias);
  multiply(Weight{weight.const_data_ptr<BFloat16>(), blocks},
           Rows{x.const_data_ptr<BFloat16>(), x.size(0), x.size(1)}, out);
  return out.tensor;
}

TORCH_LIBRARY_FRAGMENT(specinfer, m) {
  m.def("bfloat16_linear(Tensor x, Tensor weight, Tensor? bias, int channels) -> Tensor");
  m.impl("bfloat16_linear", c10::DispatchKey::CPU, TORCH_FN(specinfer::bfloat16_linear));
}
