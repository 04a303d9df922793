// The layers of a decoder or head, used by decoder.cpp and block_head.cpp. models/decoder.py has the same computation
// op by op, with the same bits.

#pragma once

#include "experts.h"
#include "layer_ops.h"
#include "low_rank.h"
#include "profile.h"
#include "recurrence.h"

namespace specinfer {

// x += after(out(act(gate(x)) * p)), where p are a row's elements from `first` on of the inputs of all layers.
struct PerLayer {
  Product gate, out;
  Norm after;
  int64_t first;
};

// As in kernels/structures.py; a norm or product without a weight is absent. A layer without qkv has no attention, one
// without `up` and experts no MLP.
struct Layer {
  Norm before_attention, before_mlp, after_attention, after_mlp;
  Heads heads;
  Product qkv, o, up, down;  // rows of `up` hold gate, then up, if the MLP is gated
  int32_t rope;              // 0: the first one, 1: that of sliding-window layers, 2: none
  // 0: x += attention, then x += mlp; norms before them, after them, or both. Else x += attention + mlp, both of the
  // same x; without a norm before the MLP they share one.
  int32_t parallel;
  Activation activation;
  int32_t gated;
  float clip;   // limit of the values of q, k and v; 0: none
  float scale;  // factor of each term added to x
  const Experts* experts;  // replace `up` and `down`, unless null
  const Recurrence* recurrence;  // replaces attention, or is added to it; null: none
  const PerLayer* per_layer;     // null: none
  const float* factor;           // of the layer's output; null: 1

  int64_t size() const;  // D
};

// The per-layer inputs of each row, [T, width]; null if there are none.
struct PerLayerInputs {
  const void* rows;
  int64_t width;
};

// Rotations of each row, [T, H / 2]; null if there are none.
struct Rope {
  const float *cos, *sin;
};

// Rotations of the positions 0, 1, ... of any text, [positions, H / 2].
struct Rotations {
  const float *cos, *sin;
  int64_t positions;

  // The rotations of rows at these positions, which must be in range; allocated in Scratch.
  Rope of(const int64_t* at, int64_t rows, int64_t half) const;
};

// Copies of the inputs of some layers; index `last` is the output of the last layer: [T, count, D].
struct Taps {
  const int64_t* layers;
  int64_t count;
  void* out;
};

// The result of the layers: the residual stream is x + added, or x if `added` is null.
struct Left {
  const void* added;
  bool lost;  // a rank was lost, and the results are invalid
};

// Runs `count` layers. ropes: by number; caches: of each layer. x [T, D] is the residual stream; the term still to be
// added to it is in y [T, D]. adapted: rows with adapters, where layer i's products have numbers from 4 i on, and those of
// a recurrence the numbers of qkv and o, beside attention of layer count + i; null: no row has one. states: of the layers
// with a recurrence, if there are any.
Left run_layers(const Layer* layers, int64_t count, Type type, const Paths& paths, const Rope ropes[3],
                const LayerCache* caches, void* x, void* y, const Taps& taps,
                const AdaptedRows* adapted = nullptr, const States* states = nullptr,
                const PerLayerInputs& per_layer = {});

}  // namespace specinfer
