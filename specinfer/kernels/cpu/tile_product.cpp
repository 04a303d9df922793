// Products with bfloat16, int8 and int4 weights on tiles of the matrix unit.
//
// Rows are stored as tiles of equal height: [steps, tiles, height, 64 bytes]. A step is the part of the inner dimension
// in one tile: 32 bfloat16, or 64 int8. int4 weights are converted to bfloat16 (int4_tiles.h), and their rows stay
// bfloat16: sums of bfloat16 need no scaling per group, as sums of integers would.

#include "int4_tiles.h"
#include "part_tree.h"
#include "quantized_rows.h"
#include "scratch.h"

#if defined(SPECINFER_TILED)

namespace specinfer {
namespace {

constexpr int64_t kAhead = 8192;  // bytes between the current and the prefetched address
constexpr int kMostTiles = 4;     // that hold sums

// ---- rows as tiles ----

struct TileRows {
  int64_t count, steps, tiles, height;
  uint8_t* data;

  TileRows(int64_t count, int64_t steps)
      : count(count),
        steps(steps),
        tiles((count + kTileRows - 1) / kTileRows),
        height((count + tiles - 1) / tiles),
        data(Scratch::get().take<uint8_t>(steps * tiles * height * kRowBytes)) {}

  int64_t tile_bytes() const { return height * kRowBytes; }
  int64_t step_bytes() const { return tiles * tile_bytes(); }
  // The row in the first step; other steps are step_bytes() apart.
  uint8_t* row(int64_t row) const { return data + row / height * tile_bytes() + row % height * kRowBytes; }
};

// Destination of quantized values (quantized_rows.h).
struct Int8Row {
  int8_t* to;
  int64_t step_bytes;

  int8_t* values(int64_t group) const { return to + group / 2 * step_bytes + group % 2 * kGroup; }
};

struct Int8Place {
  const TileRows& rows;

  Int8Row operator()(int64_t row) const { return {reinterpret_cast<int8_t*>(rows.row(row)), rows.step_bytes()}; }
};

void lay_out(const Product& product, const Rows& rows, const TileRows& to) {
  const int64_t bytes = product.inner * static_cast<int64_t>(sizeof(BFloat16));
  Pool::get().split(rows.count, kPieceBytes / bytes + 1, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      const char* from = static_cast<const char*>(rows.data) + r * bytes;
      uint8_t* at = to.row(r);
      int64_t rest = bytes;
      for (; rest >= kRowBytes; rest -= kRowBytes, from += kRowBytes, at += to.step_bytes()) {
        std::memcpy(at, from, kRowBytes);
      }
      if (rest == 0) continue;
      std::memcpy(at, from, rest);
      std::memset(at + rest, 0, kRowBytes - rest);
    }
  });
}

// ---- sums of tiles ----

struct OfBFloat16 {
  template <int C, int A, int B>
  static void add() {
    tile_add_bfloat16<C, A, B>();
  }
};

struct OfInt8 {
  template <int C, int A, int B>
  static void add() {
    tile_add_int8<C, A, B>();
  }
};

// The sums of N tiles.
template <int N>
struct TileSums {
  alignas(64) uint8_t tiles[N * kTileBytes];

  const uint8_t* row(int tile, int64_t row) const { return tiles + tile * kTileBytes + row * kRowBytes; }
  void operator*=(float factor) {
    for (uint8_t* at = tiles; at < tiles + sizeof tiles; at += kRowBytes) {
      store_vector(at, load_vector<float>(at) * Floats(factor));
    }
  }
  void operator+=(const TileSums& other) {
    for (size_t at = 0; at < sizeof tiles; at += kRowBytes) {
      store_vector(tiles + at, load_vector<float>(tiles + at) + load_vector<float>(other.tiles + at));
    }
  }
};

// M tiles of rows by B blocks, for the steps from `begin` to `end` of the inner dimension; sums [M, B] tiles. Each
// block is a separate stream, since several streams reach a higher bandwidth than one. With `First` the following
// weights are prefetched.
template <typename Of, int M, int B, bool First>
void add_steps(const TileRows& rows, int64_t tile, const uint8_t* weights, int64_t block_bytes, int64_t begin,
               int64_t end, uint8_t* sums) {
  constexpr int kLines = kTileRows / M;  // prefetched at a time
  const int64_t a_step = rows.step_bytes(), a_tile = rows.tile_bytes();
  const uint8_t* a = rows.data + tile * a_tile + begin * a_step;
  // At a block's end its stream continues in the block B blocks later.
  const uint8_t* const turning = weights + block_bytes - kAhead;
  weights += begin * kTileBytes;
  each<M * B>([&](auto t) { tile_zero<t>(); });
  for (int64_t step = begin; step < end; ++step, a += a_step, weights += kTileBytes) {
    const uint8_t* const ahead = weights + kAhead + (weights < turning ? 0 : (B - 1) * block_bytes);
    if constexpr (M <= 2) each<M>([&](auto m) { tile_load<6 + m>(a + m * a_tile); });
    each<B>([&](auto b) {
      tile_load<4 + b % 2>(weights + b * block_bytes);
      each<M>([&](auto m) {
        if constexpr (M > 2) tile_load<6 + m % 2>(a + m * a_tile);
        if constexpr (First) {
          const uint8_t* const lines = ahead + b * block_bytes + m * kLines * kRowBytes;
          each<kLines>([&](auto line) { __builtin_prefetch(lines + line * kRowBytes); });
        }
        Of::template add<m * B + b, 6 + m % 2, 4 + b % 2>();
      });
    });
  }
  each<M * B>([&](auto t) { tile_store<t>(sums + t * kTileBytes); });
}

// Calls store(branch, row, block, its sums) for M tiles of rows by B blocks.
template <int M, int B, typename Store>
void store_rows(const TileRows& rows, int64_t tile, int64_t block, int branch, const TileSums<M * B>& sums,
                const Store& store) {
  each<M>([&](auto m) {
    const int64_t first = (tile + m) * rows.height, last = std::min(first + rows.height, rows.count);
    for (int64_t r = first; r < last; ++r) {
      each<B>([&](auto b) { store(branch, r, block + b, sums.row(m * B + b, r - first)); });
    }
  });
}

template <typename Of, int M, int B, typename Store>
void tiles_by_blocks(const TileRows& rows, const Division& division, const uint8_t* weights, int64_t block_bytes,
                     int64_t tile, int64_t block, const Store& store) {
  using Sums = TileSums<M * B>;
  const auto add = tile == 0 ? add_steps<Of, M, B, true> : add_steps<Of, M, B, false>;
  const int64_t of_step = division.inner / rows.steps;  // inner elements per step
  const auto sum = [&](Sums& to, int64_t begin, int64_t end) {
    add(rows, tile, weights + block * block_bytes, block_bytes, begin / of_step, end / of_step, to.tiles);
  };
  const auto store_all = [&](int branch, const Sums& sums) {
    store_rows<M, B>(rows, tile, block, branch, sums, store);
  };
  if (division.divided()) return add_parts<Sums>(division, sum, store_all);
  Sums sums;
  sum(sums, 0, division.inner);
  store_all(0, sums);
}

// Calls f(M, tile) for all tiles of rows, up to kMost at a time.
template <int kMost, typename F>
void by_turns(const TileRows& rows, const F& f) {
  int64_t tile = 0;
  for (; tile + kMost <= rows.tiles; tile += kMost) f(std::integral_constant<int, kMost>{}, tile);
  each<kMost - 1>([&](auto m) {
    if (rows.tiles - tile == m + 1) f(std::integral_constant<int, m + 1>{}, tile);
  });
}

// All rows by B blocks.
template <typename Of, int B, typename Store>
void all_rows(const TileRows& rows, const Division& division, const uint8_t* weights, int64_t block_bytes,
              int64_t block, const Store& store) {
  by_turns<kMostTiles / B>(rows, [&](auto m, int64_t tile) {
    tiles_by_blocks<Of, m, B>(rows, division, weights, block_bytes, tile, block, store);
  });
}

// All rows by all blocks, with tiles of the rows' shape. There are four tiles for sums: a single tile of rows takes
// four blocks at a time, two take two; more take one, so that weights are read once.
template <typename Of, typename Store>
void multiply_on_tiles(const Product& product, const TileRows& rows, const Division& division, const Output& out,
                       const Store& store) {
  const auto* const weights = static_cast<const uint8_t*>(product.weight);
  const int64_t bytes = rows.steps * kTileBytes;
  share_blocks(out, blocks_of(product.channels), 1, bytes, [&](int64_t block, int64_t last) {
    const Tiles tiles(static_cast<int>(rows.height));
    if (rows.tiles == 1) {
      for (; block + 4 <= last; block += 4) all_rows<Of, 4>(rows, division, weights, bytes, block, store);
    }
    if (rows.tiles <= 2) {
      for (; block + 2 <= last; block += 2) all_rows<Of, 2>(rows, division, weights, bytes, block, store);
    }
    for (; block < last; ++block) all_rows<Of, 1>(rows, division, weights, bytes, block, store);
  });
}

void multiply_bfloat16(const Product& product, const Rows& given, const Output& out) {
  const int64_t steps = padded_inner(product.kind, product.inner) / 32;
  const TileRows rows(given.count, steps);
  lay_out(product, given, rows);
  const Division division(product, given);
  const auto store = [&](int branch, int64_t row, int64_t block, const uint8_t* sums) {
    out.store_branch(branch, row, block, load_vector<float>(sums));
  };
  multiply_on_tiles<OfBFloat16>(product, rows, division, out, store);
}

void multiply_int8_tiles(const Product& product, const Rows& given, const Output& out) {
  const int64_t steps = padded_inner(product.kind, product.inner) / 64;
  const TileRows rows(given.count, steps);
  auto* const scales = Scratch::get().take<float>(given.count);
  auto* const offsets = Scratch::get().take<int32_t>(given.count);
  quantize<Kind::kInt8>(product, given, 2 * steps, Int8Place{rows}, scales, offsets);
  const Division division(product, given);
  const auto store = [&](int, int64_t row, int64_t block, const uint8_t* sums) {
    out.store(row, block, load_vector<int32_t>(sums) + offsets[row], scales[row]);
  };
  multiply_on_tiles<OfInt8>(product, rows, division, out, store);
}

// ---- int4 ----

// Steps of zeros for a part of `groups` groups.
int64_t zero_steps(int64_t groups) { return (groups + kTileRows - 1) / kTileRows; }

// Calls f(first group, end, first step of zeros) for all parts; returns the number of steps.
template <typename F>
int64_t each_part(const Division& division, const F& f) {
  int64_t step = division.inner / kGroup;
  for (int64_t p = 0, begin = 0; p < division.count; ++p) {
    const int64_t end = division.end(p) / kGroup;
    f(begin, end, step);
    step += zero_steps(end - begin);
    begin = end;
  }
  return step;
}

// The rows, and after them the factors of the zeros: a step for every 16 groups of a part.
void lay_out_int4(const Product& product, const Rows& rows, const Division& division, const TileRows& to) {
  const int64_t groups = division.inner / kGroup;
  const auto all = [&](const auto* x) {
    Pool::get().split(rows.count, kPieceBytes / (groups * kRowBytes) + 1, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        const auto* const from = x + r * product.inner;
        uint8_t* const at = to.row(r);
        for (int64_t t = groups; t < to.steps; ++t) std::memset(at + t * to.step_bytes(), 0, kRowBytes);
        each_part(division, [&](int64_t begin, int64_t end, int64_t step) {
          for (int64_t g = begin; g < end; ++g) {
            const GroupOf32 group = load_group(from + g * kGroup, product.inner - g * kGroup);
            const int64_t own = g - begin;
            uint8_t* const of_zeros = at + (step + own / kTileRows) * to.step_bytes() + own % kTileRows * kSumBytes;
            store_int4_row(group, at + g * to.step_bytes(), of_zeros);
          }
        });
      }
    });
  };
  if (rows.type == Type::kBFloat16) {
    all(static_cast<const BFloat16*>(rows.data));
  } else {
    all(static_cast<const float*>(rows.data));
  }
}

// M tiles of rows by a block. A group is converted to weights while the one before is multiplied, since a load of
// freshly written data would wait. The first two arguments are copies, which stay in registers.
template <int M>
void int4_part(const Int4Tiles of, const TileRows rows, int64_t tile, int64_t block, int64_t begin, int64_t end,
               int64_t first_step, TileSums<M>& sums) {
  alignas(64) uint8_t weights[2][kTileBytes], zeros[2][kTileBytes] = {};
  const auto lay_out = [&](int64_t g) __attribute__((always_inline)) {
    const int64_t own = g - begin;
    of.expand(block, g, weights[own % 2], zeros[own / kTileRows % 2] + own % kTileRows * kRowBytes);
  };
  const auto add = [&](const uint8_t* from, int64_t step) __attribute__((always_inline)) {
    const uint8_t* const a = rows.data + step * rows.step_bytes() + tile * rows.tile_bytes();
    tile_load<4>(from);
    each<M>([&](auto m) {
      tile_load<6 + m % 2>(a + m * rows.tile_bytes());
      tile_add_bfloat16<m, 6 + m % 2, 4>();
    });
  };
  each<M>([&](auto m) { tile_zero<m>(); });
  lay_out(begin);
  for (int64_t g = begin; g < end; ++g) {
    const int64_t own = g - begin;
    if (g + 1 < end) lay_out(g + 1);
    add(weights[own % 2], g);
    if (own % kTileRows == kTileRows - 1 || g == end - 1) {
      add(zeros[own / kTileRows % 2], first_step + own / kTileRows);
    }
  }
  each<M>([&](auto m) { tile_store<m>(sums.tiles + m * kTileBytes); });
  sums *= of.unit();
}

template <int M>
void int4_block(const Int4Tiles& of, const TileRows& rows, const Division& division, int64_t tile, int64_t block,
                const Output& out) {
  using Sums = TileSums<M>;
  int64_t step = of.groups();  // of zeros
  const auto sum = [&](Sums& to, int64_t first, int64_t behind) {
    const int64_t begin = first / kGroup, end = behind / kGroup;
    int4_part<M>(of, rows, tile, block, begin, end, step, to);
    step += zero_steps(end - begin);
  };
  const auto store_all = [&](int branch, const Sums& sums) {
    store_rows<M, 1>(rows, tile, block, branch, sums, [&](int n, int64_t row, int64_t b, const uint8_t* from) {
      out.store_branch(n, row, b, load_vector<float>(from));
    });
  };
  if (division.divided()) return add_parts<Sums>(division, sum, store_all);
  Sums sums;
  sum(sums, 0, division.inner);
  store_all(0, sums);
}

void multiply_int4_tiles(const Product& product, const Rows& given, const Output& out) {
  const Int4Tiles of(product);
  const Division division(product, given);
  const TileRows rows(given.count, each_part(division, [](int64_t, int64_t, int64_t) {}));
  lay_out_int4(product, given, division, rows);
  share_blocks(out, blocks_of(product.channels), 1, of.groups() * kGroupBytes, [&](int64_t first, int64_t last) {
    const Tiles shapes(static_cast<int>(rows.height));
    for (int64_t block = first; block < last; ++block) {
      by_turns<kMostTiles>(rows, [&](auto m, int64_t tile) { int4_block<m>(of, rows, division, tile, block, out); });
    }
  });
}

}  // namespace

void multiply_tiles(const Product& product, const Rows& rows, const Output& out) {
  switch (product.kind) {
    case Kind::kInt8: return multiply_int8_tiles(product, rows, out);
    case Kind::kInt4: return multiply_int4_tiles(product, rows, out);
    default: return multiply_bfloat16(product, rows, out);
  }
}

}  // namespace specinfer

#endif
