// A head that guesses a block in one pass: reads texts and runs its pass in one call. With one or two layers,
// separate calls of the ops between products would take longer than the ops.
//
// kernels/block_head.py calls it; heads/block.py has the same op by op.

#pragma once

#include "layers.h"

namespace specinfer {

// As in kernels/structures.py. D is the head's hidden size, I the size of all taps of a row of the target.
struct BlockHead {
  Type type;
  float scale;        // of embeddings
  int32_t causal;     // a block's rows attend to those before them, or to all
  int32_t skipped;    // leading rows of a block that guess nothing
  Product fc;         // [D, I]
  Product context;    // [L 2 K H, D]: keys and values of a text's rows, for all layers
  Product entry;      // [R D, 2 D]: inputs of a block's rows; no weight: they are embeddings
  Product output;     // [U, D]: logits
  Norm hidden_norm, entry_norm, norm;
  const Layer* layers;
  int64_t num_layers;
  Rotations rotations;
  const void* embedding;  // [tokens, D]
  int64_t tokens, mask;   // and the mask token
};

// The caches of each layer, with P slots.
struct Caches {
  const LayerCache* layers;
  int64_t slots;
};

// One request. Cache positions count from the start of its table, which is position `shift` of the text.
struct BlockText {
  int64_t first_block, blocks;  // of its table, among all tables
  int64_t shift;
  int64_t begin, count;         // cache positions that are read, in order
  int64_t rows;                 // of its block, which follow; 0: none
  int64_t anchor;               // the block's first token
  const void* last;             // state of the token before the anchor, if that is not read now
};

// A step. taps: address of the target's I numbers for each row that is read, in order.
struct BlockStep {
  const BlockText* texts;
  int64_t count;
  const void* const* taps;
  const int64_t* tables;
  int64_t num_blocks, block_size;  // of all tables; positions of a block
};

// Writes K and V of all read rows and blocks; the state of each text's last read row to `last`, [count, D]; for all
// guessing rows the input of the output layer to `read`, [R, D], and its logits to `logits`, [R, U]. Returns false
// and does nothing if a text has an invalid slot, position or token.
bool step_blocks(const BlockHead& head, const BlockStep& step, const Caches& caches, void* last, void* read,
                 void* logits);

}  // namespace specinfer
