// A head that guesses a block in one pass: what it reads of texts and its pass in one call. Between the products of a
// layer or two, calls of one op after another take longer than these do.
//
// kernels/block_head.py is how it is called; heads/block.py has the same op by op.

#pragma once

#include "layers.h"

namespace specinfer {

// As kernels/structures.py has it. D is the head's hidden size, I that of all taps of a row of the target.
struct BlockHead {
  Type type;
  float scale;        // of embeddings
  int32_t causal;     // a block's rows see those before them, or all
  int32_t skipped;    // rows of a block, from its first on, that guess nothing
  Product fc;         // [D, I]
  Product context;    // [L 2 K H, D]: keys and values of a text's rows, of all layers
  Product entry;      // [R D, 2 D]: what a block's rows begin with; no weight: they begin as embeddings
  Product output;     // [U, D]: logits
  Norm hidden_norm, entry_norm, norm;
  const Layer* layers;
  int64_t num_layers;
  Rotations rotations;
  const void* embedding;  // [tokens, D]
  int64_t tokens, mask;   // and the token that stands for those to be guessed
};

// The caches of each layer, [P, K, H].
struct Caches {
  const void *const *keys, *const *values;
  int64_t slots;  // P
};

// One request. Cache positions count from where its table begins, which is at position `shift` of the text.
struct BlockText {
  int64_t first_block, blocks;  // of its table, among all tables
  int64_t shift;
  int64_t begin, count;         // cache positions that are read, in order
  int64_t rows;                 // of its block, which follow; 0: none
  int64_t anchor;               // the block's first token
  const void* last;             // what was made of the token before the anchor, where that is not read now
};

// All of a step. taps: of each row that is read, in order, where the target's I numbers lie.
struct BlockStep {
  const BlockText* texts;
  int64_t count;
  const void* const* taps;
  const int64_t* tables;
  int64_t num_blocks, block_size;  // of all tables; positions of a block
};

// Writes K and V of what is read and of all blocks. What was made of the last row that is read of each text goes to
// `last`, [count, D]; what the output layer reads of all rows that guess to `read`, [R, D], and its logits to
// `logits`, [R, U]. False, and nothing done, where a text leads to what is not there.
bool step_blocks(const BlockHead& head, const BlockStep& step, const Caches& caches, void* last, void* read,
                 void* logits);

}  // namespace specinfer
