// Low-rank adapters (LoRA): a row's result is the product plus scale B (A x) for each matrix that the product stacks.
// Both are added in float32 and rounded once. A row's result depends on that row and its adapter alone.
//
// Weights are in blocks of 16 rows of a matrix, padded with zeros; blocks of B are those of the product:
//
//   A of all the matrices            [blocks, inner, 16]
//   B of each of them                [blocks, rank, 16]
//
// They are float32 or bfloat16, or int8 with a scale for each row of a matrix. The 16 float32 scales of a block of int8
// are stored before it.

#pragma once

#include "product.h"

namespace specinfer {

// One matrix of a stacked product, as in kernels/structures.py.
struct LowRankPart {
  int64_t block, blocks;  // first block of the product, and their number
  int64_t offset, rank;   // the rows of A used by it
  const void* up;           // B
  float scale;
};

// An adapter's terms for one product, as in kernels/structures.py; without parts there are none.
struct LowRank {
  Kind kind;  // of the weights
  const void* down;  // A, for all parts
  int64_t ranks;     // its rows
  const LowRankPart* parts;
  int64_t count;
};

// The adapted rows of a pass, as in kernels/structures.py.
struct AdaptedRows {
  const int64_t* rows;             // their numbers; those of an adapter are consecutive
  const int64_t* ends;             // [count]: end of each adapter's rows
  const LowRank* const* adapters;  // [count]: terms for products 0, 1, ...
  int64_t count;                   // number of adapters
  const int64_t* places;           // [rows of the pass]: index in `rows`; below 0: no adapter
};

// multiply, plus the adapters' terms for that product; null: no row has an adapter. Rows must be whole.
void multiply_adapted(const Product& product, Rows rows, const AdaptedRows* adapted, int64_t number, void* out);

}  // namespace specinfer
