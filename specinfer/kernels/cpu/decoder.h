// A decoder's pass in one call: embeddings, all layers, the last norm, and optionally logits. In Python the code
// around the layers of a small model takes a twentieth of the pass, since the weights evict Python's code and data from
// the caches.
//
// kernels/decoder.py calls it; models/decoder.py has the same step by step, with the same bits.

#pragma once

#include "layers.h"

namespace specinfer {

// As in kernels/structures.py. D is the hidden size.
struct Decoder {
  Type type;
  float scale;            // of embeddings
  const void* embedding;  // [tokens, D]
  int64_t tokens;
  const void* places;  // [num_places, D]: row place_offset + p is added at position p; or null
  int64_t num_places, place_offset;
  const Layer* layers;
  int64_t num_layers;
  Norm norm;       // after the last layer
  Product output;  // [V, D]; no weight: logits are computed elsewhere
  int64_t num_rotations;   // 0: no layer has rotations; 1: all have the same
  Rotations rotations[2];  // of global layers, then of sliding-window ones
};

// The rows of a pass, at least one. chosen: rows for the output layer; null: all.
struct DecoderRows {
  const int64_t *tokens, *positions;  // [T]
  const int64_t* chosen;
  int64_t num_chosen;
  const AdaptedRows* adapted;  // null: no row has an adapter
  const States* states;        // null: no layer has a recurrence
  PerLayerInputs per_layer;
};

enum class Fault : int32_t { kNone, kToken, kPosition, kLost };

// Writes K and V of all rows, the inputs of the output layer for the chosen rows to `read`, [R, D], and their logits
// to `logits`, [R, V], unless null. Does nothing if a token is outside the table or a position has no rotation or
// place, and stops if a rank is lost; the fault says which.
Fault run_decoder(const Decoder& decoder, const DecoderRows& rows, const Paths& paths, const LayerCache* caches,
                  const Taps& taps, void* read, void* logits);

}  // namespace specinfer
