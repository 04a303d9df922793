// Products with GGUF blocks in their own precision: levels of 4, 6 or 8 bits, whose scales are products themselves.
//
// Rows are quantized in groups of 32, as for int4. A group's products are added exactly and scaled by two float
// operations in a fixed order, so every CPU and the PyTorch twin (kernels/file_blocks.py) give the same bits.

#include "byte_products.h"
#include "register_tiles.h"
#include "scratch.h"

namespace specinfer {
namespace {

constexpr int kHalves = 2;  // per group; each may have its own step

// A group of a row as it is multiplied. A group's rows are neighbours, so that a tile addresses them all from one
// pointer: [groups, rows].
struct RowGroup {
  int8_t values[kGroup];
  float scale;              // a sixteenth for 4-bit levels, whose sums are 16 times too large
  float of_min;             // minus the sum of the group, times its scale
  int32_t offsets[kHalves];  // correct the offset of 6-bit and 8-bit levels
};

// Flat, since compilers leave some of its small functions out of line in a file of this size.
template <typename T>
[[gnu::flatten]] void quantize_row(const T* x, int64_t n, int64_t groups, int64_t rows, int bits, RowGroup* to) {
  for (int64_t g = 0; g < groups; ++g) {
    const GroupOf32 group = load_group(x + g * kGroup, n - g * kGroup);
    const float most = largest(larger(larger(Ints(0), group.low), group.high)), inverse = inverse_of(most);
    const Ints low = rounded(group.low * inverse), high = rounded(group.high * inverse);
    RowGroup& own = to[g * rows];
    store_bytes(own.values, low);
    store_bytes(own.values + kLanes, high);
    const int32_t first = sum(low), second = sum(high);
    const float scale = int8_scale(most);
    own.scale = bits == 4 ? scale * 0.0625f : scale;
    own.of_min = static_cast<float>(-(first + second)) * scale;
    own.offsets[0] = bits == 6 ? offset_of_sixes(first) : -128 * first;
    own.offsets[1] = bits == 6 ? offset_of_sixes(second) : -128 * second;
  }
}

const RowGroup* quantized(const Product& product, const Rows& rows, int64_t groups, int bits) {
  constexpr int64_t kPieceElements = 1 << 10;  // minimum work of a job
  auto* const to = Scratch::get().take<RowGroup>(rows.count * groups);
  const auto each_row = [&](const auto* x) {
    Pool::get().split(rows.count, kPieceElements / (groups * kGroup) + 1, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        quantize_row(x + r * product.inner, product.inner, groups, rows.count, bits, to + r);
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

inline Ints steps_at(const uint8_t* from) { return bits_as<int32_t>(widened(from)) - 128; }

// ---- tiles: R rows by B blocks ----

template <bool Nontemporal, bool Divided, int Bits>
struct BlocksWeight {
  const uint8_t* levels;
  const Half* scales;
  const uint8_t* steps;
  const Half* mins;
  const uint8_t* min_steps;
  int64_t span, spans;
  const RowGroup* x;
  int64_t rows, blocks, groups, block_bytes;
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
          add_groups(row, block, begin / kGroup, end / kGroup, to);
        });
  }

 private:
  template <int R>
  [[gnu::always_inline]] void add_groups(int64_t row, int64_t block, int64_t begin, int64_t end,
                                         TileResults<R, 1>& results) const {
    Floats total[R];
    each<R>([&](auto r) { total[r] = Floats(0.0f); });
    int64_t of_span = begin / span;
    for (int64_t g = begin; g < end; ++of_span) {
      const int64_t at_span = (block * spans + of_span) * kBlock, last = std::min(end, (of_span + 1) * span);
      const Floats scale = load(scales + at_span), min = mins == nullptr ? Floats(0.0f) : load(mins + at_span);
      for (; g < last; ++g) {
        const int64_t group = block * groups + g;
        const RowGroup* const of_rows = x + g * rows + row;
        Ints sums[R];
        Floats of_channels = scale;
        if constexpr (Bits == 4) {
          add_levels(of_rows, group, sums);
          if (steps != nullptr) of_channels = of_channels * to_floats(steps_at(steps + group * kBlock));
        } else {
          add_values(of_rows, group, sums);
        }
        each<R>([&](auto r) {
          total[r] = total[r] + to_floats(sums[r]) * (of_channels * of_rows[r].scale);
        });
        if (mins != nullptr) {
          const Floats least = min * to_floats(bits_as<int32_t>(widened(min_steps + group * kBlock)));
          each<R>([&](auto r) { total[r] = total[r] + least * of_rows[r].of_min; });
        }
      }
    }
    each<R>([&](auto r) { results.of[r][0] = total[r]; });
  }

  // 16 times the sums of a group of 4-bit levels.
  template <int R>
  [[gnu::always_inline]] void add_levels(const RowGroup* of_rows, int64_t group, Ints (&sums)[R]) const {
    GroupSum products[R];
    each<4>([&](auto j) {
      const uint8_t* const from = levels + group * kGroupBytes + 64 * j;
      prefetch<Nontemporal>(from);
      const Bytes both = load_bytes(from), low = low_halves(both), high = high_halves(both);
      each<R>([&](auto r) { products[r].add(low, high, of_rows[r].values + 8 * j); });
    });
    each<R>([&](auto r) { sums[r] = products[r].sums(); });
  }

  // The sums of a group of 6-bit or 8-bit levels, each half times its step.
  template <int R>
  [[gnu::always_inline]] void add_values(const RowGroup* of_rows, int64_t group, Ints (&sums)[R]) const {
    each<kHalves>([&](auto half) {
      const Ints step = steps == nullptr ? Ints(1) : steps_at(steps + (kHalves * group + half) * kBlock);
      const Ints factors = in_pairs(step);
      Ints own[R];
      const uint8_t* const from = levels + (kHalves * group + half) * 32 * Bits;
      each<Bits / 2>([&](auto j) { prefetch<Nontemporal>(from + 64 * j); });
      if constexpr (Bits == 6) {
        each<R>([&](auto r) { own[r] = offsets_of_sixes(of_rows[r].offsets[half], factors); });
        Bytes four[4];
        load_sixes(from, four);
        each<2>([&](auto j) {
          each<R>([&](auto r) {
            const int8_t* const values = of_rows[r].values + 16 * half + 8 * j;
            own[r] = add_sixes(own[r], four[2 * j], four[2 * j + 1], values, factors);
          });
        });
      } else {
        each<R>([&](auto r) { own[r] = Ints(kOffset ? of_rows[r].offsets[half] : 0); });
        each<4>([&](auto j) {
          const Bytes four = multiplicand(load_bytes(from + 64 * j));
          each<R>([&](auto r) { own[r] = add_products(own[r], four, of_rows[r].values + 16 * half + 4 * j, factors); });
        });
      }
      if (steps != nullptr && !kTakesFactors) each<R>([&](auto r) { own[r] = own[r] * step; });
      each<R>([&](auto r) { sums[r] = half == 0 ? own[r] : sums[r] + own[r]; });
    });
  }
};

template <int Bits>
void multiply_with(const Product& product, const Rows& rows, const Output& out) {
  const int64_t groups = padded_inner(product.kind, product.inner) / kGroup, span = product.blocks.span;
  const RowGroup* const x = quantized(product, rows, groups, Bits);
  const Division division(product, rows);
  by_division(product, division, [&](auto nontemporal, auto divided) {
    multiply_in_registers(BlocksWeight<nontemporal, divided, Bits>{
        static_cast<const uint8_t*>(product.weight), static_cast<const Half*>(product.scales),
        static_cast<const uint8_t*>(product.blocks.steps), static_cast<const Half*>(product.blocks.mins),
        static_cast<const uint8_t*>(product.blocks.min_steps), span, (groups + span - 1) / span, x, rows.count,
        blocks_of(product.channels), groups, groups * kGroup * kBlock * Bits / 8, division, out});
  });
}

}  // namespace

void multiply_blocks(const Product& product, const Rows& rows, const Output& out) {
  switch (product.kind) {
    case Kind::kBlocks4: return multiply_with<4>(product, rows, out);
    case Kind::kBlocks6: return multiply_with<6>(product, rows, out);
    default: return multiply_with<8>(product, rows, out);
  }
}

}  // namespace specinfer
