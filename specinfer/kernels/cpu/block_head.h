// A head that guesses a block in one pass: what it makes of a text, and its pass, each in one call, as between the
// products of a layer or two calls of one op after another take longer than these.
//
// kernels/block_head.py is how it is called; heads/block_model.py has the same op by op.

#pragma once

#include "layers.h"

namespace specinfer {

// As kernels/library.py has it. D is the head's hidden size, I that of all taps of a row of the target.
struct BlockHead {
  Type type;
  int32_t gelu;
  float eps;
  int32_t unused;
  Product fc;         // [D, I]
  Product context;    // [L 2 K H, D]: keys and values of a text's rows, of all layers
  Product entry;      // [R D, 2 D]: what a block's rows begin with; no weight: they begin as embeddings
  Product output;     // [U, D]: logits
  const void *hidden_norm, *entry_norm, *norm;  // [D]
  const Layer* layers;
  int64_t num_layers;
  const float *cos, *sin;  // [positions, H / 2], of all positions there are
  int64_t positions;
};

// The caches of each layer, [P, K, H].
struct Caches {
  const void *const *keys, *const *values;
  int64_t slots;  // P
};

// Writes K and V of a text's rows to their slots; what is made of their hidden states before goes to `fused`, [T, D].
// taps: of each row where its I numbers lie. False, and nothing done, for a position or slot that is not there.
bool read_texts(const BlockHead& head, const void* const* taps, const int64_t* positions, const int64_t* slots,
                int64_t rows, const Caches& caches, void* fused);

// One pass over blocks, whose rows are those of `paths`; writes their K and V. Of the rows named in `chosen`: what the
// output layer reads, [R, D], and what it makes of it, [R, U].
//
// begin: what each row begins with, [T, D], which is used up; or of each block its anchor's embedding, [B, D], and
// `last` where that lies which was made of the token before its anchor. False for a position or row that is not there.
bool guess_blocks(const BlockHead& head, const Paths& paths, const int64_t* positions, void* begin,
                  const void* const* last, const int64_t* chosen, int64_t count, const Caches& caches, void* read,
                  void* logits);

}  // namespace specinfer
