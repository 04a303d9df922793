// Products of rows with int8 and int4 weights; kernels/quantized.py says what the numbers mean.
//
// Weights lie in blocks of 16 output channels, so that one register holds the same inner elements of each:
// vpdpbusd then adds four products per channel at once, and a thread reads its share of the weights straight
// through. Sums are exact integers; what follows them is a fixed sequence of float operations, the same for
// every number of rows, with and without AVX-512, and in the PyTorch twins.
//
//   int8 weights  [blocks, inner/4, 16, 4]      w + 128 as unsigned: sum(w a) = sum((w + 128) a) - 128 sum(a)
//   int4 levels   [blocks, groups, 4, 16, 4]    two levels a byte: of eight elements the low halves have the
//                                               first four, the high halves the others
//   int4 scales   [blocks, groups, 16] half     a weight is scale * (level - zero / 16)
//   int4 zeros    [blocks, groups, 16]

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops.h"
#include "products.h"

#if defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define SPECINFER_VNNI 1
#endif

namespace {

using specinfer::BFloat16;
using specinfer::kBlock;
using specinfer::kThreadBytes;
using specinfer::Output;
using specinfer::prefetch;
using specinfer::Floats;
using specinfer::Words;
using Ints = int32_t __attribute__((vector_size(64)));
using Bytes = int8_t __attribute__((vector_size(16)));

constexpr int64_t kGroup = 32;  // inner elements with one int4 scale; inner sizes are padded to it
constexpr int64_t kGroupBytes = kBlock * kGroup / 2;

// ---- rows -> int8 ----

// What a product reads of x. int8: one scale a row, and -128 * sum(a), which makes up for the weights' offset.
// int4: per group a sixteenth of the scale, as sums come out 16 times too large, and -sum(a) for the zeros.
struct Rows {
  at::Tensor values, scales, sums;
  int64_t count, inner;

  Rows(int64_t count, int64_t inner, int64_t scales_per_row)
      : values(at::empty({count, inner}, at::kChar)),
        scales(at::empty({count, scales_per_row}, at::kFloat)),
        sums(at::empty({count, scales_per_row}, at::kInt)),
        count(count),
        inner(inner) {}
};

struct Group {
  Floats low, high;
};

template <typename T>
Group load_group(const T* x, int64_t n) {
  return {specinfer::load(x, n), specinfer::load(x + kBlock, std::max<int64_t>(0, n - kBlock))};
}

// Calls f(bit) for each bit of a lane's number, highest first.
template <typename F>
void for_each_bit(const F& f) {
  [&]<int... Bit>(std::integer_sequence<int, Bit...>) {
    (f(std::integral_constant<int, Bit>{}), ...);
  }(std::integer_sequence<int, 8, 4, 2, 1>{});
}

// Each lane's partner: the lane whose number differs from its own in that bit.
template <int Bit, typename V>
V partners(V v) {
  return [&]<size_t... Lane>(std::index_sequence<Lane...>) {
    return specinfer::shuffle<(Lane ^ Bit)...>(v, v);
  }(std::make_index_sequence<kBlock>{});
}

// x H for the 32 x 32 Hadamard matrix H of ones and minus ones.
Group rotate(Group x) {
  x = {x.low + x.high, x.low - x.high};
  constexpr Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for_each_bit([&](auto bit) {
    const Floats sign = (lanes & bit()) != 0 ? specinfer::broadcast(-1.0f) : specinfer::broadcast(1.0f);
    x.low = specinfer::fma(x.low, sign, partners<bit()>(x.low));
    x.high = specinfer::fma(x.high, sign, partners<bit()>(x.high));
  });
  return x;
}

// The larger of two absolute values by its bits, under which a NaN is largest: it reaches scale and output.
Words larger(Words most, Floats x) {
  const Words bits = std::bit_cast<Words>(x) & 0x7fffffff;
  return bits > most ? bits : most;
}

float largest(Words most) {
  for_each_bit([&](auto bit) {
    const Words other = partners<bit()>(most);
    most = other > most ? other : most;
  });
  return std::bit_cast<float>(most[0]);
}

int32_t sum(Ints v) {
  for_each_bit([&](auto bit) { v += partners<bit()>(v); });
  return v[0];
}

float inverse_of(float most) { return most < 1e-30f ? 0.0f : 127.0f / most; }

// Writes 16 quantized elements; adding 1.5 * 2^23 rounds to the nearest integer, ties to even.
Ints quantize_lanes(Floats x, float inverse, int8_t* out) {
  const Floats magic = specinfer::broadcast(12582912.0f);
  const Ints rounded = __builtin_convertvector((x * inverse + magic) - magic, Ints);
  const Bytes bytes = __builtin_convertvector(rounded, Bytes);
  std::memcpy(out, &bytes, sizeof bytes);
  return rounded;
}

Ints quantize_group(Group x, float inverse, int8_t* out) {
  return quantize_lanes(x.low, inverse, out) + quantize_lanes(x.high, inverse, out + kBlock);
}

template <typename T>
void quantize_turned(const T* x, int64_t n, int64_t inner, float* turned, int8_t* out, float* scale,
                     int32_t* offset) {
  Words bits = {};
  for (int64_t k = 0; k < inner; k += kGroup) {
    const Group group = rotate(load_group(x + k, n - k));
    bits = larger(larger(bits, group.low), group.high);
    specinfer::store(turned + k, group.low);
    specinfer::store(turned + k + kBlock, group.high);
  }
  const float most = largest(bits), inverse = inverse_of(most);
  Ints total = {};
  for (int64_t k = 0; k < inner; k += kGroup) {
    total += quantize_group(load_group(turned + k, kGroup), inverse, out + k);
  }
  *scale = most / 127.0f;
  *offset = -128 * sum(total);
}

template <typename T>
void quantize_groups(const T* x, int64_t n, int64_t inner, int8_t* out, float* scales, int32_t* sums) {
  for (int64_t k = 0; k < inner; k += kGroup) {
    const Group group = load_group(x + k, n - k);
    const float most = largest(larger(larger(Words{}, group.low), group.high));
    scales[k / kGroup] = most / (127.0f * 16.0f);
    sums[k / kGroup] = -sum(quantize_group(group, inverse_of(most), out + k));
  }
}

Rows quantize(const at::Tensor& x, bool by_groups) {
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous(), "x must be contiguous rows");
  const int64_t n = x.size(1), inner = (n + kGroup - 1) / kGroup * kGroup;
  const int64_t scales_per_row = by_groups ? inner / kGroup : 1;
  Rows rows(x.size(0), inner, scales_per_row);
  auto* values = rows.values.mutable_data_ptr<int8_t>();
  auto* scales = rows.scales.mutable_data_ptr<float>();
  auto* sums = rows.sums.mutable_data_ptr<int32_t>();
  const auto all = [&](const auto* from) {
    at::parallel_for(0, rows.count, kThreadBytes / inner + 1, [&](int64_t first, int64_t last) {
      std::vector<float> turned(by_groups ? 0 : inner);
      for (int64_t r = first; r < last; ++r) {
        const int64_t s = r * scales_per_row;
        if (by_groups) {
          quantize_groups(from + r * n, n, inner, values + r * inner, scales + s, sums + s);
        } else {
          quantize_turned(from + r * n, n, inner, turned.data(), values + r * inner, scales + s, sums + s);
        }
      }
    });
  };
  if (x.scalar_type() == at::kBFloat16) {
    all(x.const_data_ptr<BFloat16>());
  } else {
    TORCH_CHECK(x.scalar_type() == at::kFloat, "x must be bfloat16 or float32");
    all(x.const_data_ptr<float>());
  }
  return rows;
}

// ---- sixteen channels at a time ----

using Levels = uint8_t __attribute__((vector_size(64)));  // four elements of each channel

Levels load_levels(const uint8_t* from) {
  Levels levels;
  std::memcpy(&levels, from, sizeof levels);
  return levels;
}

// sums[c] += four elements of channel c times the four of `a`.
inline Ints add_products(Ints sums, Levels levels, const int8_t* a) {
#ifdef SPECINFER_VNNI
  int32_t four;
  std::memcpy(&four, a, 4);
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)levels, _mm512_set1_epi32(four));
#else
  for (int c = 0; c < kBlock; ++c) {
    for (int t = 0; t < 4; ++t) sums[c] += levels[4 * c + t] * a[t];
  }
  return sums;
#endif
}

inline Ints times_zeros(const uint8_t* zeros, int32_t sum) {
  Ints z;
  for (int c = 0; c < kBlock; ++c) z[c] = zeros[c];
#ifdef SPECINFER_VNNI
  // Both fit 16 bits, and multiplying those is one operation.
  return (Ints)_mm512_dpwssd_epi32(_mm512_setzero_si512(), (__m512i)z, _mm512_set1_epi32(sum));
#else
  return z * sum;
#endif
}

inline Floats load_halves(const c10::Half* from) {
#ifdef SPECINFER_VNNI
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
  Floats v;
  for (int c = 0; c < kBlock; ++c) v[c] = from[c];
  return v;
#endif
}

// ---- tiles: R rows by B blocks ----

struct Int8Weight {
  const uint8_t* values;
  const float* scales;  // [blocks, 16]
  int64_t blocks;

  static constexpr int kRows = 16;      // of one tile, of whose 32 registers most hold sums
  static constexpr int kPairRows = 12;  // of one tile of two blocks

  static int64_t block_bytes(int64_t inner) { return inner * kBlock; }

  // R rows from `row` on, B blocks from `block` on.
  template <int R, int B>
  void tile(const Rows& rows, const Output& out, int64_t row, int64_t block) const {
    const int64_t inner = rows.inner;
    const int8_t* a = rows.values.const_data_ptr<int8_t>() + row * inner;
    const uint8_t* from = values + block * inner * kBlock;
    Ints sums[R][B];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int b = 0; b < B; ++b) sums[r][b] = Ints{} + rows.sums.const_data_ptr<int32_t>()[row + r];
    }
    for (int64_t k = 0; k < inner; k += 4) {
      Levels levels[B];
#pragma GCC unroll 2
      for (int b = 0; b < B; ++b) {
        const uint8_t* four = from + (b * inner + k) * kBlock;
        prefetch(four);
        levels[b] = load_levels(four);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int b = 0; b < B; ++b) sums[r][b] = add_products(sums[r][b], levels[b], a + r * inner + k);
      }
    }
    for (int r = 0; r < R; ++r) {
      const float scale = rows.scales.const_data_ptr<float>()[row + r];
      for (int b = 0; b < B; ++b) {
        const Floats of_channels = specinfer::load(scales + (block + b) * kBlock);
        out.store(row + r, block + b, __builtin_convertvector(sums[r][b], Floats) * of_channels * scale);
      }
    }
  }
};

// Levels are taken 16 times too large, as the high halves of bytes are, and zeros are sixteenths of a level.
struct Int4Weight {
  const uint8_t* levels;
  const c10::Half* scales;
  const uint8_t* zeros;
  int64_t blocks;

  static constexpr int kRows = 12;  // each takes a register of integer sums and one of float sums
  static constexpr int kPairRows = 0;

  static int64_t block_bytes(int64_t inner) { return inner * kBlock / 2; }

  template <int R, int B>
    requires(B == 1)
  void tile(const Rows& rows, const Output& out, int64_t row, int64_t block) const {
    const int64_t inner = rows.inner, groups = inner / kGroup, first = block * groups;
    const int8_t* a = rows.values.const_data_ptr<int8_t>() + row * inner;
    const float* a_scales = rows.scales.const_data_ptr<float>() + row * groups;
    const int32_t* a_sums = rows.sums.const_data_ptr<int32_t>() + row * groups;
    Floats total[R] = {};
    for (int64_t g = 0; g < groups; ++g) {
      Ints sums[R];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sums[r] = times_zeros(zeros + (first + g) * kBlock, a_sums[r * groups + g]);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const uint8_t* eight = levels + (first + g) * kGroupBytes + 64 * j;
        prefetch(eight);
        const Levels both = load_levels(eight), low = both << 4, high = both & 0xf0;
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const int8_t* of_row = a + r * inner + g * kGroup + 8 * j;
          sums[r] = add_products(add_products(sums[r], low, of_row), high, of_row + 4);
        }
      }
      const Floats of_channels = load_halves(scales + (first + g) * kBlock);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        total[r] += __builtin_convertvector(sums[r], Floats) * (of_channels * a_scales[r * groups + g]);
      }
    }
    for (int r = 0; r < R; ++r) out.store(row + r, block, total[r]);
  }
};

// ---- ops ----

// What int8_linear does before and after its product, for where oneDNN makes the product.
std::tuple<at::Tensor, at::Tensor> int8_rows(const at::Tensor& x) {
  const Rows rows = quantize(x, false);
  return {rows.values, rows.scales};
}

// sums [rows, channels], row_scales [rows, 1] and scales [channels], all float32; in the dtype of `like`.
at::Tensor int8_outputs(const at::Tensor& sums, const at::Tensor& row_scales, const at::Tensor& scales,
                        const std::optional<at::Tensor>& bias, const at::Tensor& like) {
  const int64_t count = sums.size(0), channels = sums.size(1);
  TORCH_CHECK(sums.is_contiguous() && scales.numel() == channels && row_scales.numel() == count &&
                  like.size(0) == count,
              "int8_outputs: sums ", sums.sizes(), " for scales ", scales.sizes(), " and rows ", row_scales.sizes());
  const Output out(like, channels, bias);
  const float* from = sums.const_data_ptr<float>();
  const float* of_rows = row_scales.const_data_ptr<float>();
  const float* of_channels = scales.const_data_ptr<float>();
  at::parallel_for(0, count, kThreadBytes / channels + 1, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      for (int64_t c = 0; c < channels; c += kBlock) {
        const Floats y = specinfer::load(from + r * channels + c, channels - c);
        out.store(r, c / kBlock, y * specinfer::load(of_channels + c, channels - c) * of_rows[r]);
      }
    }
  });
  return out.tensor;
}

}  // namespace

// weight [blocks, inner/4, 16, 4] uint8, scales [blocks * 16] and bias [channels] float32.
at::Tensor specinfer::int8_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                                  const std::optional<at::Tensor>& bias, int64_t channels) {
  const Rows rows = quantize(x, false);
  const int64_t blocks = (channels + kBlock - 1) / kBlock;
  TORCH_CHECK(weight.numel() == blocks * kBlock * rows.inner && scales.numel() == blocks * kBlock,
              "int8_linear: a weight of ", weight.numel(), " elements for ", channels, " x ", rows.inner);
  const Output out(x, channels, bias);
  multiply(Int8Weight{weight.const_data_ptr<uint8_t>(), scales.const_data_ptr<float>(), blocks},
           rows, out);
  return out.tensor;
}

// levels [blocks, groups, 4, 16, 4] uint8, scales [blocks, groups, 16] half, zeros the same uint8.
at::Tensor specinfer::int4_linear(const at::Tensor& x, const at::Tensor& levels, const at::Tensor& scales,
                                  const at::Tensor& zeros, const std::optional<at::Tensor>& bias, int64_t channels) {
  const Rows rows = quantize(x, true);
  const int64_t blocks = (channels + kBlock - 1) / kBlock, groups = blocks * (rows.inner / kGroup);
  TORCH_CHECK(levels.numel() == groups * kGroupBytes && scales.numel() == groups * kBlock &&
                  zeros.numel() == groups * kBlock,
              "int4_linear: a weight of ", levels.numel(), " bytes for ", channels, " x ", rows.inner);
  const Output out(x, channels, bias);
  multiply(Int4Weight{levels.const_data_ptr<uint8_t>(), scales.const_data_ptr<c10::Half>(),
                      zeros.const_data_ptr<uint8_t>(), blocks},
           rows, out);
  return out.tensor;
}

TORCH_LIBRARY_FRAGMENT(specinfer, m) {
  m.def("int8_linear(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int channels) -> Tensor");
  m.impl("int8_linear", c10::DispatchKey::CPU, TORCH_FN(specinfer::int8_linear));
  m.def("int4_linear(Tensor x, Tensor levels, Tensor scales, Tensor zeros, Tensor? bias, int channels)"
        " -> Tensor");
  m.impl("int4_linear", c10::DispatchKey::CPU, TORCH_FN(specinfer::int4_linear));
  m.def("int8_rows(Tensor x) -> (Tensor, Tensor)");
  m.impl("int8_rows", c10::DispatchKey::CPU, TORCH_FN(int8_rows));
  m.def("int8_outputs(Tensor sums, Tensor row_scales, Tensor scales, Tensor? bias, Tensor like) -> Tensor");
  m.impl("int8_outputs", c10::DispatchKey::CPU, TORCH_FN(int8_outputs));
}
