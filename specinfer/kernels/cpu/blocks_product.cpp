// Products with GGUF blocks in their own precision: levels of 4, 6 or 8 bits, whose scales are products themselves.
//
// Products are added exactly within a group, or within a span of groups (block_rows.h), and scaled by float operations in
// a fixed order, so every CPU and the PyTorch twin (kernels/quantized.py) give the same bits.

#include "block_rows.h"
#include "register_tiles.h"

namespace specinfer {
namespace {

#if defined(SPECINFER_TILED)
// Rows of spans from which on tiles take less time than registers, on an Emerald Rapids Xeon.
constexpr int64_t kTiledFours = 7, kTiledSixes = 9;
#endif

template <bool Nontemporal, bool Divided, int Bits, typename Row>
struct BlocksWeight : BlockArrays {
  BlocksWeight(const Product& product, const Row* x, int64_t rows, const Division& division, const Output& out)
      : BlockArrays(product),
        x(x),
        rows(rows),
        blocks(blocks_of(product.channels)),
        block_bytes(groups * kGroup * kBlock * Bits / 8),
        division(division),
        out(out) {}

  const Row* x;
  int64_t rows, blocks, block_bytes;
  const Division& division;
  const Output& out;

  static constexpr int kRows = kRegister == 64 ? 8 : 2;
  static constexpr int kPairRows = 0;

  template <int R, int B>
  void tile(int64_t row, int64_t block) const {
    static_assert(B == 1);
    add_tile<R, 1, Divided>(
        division, out, row, block,
        [&](TileResults<R, 1>& to, int64_t begin, int64_t end) __attribute__((always_inline)) {
          Floats total[R];
          each<R>([&](auto r) { total[r] = Floats(0.0f); });
          add<R>(row, block, begin / kGroup, end / kGroup, total);
          each<R>([&](auto r) { to.of[r][0] = total[r]; });
        });
  }

 private:
  template <int R>
  [[gnu::always_inline]] void add(int64_t row, int64_t block, int64_t begin, int64_t end, Floats (&total)[R]) const {
    if constexpr (Row::kGroups == 1) {
      for (int64_t g = begin; g < end; ++g) add_group(x + g * rows + row, block * groups + g, total);
    } else {
      for (int64_t g = begin; g < end; g += kSpan - g % kSpan) {
        const int64_t span = g / kSpan, first = span * kSpan;
        add_span(x + span * rows + row, block * groups + first, g - first, std::min(end - first, int64_t{kSpan}), total);
      }
    }
  }

  // A group with a scale of its own.
  template <int R>
  [[gnu::always_inline]] void add_group(const RowGroup* of_rows, int64_t group, Floats (&total)[R]) const {
    Floats of_channels = load(scales + group * kBlock);
    Ints sums[R];
    if constexpr (Bits == 4) {
      GroupSum products[R];
      add_levels(group, [&](int r, int at) { return of_rows[r].values + at; }, products);
      each<R>([&](auto r) { sums[r] = products[r].sums(); });
      if (steps != nullptr) of_channels = of_channels * to_floats(steps_at(steps + group * kBlock));
    } else {
      each<R>([&](auto r) { sums[r] = 0; });
      each<kHalves>([&](auto half) {
        const Ints factors = factors_of(steps == nullptr ? Ints(1) : steps_at(steps + (kHalves * group + half) * kBlock));
        Ints own[R];
        each<R>([&](auto r) {
          own[r] = Bits == 6 ? offsets_of_sixes(of_rows[r].offsets[half], factors)
                             : Ints(kOffset ? of_rows[r].offsets[half] : 0);
        });
        add_values(group, half, factors, [&](int r, int at) { return of_rows[r].values + at; }, own);
        if (steps != nullptr && !kTakesFactors) each<R>([&](auto r) { own[r] = own[r] * factors; });
        each<R>([&](auto r) { sums[r] = half == 0 ? own[r] : sums[r] + own[r]; });
      });
    }
    each<R>([&](auto r) { total[r] = total[r] + to_floats(sums[r]) * (of_channels * of_rows[r].scale); });
    if (mins != nullptr) {
      const Ints min_step = bits_as<int32_t>(widened(min_steps + group * kBlock));
      const Floats least = load(mins + group * kBlock) * to_floats(min_step);
      each<R>([&](auto r) { total[r] = total[r] + least * of_rows[r].of_min; });
    }
  }

  // Groups begin .. end - 1 of a span, whose first group is given.
  template <int R>
  [[gnu::always_inline]] void add_span(const RowSpan* of_rows, int64_t first, int64_t begin, int64_t end,
                                       Floats (&total)[R]) const {
    Ints sums[R];
    each<R>([&](auto r) { sums[r] = 0; });
    for (int64_t g = begin; g < end; ++g) {
      const int64_t group = first + g;
      const auto values = [&](int r, int at) { return of_rows[r].values + g * kGroup + at; };
      if constexpr (Bits == 4) {
        GroupSum products[R];
        add_levels(group, values, products);
        const Ints factors = factors_of(steps_at(steps + group * kBlock));
        each<R>([&](auto r) { sums[r] = sums[r] + products[r].times(factors); });
      } else {
        Ints of_halves[kHalves];
        each<kHalves>([&](auto half) {
          of_halves[half] = steps_at(steps + (kHalves * group + half) * kBlock);
          const Ints factors = factors_of(of_halves[half]);
          if constexpr (kTakesFactors) {
            add_values(group, half, factors, values, sums);
          } else {
            Ints own[R];
            each<R>([&](auto r) { own[r] = 0; });
            add_values(group, half, factors, values, own);
            each<R>([&](auto r) { sums[r] = sums[r] + own[r] * factors; });
          }
        });
        const Ints offsets = in_pairs(of_halves[0] * -32, of_halves[1] * -32);
        each<R>([&](auto r) { sums[r] = add_pairs(sums[r], offsets, of_rows[r].sums[g]); });
      }
    }
    const int64_t at = first / kSpan * kBlock;
    Floats scale = load(scales + at);
    if constexpr (Bits == 4) scale = scale * (1.0f / kTimes);
    if (mins == nullptr) {
      each<R>([&](auto r) { total[r] = total[r] + to_floats(sums[r]) * scale * of_rows[r].scale; });
    } else {
      const MinPairs<Bits> pairs(min_steps + first * kBlock, begin, end);
      const Floats min = load(mins + at);
      each<R>([&](auto r) {
        const Floats whole = to_floats(sums[r]) * scale - to_floats(pairs.times(of_rows[r].sums)) * min;
        total[r] = total[r] + whole * of_rows[r].scale;
      });
    }
  }

  // Adds a group of 4-bit levels; values(r, i) are those of a row from the group's element i on.
  template <int R, typename Values>
  [[gnu::always_inline]] void add_levels(int64_t group, const Values& values, GroupSum (&products)[R]) const {
    each<4>([&](auto j) {
      const uint8_t* const from = levels + group * kGroupBytes + 64 * j;
      prefetch<Nontemporal>(from);
      const Bytes both = load_bytes(from), low = low_halves(both), high = high_halves(both);
      each<R>([&](auto r) { products[r].add(low, high, values(r, 8 * j)); });
    });
  }

  // Adds half a group of 6-bit or 8-bit levels, without their offset if that is not subtracted from the levels.
  template <int R, typename Values>
  [[gnu::always_inline]] void add_values(int64_t group, int half, Ints factors, const Values& values,
                                         Ints (&own)[R]) const {
    const uint8_t* const from = levels + (kHalves * group + half) * 32 * Bits;
    each<Bits / 2>([&](auto j) { prefetch<Nontemporal>(from + 64 * j); });
    if constexpr (Bits == 6) {
      Bytes four[4];
      load_sixes(from, four);
      each<2>([&](auto j) {
        each<R>([&](auto r) {
          own[r] = add_sixes(own[r], four[2 * j], four[2 * j + 1], values(r, 16 * half + 8 * j), factors);
        });
      });
    } else {
      each<4>([&](auto j) {
        const Bytes four = multiplicand(load_bytes(from + 64 * j));
        each<R>([&](auto r) { own[r] = add_products(own[r], four, values(r, 16 * half + 4 * j), factors); });
      });
    }
  }
};

template <int Bits, typename Row>
void multiply_with(const Product& product, const Rows& rows, const Output& out) {
  const Division division(product, rows);
  const Row* const x = quantized_rows<Row>(product, rows, Bits);
  by_division(product, division, [&](auto nontemporal, auto divided) {
    multiply_in_registers(BlocksWeight<nontemporal, divided, Bits, Row>(product, x, rows.count, division, out));
  });
}

}  // namespace

void multiply_blocks(const Product& product, const Rows& rows, const Output& out) {
  const bool spans = product.blocks.span == kSpan;
#if defined(SPECINFER_TILED)
  const int64_t enough = product.kind == Kind::kBlocks4 ? kTiledFours : kTiledSixes;
  if (spans && rows.count >= enough && !Division(product, rows).divided()) {
    return multiply_spans_on_tiles(product, rows, out);
  }
#endif
  switch (product.kind) {
    case Kind::kBlocks4:
      return spans ? multiply_with<4, RowSpan>(product, rows, out) : multiply_with<4, RowGroup>(product, rows, out);
    case Kind::kBlocks6:
      return spans ? multiply_with<6, RowSpan>(product, rows, out) : multiply_with<6, RowGroup>(product, rows, out);
    default: return multiply_with<8, RowGroup>(product, rows, out);
  }
}

}  // namespace specinfer
