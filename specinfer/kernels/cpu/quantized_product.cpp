// Products with int8 and int4 weights in vector registers.

#include "byte_products.h"
#include "register_tiles.h"
#include "scratch.h"

namespace specinfer {
namespace {

#if !defined(SPECINFER_TILED)  // otherwise tiles do that

template <bool Nontemporal>
struct Int8Weight {
  const uint8_t* weights;
  const int8_t* values;  // [rows, inner]
  const float* row_scales;
  const int32_t* offsets;
  int64_t rows, blocks, inner, block_bytes;
  const Output& out;

  // Most registers hold sums.
  static constexpr int kRows = kRegister == 64 ? 16 : kRegister == 32 ? 4 : 6;
  static constexpr int kPairRows = kRegister == 64 ? 12 : 0;

  template <int R, int B>
  void tile(int64_t row, int64_t block) const {
    const int8_t* const a = values + row * inner;
    const uint8_t* const from = weights + block * block_bytes;
    Ints sums[R][B];
    each<R>([&](auto r) { each<B>([&](auto b) { sums[r][b] = Ints(kOffset ? offsets[row + r] : 0); }); });
    for (int64_t k = 0; k < inner; k += 4) {
      Bytes four[B];
      each<B>([&](auto b) {
        const uint8_t* const at = from + b * block_bytes + k * kBlock;
        prefetch<Nontemporal>(at);
        four[b] = multiplicand(load_bytes(at));
      });
      each<R>([&](auto r) {
        each<B>([&](auto b) { sums[r][b] = add_products(sums[r][b], four[b], a + r * inner + k); });
      });
    }
    TileResults<R, B, Ints> results;
    each<R>([&](auto r) { each<B>([&](auto b) { results.of[r][b] = sums[r][b]; }); });
    results.store(out, row, block, row_scales);
  }
};

#endif

template <bool Nontemporal, bool Divided>
struct Int4Weight {
  const uint8_t* levels;
  const Half* scales;
  const uint8_t* zeros;
  const int8_t* values;     // [rows, inner]
  const float* row_scales;  // [rows, groups]
  const int32_t* row_sums;
  int64_t rows, blocks, groups, block_bytes;
  const Division& division;
  const Output& out;

#if defined(SPECINFER_TILED)
  static constexpr int kRows = kFewRows;
#else
  static constexpr int kRows = kRegister == 64 ? 12 : kRegister == 32 ? 2 : 4;
#endif
  static constexpr int kPairRows = 0;

  template <int R, int B>
  void tile(int64_t row, int64_t block) const {
    static_assert(B == 1);
    add_tile<R, 1, Divided>(
        division, out, row, block,
        [&](TileResults<R, 1>& to, int64_t begin, int64_t end) __attribute__((always_inline)) {
          add_groups(row, block, begin / kGroup, end / kGroup, to);
        });
  }

 private:
  template <int R>
  [[gnu::always_inline]] void add_groups(int64_t row, int64_t block, int64_t begin, int64_t end,
                                         TileResults<R, 1>& results) const {
    const int8_t* const a = values + row * groups * kGroup;
    const float* const a_scales = row_scales + row * groups;
    const int32_t* const a_sums = row_sums + row * groups;
    Floats total[R];
    each<R>([&](auto r) { total[r] = Floats(0.0f); });
    for (int64_t g = begin; g < end; ++g) {
      const int64_t group = block * groups + g;
      GroupSum sums[R];
      each<4>([&](auto j) {
        const uint8_t* const at = levels + group * kGroupBytes + 64 * j;
        prefetch<Nontemporal>(at);
        const Bytes both = load_bytes(at), low = low_halves(both), high = high_halves(both);
        each<R>([&](auto r) { sums[r].add(low, high, a + (r * groups + g) * kGroup + 8 * j); });
      });
      const Ints of_zeros = bits_as<int32_t>(widened(zeros + group * kBlock));
      const Floats of_channels = load(scales + group * kBlock);
      each<R>([&](auto r) {
        const int64_t at = r * groups + g;
        total[r] = total[r] + to_floats(sums[r].with(of_zeros, a_sums[at])) * (of_channels * a_scales[at]);
      });
    }
    each<R>([&](auto r) { results.of[r][0] = total[r]; });
  }
};

}  // namespace

#if !defined(SPECINFER_TILED)
void multiply_int8(const Product& product, const Rows& rows, const Output& out) {
  const int64_t inner = padded_inner(product.kind, product.inner), groups = inner / kGroup;
  Scratch& scratch = Scratch::get();
  const StraightRows place{scratch.take<int8_t>(rows.count * inner), groups};
  auto* const scales = scratch.take<float>(rows.count);
  auto* const offsets = scratch.take<int32_t>(rows.count);
  quantize<Kind::kInt8>(product, rows, groups, place, scales, offsets);
  by_temporality(product, [&](auto nontemporal) {
    multiply_in_registers(Int8Weight<nontemporal>{static_cast<const uint8_t*>(product.weight), place.to, scales,
                                                  offsets, rows.count, blocks_of(product.channels), inner,
                                                  inner * kBlock, out});
  });
}
#endif

void multiply_int4(const Product& product, const Rows& rows, const Output& out) {
  const int64_t groups = padded_inner(product.kind, product.inner) / kGroup;
  Scratch& scratch = Scratch::get();
  const StraightRows place{scratch.take<int8_t>(rows.count * groups * kGroup), groups};
  auto* const scales = scratch.take<float>(rows.count * groups);
  auto* const sums = scratch.take<int32_t>(rows.count * groups);
  quantize<Kind::kInt4>(product, rows, groups, place, scales, sums);
  const Division division(product, rows);
  by_division(product, division, [&](auto nontemporal, auto divided) {
    multiply_in_registers(Int4Weight<nontemporal, divided>{static_cast<const uint8_t*>(product.weight),
                                                           static_cast<const Half*>(product.scales),
                                                           static_cast<const uint8_t*>(product.zeros), place.to,
                                                           scales, sums, rows.count, blocks_of(product.channels),
                                                           groups, groups * kGroupBytes, division, out});
  });
}

}  // namespace specinfer
