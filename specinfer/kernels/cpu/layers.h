// The layers of a decoder or head, of which decoder.cpp and block_head.cpp are made. models/decoder.py has the same
// computation op by op, with the same bits.

#pragma once

#include "layer_ops.h"
#include "profile.h"

namespace specinfer {

// As kernels/library.py has it; null pointers where a layer has no such norm.
struct Layer {
  const void *before_attention, *before_mlp, *after_attention, *after_mlp;
  Heads heads;
  Product qkv, o, gate_up, down;
  int32_t local;  // uses the second RoPE, that of sliding-window layers
};

// Of each row, [T, H / 2].
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

// All `count` layers. rope: of global layers, then of sliding-window ones; keys, values: caches [P, K, H] of each
// layer. x [T, D] is the residual stream; what the last MLP adds to it is left in y [T, D]. False: a rank was lost, and
// nothing that was written is of use.
bool run_layers(const Layer* layers, int64_t count, Type type, bool gelu, float eps, const Paths& paths,
                const Rope rope[2], const void* const* keys, const void* const* values, void* x, void* y,
                const Taps& taps);

}  // namespace specinfer
