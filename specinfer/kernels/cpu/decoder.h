// A decoder's pass in one call: embeddings, all layers, the last norm, and logits where they are wanted at once. What
// lies around the layers of a small model takes Python, whose code and data the weights have swept out of the caches,
// a twentieth of the pass.
//
// kernels/decoder.py is how it is called; models/decoder.py has the same step by step, with the same bits.

#pragma once

#include "layers.h"

namespace specinfer {

// As kernels/structures.py has it. D is the hidden size.
struct Decoder {
  Type type;
  float scale;            // of embeddings
  const void* embedding;  // [tokens, D]
  int64_t tokens;
  const void* places;  // [num_places, D]: row place_offset + p is added to what is at position p; or null
  int64_t num_places, place_offset;
  const Layer* layers;
  int64_t num_layers;
  Norm norm;       // behind the last layer
  Product output;  // [V, D]; no weight: logits are made elsewhere
  int64_t num_rotations;   // 0: no layer has any; 1: all have the same
  Rotations rotations[2];  // of global layers, then of sliding-window ones
};

// The rows of a pass, one at the least. chosen: those that the output layer reads; null: all.
struct DecoderRows {
  const int64_t *tokens, *positions;  // [T]
  const int64_t* chosen;
  int64_t num_chosen;
  const AdaptedRows* adapted;  // null: no row has an adapter
};

enum class Fault : int32_t { kNone, kToken, kPosition, kLost };

// Writes K and V of all rows, what the output layer reads of those that are chosen to `read`, [R, D], and their logits
// to `logits`, [R, V], if that is not null. Nothing is done where the table lacks a token or a position has no
// rotation or place, and no more where a rank is lost, which the fault says.
Fault run_decoder(const Decoder& decoder, const DecoderRows& rows, const Paths& paths, const void* const* keys,
                  const void* const* values, const Taps& taps, void* read, void* logits);

}  // namespace specinfer
