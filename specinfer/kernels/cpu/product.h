// Products of rows with weights that lie in blocks of 16 output channels.
//
//   float32   [blocks, inner, 16]
//   bfloat16  [blocks, inner/2, 16, 2]            inner sizes padded with zeros to 32
//   int8      [blocks, inner/4, 16, 4] unsigned   w + 128: sum(w a) = sum((w + 128) a) - 128 sum(a); to 64
//   int4      [blocks, groups, 4, 16, 4]          two levels a byte: of eight elements the low halves have the
//                                                 first four, the high halves the others; inner padded to 32
//   scales    int8 float32 [blocks, 16], int4 float16 [blocks, groups, 16]
//   zeros     int4 uint8 [blocks, groups, 16]     a weight is scale * (level - zero / 16)
//
// and, of GGUF files as they are (blocks_product.cpp; both padded to 32):
//
//   blocks4   as int4                             levels 0 .. 15
//   blocks8   as int8, -127 .. 127
//   scales    float16 [blocks, spans, 16]         of `span` groups each
//   steps     uint8 [blocks, groups, n, 16]       step + 128, for each of n parts of a group: blocks4 one, blocks8 two
//   mins      float16 [blocks, spans, 16], and min_steps uint8 [blocks, groups, 16]
//             a weight is scale * step * level - min * min_step
//
// So one register, and one row of a tile of the matrix unit, holds the same inner elements of 16 channels, and
// one layout serves one row and many. kernels/quantized.py says what the numbers mean. A row's result is the
// same for every number of rows, unless a product is loose. Of int8 weights, and of int4 where there is no
// matrix unit, it has the bits of the PyTorch twins, as sums of integers are exact and a fixed sequence of float
// operations follows; a matrix unit multiplies int4 as bfloat16 (int4_tiles.h).

#pragma once

#include <algorithm>
#include <cstdint>

#include "pool.h"
#include "arithmetic.h"

#if defined(SPECINFER_TILES) || defined(SPECINFER_PLAIN_TILES)
#define SPECINFER_TILED 1  // there is a matrix unit (tiles.h), or plain code in its place
#endif

namespace specinfer {

class Exchange;

enum class Kind : int32_t { kFloat32, kBFloat16, kInt8, kInt4, kBlocks4, kBlocks8 };
enum class Type : int32_t { kFloat32, kBFloat16 };

// The parts of inner elements whose sums are added as part_tree.h says; of all weights but int8. Each ends behind
// whole groups of 32, but for the last.
struct Parts {
  const int64_t* ends;    // of those of this product; null: its inner elements are one sum
  int64_t count;          // of them
  int64_t first;          // the number of the first one, of those of all ranks
  const int64_t* shares;  // [ranks + 1]: the number of each rank's first one, and of all
  int64_t ranks;
};

// What weights of blocks have beside levels and scales.
struct BlockParts {
  const void* steps;      // null: all are 1
  const void* mins;       // null, as min_steps: all are 0
  const void* min_steps;
  int64_t span;
};

// As kernels/structures.py has it.
struct Product {
  Kind kind;
  const void* weight;
  const void* scales;
  const void* zeros;
  const float* bias;  // [channels], or null
  int64_t channels, inner;
  float largest;  // no scale of int4 is larger
  int32_t loose;  // whether a row's result may depend on how many rows there are, where that is quicker
  // Whether caches would not hold the weights until they are read again. Register tiles of x86-64 read these past the
  // caches; tiles of the matrix unit and other CPUs ask for them as for others, as nobody has measured it there.
  int32_t nontemporal;
  // Of the ranks that have the other inner elements, where these weights have some of them; null: these are all.
  Exchange* exchange;
  Parts parts;
  BlockParts blocks;
};

// Rows as they come: contiguous, [count, inner of the product].
struct Rows {
  const void* data;
  Type type;
  int64_t count;
  bool partial = false;  // they are parts of rows
  // Of parts of rows, of a product with int8 weights: the largest values of whole rows, as find_maxima gives them.
  const float* maxima = nullptr;
  // What is added to results of whole rows before they are rounded (low_rank.h), [.., channels]; null: nothing. `places`
  // is where each row's lies, below 0: it has none.
  const float* added = nullptr;
  const int64_t* places = nullptr;
};

// Parts of rows give sums instead of results: int32 [count, channels], or of floats and int4 weights float32
// [branches, count, channels], as part_tree.h has them.
void multiply(const Product& product, const Rows& rows, void* out);

// ---- a product with int8 weights, in parts of its inner elements ----
//
// Each part begins at a group of 32. Maxima of the parts' rows, of which the largest count, are those of whole rows;
// sums of all parts, added up, are the product's own, as integers add exactly; what finish makes of these has its bits.

// The largest absolute value of each row, turned (quantized_rows.h), by its bits: a NaN is larger than all else.
void find_maxima(const Product& product, const Rows& rows, float* maxima);
// Sums of whole rows [count, channels] -> results; `rows` needs no data.
void finish(const Product& product, const Rows& rows, const int32_t* sums, void* out);

// ---- a product with other weights, in parts ----

// Of all ranks the branches [branches of all, count, channels] -> results; `rows` needs no data.
void finish(const Product& product, const Rows& rows, const float* branches, void* out);

// All of that, where the product has an exchange; where a rank is lost, there are no results.
void multiply_with_others(const Product& product, const Rows& rows, void* out);
bool lost(const Product& product);

// ---- for those that implement it ----

constexpr int64_t kBlock = 16;              // output channels side by side
constexpr int64_t kGroup = 32;              // inner elements that are rotated together, or share a scale
constexpr int64_t kGroupBytes = kBlock * kGroup / 2;  // of int4 levels
constexpr int64_t kPieceBytes = 1 << 16;    // of weights: worth being shared out

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
// Inner sizes as they lie in memory.
inline int64_t padded_inner(Kind kind, int64_t inner) {
  constexpr int64_t to[] = {1, 32, 64, kGroup, kGroup, kGroup};
  return round_up(inner, to[static_cast<int>(kind)]);
}

inline int64_t blocks_of(int64_t channels) { return (channels + kBlock - 1) / kBlock; }

// Where results go: + bias, + what is added to a row, in the rows' type.
class Output {
 public:
  Output(const Product& product, const Rows& rows, void* out)
      : scales_(static_cast<const float*>(product.scales)),
        bias_(product.bias),
        channels_(product.channels),
        halves_(rows.type == Type::kBFloat16),
        partial_(rows.partial),
        rows_(rows.count),
        added_(rows.added),
        places_(rows.places),
        data_(out) {}

  // The channels from 16 * block on.
  void store(int64_t row, int64_t block, Floats y) const {
    const int64_t first = block * kBlock, n = std::min(kBlock, channels_ - first);
    if (bias_ != nullptr) y = y + load(bias_ + first, n);
    if (added_ != nullptr) [[unlikely]] y = with_added(row, first, n, y);
    const int64_t at = row * channels_ + first;
    if (halves_) {
      specinfer::store(static_cast<BFloat16*>(data_) + at, y, n);
    } else {
      specinfer::store(static_cast<float*>(data_) + at, y, n);
    }
  }

  // Sums of parts of rows stay as they are.
  void store_branch(int64_t branch, int64_t row, int64_t block, Floats sums) const {
    if (partial_) [[unlikely]] return keep(branch, row, block, sums);
    store(row, block, sums);
  }

  // The same from exact sums of int8, of a row with that scale.
  void store(int64_t row, int64_t block, Ints sums, float row_scale) const {
    if (partial_) [[unlikely]] return keep(0, row, block, bits_as<float>(sums));
    store(row, block, to_floats(sums) * load(scales_ + block * kBlock) * row_scale);
  }

 private:
  void keep(int64_t branch, int64_t row, int64_t block, Floats sums) const {
    const int64_t first = block * kBlock;
    auto* const to = static_cast<float*>(data_) + (branch * rows_ + row) * channels_ + first;
    specinfer::store(to, sums, std::min(kBlock, channels_ - first));
  }

  [[gnu::noinline]] Floats with_added(int64_t row, int64_t first, int64_t n, Floats y) const {
    const int64_t place = places_[row];
    return place < 0 ? y : y + load(added_ + place * channels_ + first, n);
  }

  const float* scales_;  // of int8 channels
  const float* bias_;
  int64_t channels_;
  bool halves_, partial_;
  int64_t rows_;
  const float* added_;
  const int64_t* places_;
  void* data_;
};

// f(first, last) for ranges of blocks, each read by one thread straight through.
template <typename F>
void share_blocks(int64_t blocks, int64_t block_bytes, const F& f) {
  Pool::get().split(blocks, kPieceBytes / block_bytes + 1, f);
}

void multiply_floats(const Product& product, const Rows& rows, const Output& out);
void multiply_int8(const Product& product, const Rows& rows, const Output& out);
void multiply_int4(const Product& product, const Rows& rows, const Output& out);
void multiply_blocks(const Product& product, const Rows& rows, const Output& out);

#if defined(SPECINFER_TILED)
constexpr int64_t kFewRows = 8;  // of int4, which registers are quicker for
void multiply_tiles(const Product& product, const Rows& rows, const Output& out);
#endif

}  // namespace specinfer
