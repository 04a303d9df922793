// Recurrent blocks, between their products: a short convolution, a gated delta rule or Mamba-2.
// kernels/recurrence_config.py has the formulas, kernels/states.py the order of the tokens, kernels/recurrence.py the
// same in PyTorch.
//
// One sequence of operations serves a token of a text, a node of a tree and a node that is applied later. So a row's bits
// depend only on the tokens before it: not on the other rows, the division of a text into passes, or the threads. They
// are those of every level of CPU, except for powers and logarithms of gates.

#pragma once

#include "layer_ops.h"

namespace specinfer {

// Numbered as in kernels/native_recurrence.py. The norm before the gate, or behind it.
enum class Recurrent : int32_t { kShortConv, kGatedDelta, kMamba2 };
enum class GateNorm : int32_t { kNone, kBefore, kBehind };

// As in kernels/structures.py. C channels, N heads, K key size, V value size.
struct Recurrence {
  Recurrent kind;
  GateNorm norm;
  Product first, last, gates;  // kernels/recurrence.py has their rows; gates: of a gated delta rule, else no weight
  int64_t layer;               // among those with a state
  int64_t taps, channels, heads, groups, key_size, value_size;
  const float *conv, *conv_bias;           // [taps, C], [C] or null
  const float *decay, *dt_bias, *skip;     // [N]; skip may be null
  const float* norm_weight;
  int64_t norm_weights, norm_groups;  // size of the weight, which is repeated; parts of a whole row with a norm each
  int64_t whole_heads, first_head;    // of all ranks that share a norm, and this rank's first; 0: it shares none
  float norm_eps, min_dt, max_dt;
  int32_t tiled;  // head h is of group h mod groups; else h / (heads / groups)

  int64_t head_of(int64_t group, int64_t n) const { return tiled != 0 ? n * groups + group : group * (heads / groups) + n; }
  int64_t group_of(int64_t head) const { return tiled != 0 ? head % groups : head / (heads / groups); }
  bool delta() const { return kind == Recurrent::kGatedDelta; }
  bool short_conv() const { return kind == Recurrent::kShortConv; }
  int64_t values() const { return short_conv() ? channels : heads * value_size; }
  int64_t num_gates() const { return short_conv() ? 0 : delta() ? 2 * heads : heads; }
  int64_t width() const { return short_conv() ? 3 * channels : values() + channels + (delta() ? 0 : heads); }  // C'
  int64_t matrix_floats() const { return short_conv() ? 0 : heads * key_size * value_size; }
  int64_t normed_heads() const { return whole_heads != 0 ? whole_heads : heads; }
};

// As in kernels/states.py.
struct StateRequest {
  int32_t first, visits, chain, source, slot;
};
struct Visit {
  int32_t row, place, parent, depth, inner;
};
struct StateSave {
  int32_t request, visits, slot;
};

// As in kernels/structures.py.
struct States {
  const StateRequest* requests;
  const Visit* visits;
  const StateSave* saves;
  int64_t num_requests, num_visits, num_saves;
  float *states, *rings;  // [layers, slots, state_floats], [layers, ring_slots, nodes, input_floats]
  int64_t layers, slots, ring_slots, nodes, state_floats, input_floats;
};

// The fault in states of a pass of that many rows, numbered as in kernels/native_recurrence.py; 0: none.
int32_t fault_of(const States& states, int64_t rows);

// Computes the rows for the last product, [T, N V] (or [T, C]), from those of the first, made, and for a gated delta
// rule the gates, float32 [T, 2 N]; and writes the states, saves and rings of the block's layer.
void recur(const Recurrence& block, Type type, const void* made, const float* gates, const States& states, int64_t rows,
           void* out);

// The two steps of recur for ranks that share a norm; between them they add up the squares of heads, float32
// [T, normed heads], zeros for those of other ranks. Values are this rank's, before the norm.
void recur_alone(const Recurrence& block, Type type, const void* made, const float* gates, const States& states,
                 int64_t rows, float* values, float* squares, void* out);
void norm_values(const Recurrence& block, Type type, const void* made, const float* values, const float* squares,
                 int64_t rows, void* out);

}  // namespace specinfer
