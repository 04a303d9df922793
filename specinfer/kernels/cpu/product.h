// Products of rows with weights in blocks of 16 output channels.
//
//   float32   [blocks, inner, 16]
//   bfloat16  [blocks, inner/2, 16, 2]            inner sizes padded with zeros to 32
//   int8      [blocks, inner/4, 16, 4] unsigned   w + 128: sum(w a) = sum((w + 128) a) - 128 sum(a); to 64
//   int4      [blocks, groups, 4, 16, 4]          two levels per byte: of eight elements the low halves have the
//                                                 first four, the high halves the others; inner padded to 32
//   scales    int8 float32 [blocks, 16], int4 float16 [blocks, groups, 16]
//   zeros     int4 uint8 [blocks, groups, 16]     a weight is scale * (level - zero / 16)
//
// and for GGUF files in their own precision (blocks_product.cpp; both padded to 32):
//
//   blocks4   as int4                             levels 0 .. 15
//   blocks6   [blocks, groups, 2, 3, 16, 4]       level + 32, -32 .. 31: of half a group's four words the first three
//                                                 in six bits; in their upper two, the fourth, lowest bits first
//   blocks8   as int8, -127 .. 127
//   scales    float16 [blocks, spans, 16]         one per `span` groups
//   steps     uint8 [blocks, groups, n, 16]       step + 128, for each of n parts of a group: blocks4 one, others two;
//                                                 with spans of groups blocks4 has none below 0
//   mins      float16 [blocks, spans, 16], and min_steps uint8 [blocks, groups, 16]
//             a weight is scale * step * level - min * min_step
//
// So one register, and one row of a tile of the matrix unit, holds the same inner elements of 16 channels, and one
// layout serves any number of rows. kernels/quantized.py defines the numbers. A row's result is the same for every
// number of rows, unless a product is loose. With int8 weights, and with int4 if there is no matrix unit, it has the
// bits of the PyTorch twins, since sums of integers are exact and a fixed sequence of float operations follows; so have
// GGUF blocks. A matrix unit multiplies int4 as bfloat16 (int4_tiles.h).

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

enum class Kind : int32_t { kFloat32, kBFloat16, kInt8, kInt4, kBlocks4, kBlocks6, kBlocks8 };
enum class Type : int32_t { kFloat32, kBFloat16 };

// The parts of inner elements, whose sums are added in the order of part_tree.h; for all weights but int8. Each part
// but the last ends at a multiple of 32.
struct Parts {
  const int64_t* ends;    // of this product's parts; null: its inner elements are one sum
  int64_t count;          // number of ends
  int64_t first;          // number of the first part among those of all ranks
  const int64_t* shares;  // [ranks + 1]: the number of each rank's first part, and of all parts
  int64_t ranks;
};

// Further arrays of block weights.
struct BlockParts {
  const void* steps;      // null: all are 1
  const void* mins;       // null, as min_steps: all are 0
  const void* min_steps;
  int64_t span;           // 1, or kSpan with steps, for levels of 4 and 6 bits
};

// As in kernels/structures.py.
struct Product {
  Kind kind;
  const void* weight;
  const void* scales;
  const void* zeros;
  const float* bias;  // [channels], or null
  int64_t channels, inner;
  float largest;  // upper bound of the scales of int4
  int32_t loose;  // a row's result may depend on the number of rows, if that is faster
  // Nonzero if caches would not hold the weights until they are read again. Register tiles of x86-64 then read them
  // past the caches. Tiles of the matrix unit and other CPUs ignore it, since it was not measured there.
  int32_t nontemporal;
  // With the ranks that have the other inner elements; null: this product has all of them.
  Exchange* exchange;
  Parts parts;
  BlockParts blocks;
};

// Terms added to results of whole rows before they are rounded (low_rank.h).
struct AddedTerms {
  const int64_t* places;  // index of each row's terms; below 0: none
  int64_t count;          // number of rows with terms
  float* sums;            // [blocks of the product, count, 16]
  int64_t jobs;           // that compute A x, for all blocks

  // Run a job; each is run once, by any thread.
  virtual void run(int64_t job) const = 0;
  // Compute the terms of blocks first .. last - 1, which the calling thread stores next. All jobs have been started, and
  // this waits for their end.
  virtual void compute(int64_t first, int64_t last) const = 0;

  // The terms of a row for a block; null: none.
  const float* of(int64_t row, int64_t block) const {
    return places[row] < 0 ? nullptr : sums + (block * count + places[row]) * 16;
  }

 protected:
  ~AddedTerms() = default;
};

// Rows of the input: contiguous, [count, inner of the product].
struct Rows {
  const void* data;
  Type type;
  int64_t count;
  bool partial = false;  // they are parts of rows
  // For parts of rows and int8 weights: the largest values of whole rows, from find_maxima.
  const float* maxima = nullptr;
  const AddedTerms* added = nullptr;  // null: none
};

// Parts of rows give sums instead of results: int32 [count, channels], or with float and int4 weights float32
// [branches, count, channels], see part_tree.h.
void multiply(const Product& product, const Rows& rows, void* out);

// ---- a product with int8 weights, in parts of its inner elements ----
//
// Each part starts at a multiple of 32. The largest of the maxima of the parts' rows are those of whole rows. The sums
// of all parts add up to the product's own, since integers add exactly, and finish gives the product's bits.

// The largest absolute value of each rotated row (quantized_rows.h), compared by bits: NaN exceeds all numbers.
void find_maxima(const Product& product, const Rows& rows, float* maxima);
// Sums of whole rows [count, channels] -> results; `rows` needs no data.
void finish(const Product& product, const Rows& rows, const int32_t* sums, void* out);

// ---- a product with other weights, in parts ----

// Branches of all ranks [branches, count, channels] -> results; `rows` needs no data.
void finish(const Product& product, const Rows& rows, const float* branches, void* out);

// All steps together, for a product with an exchange; there are no results if a rank is lost.
void multiply_with_others(const Product& product, const Rows& rows, void* out);
bool lost(const Product& product);

// ---- for implementations ----

constexpr int64_t kBlock = 16;              // interleaved output channels
constexpr int64_t kGroup = 32;              // inner elements that are rotated together, or share a scale
constexpr int kSpan = 8;                    // groups with one scale, in blocks of 256 elements
constexpr int64_t kGroupBytes = kBlock * kGroup / 2;  // of int4 levels
constexpr int64_t kPieceBytes = 1 << 16;    // minimum bytes of weights per job

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
// Inner sizes as padded in memory.
inline int64_t padded_inner(Kind kind, int64_t inner) {
  constexpr int64_t to[] = {1, 32, 64, kGroup, kGroup, kGroup, kGroup};
  return round_up(inner, to[static_cast<int>(kind)]);
}

inline int64_t blocks_of(int64_t channels) { return (channels + kBlock - 1) / kBlock; }

// Stores results: + bias, + the term of a row, in the rows' type.
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
        data_(out) {}

  const AddedTerms* added() const { return added_; }

  // Stores the channels from 16 * block on.
  void store(int64_t row, int64_t block, Floats y) const {
    const int64_t first = block * kBlock, n = std::min(kBlock, channels_ - first);
    if (bias_ != nullptr) y = y + load(bias_ + first, n);
    if (added_ != nullptr) [[unlikely]] {
      if (const float* const of_row = added_->of(row, block)) y = y + load(of_row);
    }
    const int64_t at = row * channels_ + first;
    if (halves_) {
      specinfer::store(static_cast<BFloat16*>(data_) + at, y, n);
    } else {
      specinfer::store(static_cast<float*>(data_) + at, y, n);
    }
  }

  // Sums of parts of rows are stored unchanged.
  void store_branch(int64_t branch, int64_t row, int64_t block, Floats sums) const {
    if (partial_) [[unlikely]] return keep(branch, row, block, sums);
    store(row, block, sums);
  }

  // The same from exact int8 sums, for a row with that scale.
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

  const float* scales_;  // of int8 channels
  const float* bias_;
  int64_t channels_;
  bool halves_, partial_;
  int64_t rows_;
  const AddedTerms* added_;
  void* data_;
};

// Calls f(first, last) for ranges of blocks, each read sequentially by one thread; all but the last range have a
// multiple of `step` blocks.
template <typename F>
void share_blocks(const Output& out, int64_t blocks, int64_t step, int64_t block_bytes, const F& f) {
  Pool& pool = Pool::get();
  const AddedTerms* const added = out.added();
  const int64_t jobs = added == nullptr ? 0 : added->jobs, steps = (blocks + step - 1) / step;
  const int64_t pieces = pool.ranges(steps, kPieceBytes / (step * block_bytes) + 1);
  pool.run(jobs + pieces, [&](int64_t i) {
    if (i < jobs) return added->run(i);
    const int64_t first = steps * (i - jobs) / pieces * step, end = steps * (i - jobs + 1) / pieces * step;
    const int64_t last = std::min(end, blocks);
    if (added != nullptr) added->compute(first, last);
    f(first, last);
  });
}

void multiply_floats(const Product& product, const Rows& rows, const Output& out);
void multiply_int8(const Product& product, const Rows& rows, const Output& out);
void multiply_int4(const Product& product, const Rows& rows, const Output& out);
void multiply_blocks(const Product& product, const Rows& rows, const Output& out);

#if defined(SPECINFER_TILED)
constexpr int64_t kFewRows = 8;  // with int4 weights, for which registers are faster
void multiply_tiles(const Product& product, const Rows& rows, const Output& out);
void multiply_spans_on_tiles(const Product& product, const Rows& rows, const Output& out);
#endif

}  // namespace specinfer
