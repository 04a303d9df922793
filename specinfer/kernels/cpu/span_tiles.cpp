// Products with GGUF blocks of 256 elements on tiles of the matrix unit, with the bits of register tiles
// (blocks_product.cpp).
//
// A span's sum is an integer, so its terms may be added in any order. Levels times their steps are weights of two bytes,
// a high and a low one, which have tiles of their own. So no sum is scaled before a span's end.

#include "block_rows.h"
#include "part_tree.h"
#include "tiles.h"

#if defined(SPECINFER_TILED)

namespace specinfer {
namespace {

constexpr int64_t kAhead = 8192;    // bytes between the current and the prefetched address
constexpr int kSteps = 4;           // of a span: 64 elements each, the weights of a tile
constexpr int64_t kMostRows = 128;  // whose totals are kept at a time

// A block's levels of a span, times their steps: 16 or 256 times `high`, and `low`.
struct Weights {
  alignas(64) uint8_t high[kSteps * kTileBytes], low[kSteps * kTileBytes];
};

// The sums of high and of low bytes of two tiles of rows.
struct Sums {
  alignas(64) uint8_t high[2 * kTileBytes], low[2 * kTileBytes];
};

struct Shorts {
  using Part = int16_t __attribute__((vector_size(kRegister)));
  using Bits = uint16_t __attribute__((vector_size(kRegister)));
  Part part[kParts];
};

// Writes 64 products, those of even and those of odd bytes, as high and low bytes.
[[gnu::always_inline]] inline void store_products(const Shorts& even, const Shorts& odd, uint8_t* high, uint8_t* low) {
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) {
    const auto e = (Shorts::Bits)even.part[i], o = (Shorts::Bits)odd.part[i];
    const Shorts::Bits upper = (e >> 8) | (o & 0xff00), lower = (e & 0xff) | o << 8;
    std::memcpy(high + i * kRegister, &upper, kRegister);
    std::memcpy(low + i * kRegister, &lower, kRegister);
  }
}

// Numbers of all channels in both halves of their words.
[[gnu::always_inline]] inline Shorts shorts_of(Ints numbers) {
  return std::bit_cast<Shorts>(in_pairs(numbers, numbers));
}

template <int Bits>
struct SpanTiles : BlockArrays {
  SpanTiles(const Product& product, const RowSpan* x, int64_t rows, const Output& out)
      : BlockArrays(product), x(x), rows(rows), spans(groups / kSpan), out(out) {}

  const RowSpan* x;
  int64_t rows, spans;
  const Output& out;

  static constexpr int kShift = Bits == 4 ? 4 : 8;  // of the sums of high bytes

  // `count` tiles of `height` rows each from `row` on, by a block. Beside each step of a pair of tiles, a part of the next
  // span's weights is unpacked, and a part of the last pair's sums is scaled: the matrix unit and vector registers work
  // at the same time, and no load waits for freshly written data.
  void multiply(int64_t row, int count, int height, int64_t block) const {
    Floats total[kMostRows];
    for (int r = 0; r < count * height; ++r) total[r] = Floats(0.0f);
    Weights weights;
    Sums sums[2];
    each<kSteps>([&](auto step) { unpack(block * spans, step, weights); });
    Scaled last;
    for (int64_t span = 0, turn = 0; span < spans; ++span) {
      for (int tile = 0; tile < count; tile += 2, ++turn) {
        const int tiles = std::min(2, count - tile), behind = tile + tiles;
        const RowSpan* const a = x + span * rows + row + tile * height;
        Sums& to = sums[turn % 2];
        const auto beside = [&](auto step) __attribute__((always_inline)) {
          if (behind == count && span + 1 < spans) unpack(block * spans + span + 1, step, weights);
          scale(last, step);
        };
        if (tiles == 2) {
          add<2>(a, height, weights, to, beside);
        } else {
          add<1>(a, height, weights, to, beside);
        }
        last = {block * spans + span, a, tiles * height, &to, total + tile * height};
      }
    }
    each<kSteps>([&](auto step) { scale(last, step); });
    for (int64_t r = row; r < std::min(row + count * height, rows); ++r) out.store(r, block, total[r - row]);
  }

 private:
  // Sums of `count` rows that will be added to their totals.
  struct Scaled {
    int64_t span = 0;
    const RowSpan* rows = nullptr;
    int count = 0;
    const Sums* sums = nullptr;
    Floats* total = nullptr;
  };

  // M tiles of rows times a span; calls beside(step) in each step.
  template <int M, typename F>
  [[gnu::always_inline]] static void add(const RowSpan* a, int height, const Weights& weights, Sums& to, const F& beside) {
    each<2 * M>([&](auto t) { tile_zero<t>(); });
    each<kSteps>([&](auto step) __attribute__((always_inline)) {
      tile_load<4>(weights.high + step * kTileBytes);
      tile_load<5>(weights.low + step * kTileBytes);
      each<M>([&](auto m) {
        tile_load<6 + m>(a[m * height].values + step * kRowBytes, sizeof(RowSpan));
        if constexpr (Bits == 4) {
          tile_add_int8<2 * m, 6 + m, 4>();
        } else {
          tile_add_signed<2 * m, 6 + m, 4>();
        }
        tile_add_int8<2 * m + 1, 6 + m, 5>();
      });
      beside(step);
    });
    each<M>([&](auto m) {
      tile_store<2 * m>(to.high + m * height * kRowBytes);
      tile_store<2 * m + 1>(to.low + m * height * kRowBytes);
    });
  }

  // Adds the sums of a part of the rows to their totals.
  [[gnu::always_inline]] void scale(const Scaled& of, int step) const {
    const int end = of.count * (step + 1) / kSteps;
    const Floats scale = load(scales + of.span * kBlock);
    const auto all_rows = [&](const auto& whole) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int r = of.count * step / kSteps; r < end; ++r) {
        const Words high = load_vector<uint32_t>(of.sums->high + r * kRowBytes) << kShift;
        const Ints sum = bits_as<int32_t>(high) + load_vector<int32_t>(of.sums->low + r * kRowBytes);
        of.total[r] = of.total[r] + whole(to_floats(sum) * scale, of.rows[r]) * of.rows[r].scale;
      }
    };
    if (mins == nullptr) return all_rows([](Floats scaled, const RowSpan&) { return scaled; });
    const MinPairs<Bits> pairs(min_steps + of.span * kSpan * kBlock, 0, kSpan);
    const Floats min = load(mins + of.span * kBlock);
    all_rows([&](Floats scaled, const RowSpan& row) __attribute__((always_inline)) {
      return scaled - to_floats(pairs.times(row.sums)) * min;
    });
  }

  // Two groups of a span, the weights of one step.
  [[gnu::always_inline]] void unpack(int64_t span, int step, Weights& to) const {
    for (int64_t i = 0; i < 2; ++i) {
      const int64_t group = span * kSpan + 2 * step + i;
      const uint8_t* const from = levels + group * (kGroup * kBlock * Bits / 8);
      const int64_t at = (2 * step + i) * (kTileBytes / 2);
#pragma GCC unroll 6
      for (int line = 0; line < Bits; ++line) __builtin_prefetch(from + kAhead + line * kRowBytes);
      if constexpr (Bits == 4) {
        unpack_fours(from, widened(steps + group * kBlock) - 128, to.high + at, to.low + at);
      } else {
        each<kHalves>([&](auto half) {
          const Ints factors = steps_at(steps + (kHalves * group + half) * kBlock);
          const int64_t there = at + half * (kTileBytes / 4);
          unpack_sixes(from + half * 32 * Bits, shorts_of(factors), shorts_of(factors * 32), to.high + there, to.low + there);
        });
      }
    }
  }

  // Levels below 16 times either half of a step, below 16, too: no product leaves its byte.
  [[gnu::always_inline]] static void unpack_fours(const uint8_t* from, Words step, uint8_t* high, uint8_t* low) {
    const Words factors = step | step << 16;
    const Shorts of_high = std::bit_cast<Shorts>(factors >> 4 & 0xf000f), of_low = std::bit_cast<Shorts>(factors & 0xf000f);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Bytes both = load_bytes(from + 64 * j);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 4
        for (int i = 0; i < kParts; ++i) {
          const auto levels = (Shorts::Part)((Bytes::Part)((Shorts::Bits)both.part[i] >> (4 * half)) & 15);
          const Shorts::Part products[] = {levels * of_high.part[i], levels * of_low.part[i]};
          std::memcpy(high + (2 * j + half) * kRowBytes + i * kRegister, &products[0], kRegister);
          std::memcpy(low + (2 * j + half) * kRowBytes + i * kRegister, &products[1], kRegister);
        }
      }
    }
  }

  // Levels have an offset of 32.
  [[gnu::always_inline]] static void unpack_sixes(const uint8_t* from, const Shorts& factors, const Shorts& offsets,
                                                  uint8_t* high, uint8_t* low) {
    Bytes four[4];
    load_sixes(from, four);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      Shorts even, odd;
#pragma GCC unroll 4
      for (int i = 0; i < kParts; ++i) {
        const auto v = (Shorts::Bits)four[j].part[i];
        even.part[i] = (Shorts::Part)(v & 255) * factors.part[i] - offsets.part[i];
        odd.part[i] = (Shorts::Part)(v >> 8) * factors.part[i] - offsets.part[i];
      }
      store_products(even, odd, high + j * kRowBytes, low + j * kRowBytes);
    }
  }
};

template <int Bits>
void multiply_with(const Product& product, const Rows& rows, const Output& out) {
  const int64_t tiles = (rows.count + kTileRows - 1) / kTileRows, height = (rows.count + tiles - 1) / tiles;
  const SpanTiles<Bits> of(product, quantized_rows<RowSpan>(product, rows, Bits, kTileRows), rows.count, out);
  share_blocks(out, blocks_of(product.channels), 1, of.groups * kGroup * kBlock * Bits / 8, [&](int64_t first, int64_t last) {
    const Tiles shapes(static_cast<int>(height));
    for (int64_t block = first; block < last; ++block) {
      for (int64_t tile = 0; tile < tiles; tile += kMostRows / kTileRows) {
        const int count = static_cast<int>(std::min(tiles - tile, kMostRows / kTileRows));
        of.multiply(tile * height, count, static_cast<int>(height), block);
      }
    }
  });
}

}  // namespace

void multiply_spans_on_tiles(const Product& product, const Rows& rows, const Output& out) {
  if (product.kind == Kind::kBlocks4) return multiply_with<4>(product, rows, out);
  multiply_with<6>(product, rows, out);
}

}  // namespace specinfer

#endif
