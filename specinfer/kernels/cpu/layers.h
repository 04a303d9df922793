// The layers of a decoder or head, of which decoder.cpp and block_head.cpp are made. models/decoder.py has the same
// computation op by op, with the same bits.

#pragma once

#include "experts.h"
#include "layer_ops.h"
#include "low_rank.h"
#include "profile.h"

namespace specinfer {

// How a layer adds what its attention and its MLP make to the residual stream x.
enum class Form : int32_t {
  kSerial,    // x += attention, then x += mlp; norms before them, after them, or both
  kAfterSum,  // the same, and the norm after each is one of the sum: x = norm(x + attention)
  kParallel,  // x += attention + mlp, of the same x; with no norm before the MLP they share one
};

// As kernels/structures.py has it; a norm without a weight is not there.
struct Layer {
  Norm before_attention, before_mlp, after_attention, after_mlp;
  Heads heads;
  Product qkv, o, up, down;  // rows of `up` hold gate, then up, where the MLP is gated
  int32_t rope;              // 0: the first one, 1: that of sliding-window layers, 2: none
  Form form;
  Activation activation;
  int32_t gated;
  float clip;   // of what qkv makes; 0: none
  float scale;  // of what is added to x
  const Experts* experts;  // in place of `up` and `down`, where it is not null
};

// Of each row, [T, H / 2]; null where there is none.
struct Rope {
  const float *cos, *sin;
};

// Of the positions 0, 1, ... of any text, [positions, H / 2].
struct Rotations {
  const float *cos, *sin;
  int64_t positions;

  // Those of rows at these positions, which have some; taken from Scratch.
  Rope of(const int64_t* at, int64_t rows, int64_t half) const;
};

// Copies of the inputs of some layers, where `last` stands for the output of the layer before it: [T, count, D].
struct Taps {
  const int64_t* layers;
  int64_t count;
  void* out;
};

// What layers leave: the residual stream is x + added, or x where that is null.
struct Left {
  const void* added;
  bool lost;  // a rank was, and nothing that was written is of use
};

// All `count` layers. ropes: by their numbers; keys, values: caches [P, K, H] of each layer. x [T, D] is the residual
// stream; what is still to be added to it lies in y [T, D]. adapted: rows with adapters, which know layer i's products as
// 4 i and on; null: no row has one.
Left run_layers(const Layer* layers, int64_t count, Type type, const Paths& paths, const Rope ropes[3],
                const void* const* keys, const void* const* values, void* x, void* y, const Taps& taps,
                const AdaptedRows* adapted = nullptr);

}  // namespace specinfer
