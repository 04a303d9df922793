// Low-rank adapters (LoRA): a row that has one gets, besides what a product gives it, scale B (A x) of each matrix that
// the product stacks. Both are added in float32 and rounded once, and a row's result depends on that row and its
// adapter alone.
//
// Weights are float32 or bfloat16, as rows are, and lie in blocks of 16 rows of a matrix, zeros behind the last:
//
//   A of all the matrices    [blocks, inner, 16]
//   B of each of them        [blocks, rank, 16]

#pragma once

#include "product.h"

namespace specinfer {

// One matrix of those that a product stacks, as kernels/structures.py has it.
struct LowRankPart {
  int64_t first, channels;  // of the product
  int64_t offset, rank;     // the rows of A that are its own
  const void* up;           // B
  float scale;
};

// What an adapter adds to one product, as kernels/structures.py has it; without parts nothing.
struct LowRank {
  const void* down;  // A, of all parts
  int64_t ranks;     // its rows
  const LowRankPart* parts;
  int64_t count;
};

// The rows of a pass that have adapters, as kernels/structures.py has it.
struct AdaptedRows {
  const int64_t* rows;             // their numbers; those of an adapter lie side by side
  const int64_t* ends;             // [count]: behind the last one of each adapter
  const LowRank* const* adapters;  // [count]: what each adds to products 0, 1, ...
  int64_t count;                   // of adapters
  const int64_t* places;           // [rows of the pass]: where each is among `rows`; below 0: it has no adapter
};

// multiply, and what adapters add to that product; null: no row has one. Rows are whole.
void multiply_adapted(const Product& product, Rows rows, const AdaptedRows* adapted, int64_t number, void* out);

}  // namespace specinfer
