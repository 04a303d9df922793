// A mixture of experts: of many MLPs each row has the few that its router chooses. models/experts.py has the same
// computation op by op, with the same bits.

#pragma once

#include "layer_ops.h"

namespace specinfer {

// As kernels/structures.py has it.
struct Experts {
  Product router;                 // float32: a logit for each expert; behind these the shared expert's gate, if it has one
  const Product *gate_up, *down;  // of each expert
  int64_t count, per_token;
  int32_t normalized;  // whether the weights of a row's experts add up to 1
  int32_t shared;      // whether all rows have one more expert
  Product shared_gate_up, shared_down;
};

// y = what its experts make of each row of x, times their weights, [T, D]. A row's result depends on no other row: it is
// a sum in float32 over its own experts by ascending number, rounded once. Where a rank is lost, there is no result.
void run_experts(const Experts& experts, Type type, Activation activation, const void* x, int64_t rows, void* y);

// The experts of each row, in ascending order, and their weights, [rows, each]; of `count` logits, rows of which are
// `stride` apart. The largest logits win, and of equal ones that of the lower number. Where not all are finite, the first
// experts are chosen, with weights of NaN: so is the row's result.
void choose_experts(const float* logits, int64_t stride, int64_t rows, int64_t count, int64_t each, bool normalized,
                    int64_t* chosen, float* weights);

// How far the gate of the shared expert is open, whose logits are `stride` apart: their sigmoids.
void open_gates(const float* logits, int64_t stride, int64_t rows, float* open);

// total[rows[n]] += weights[n] * made[n], for `count` different rows; null: all in their order.
void add_weighted(Type type, float* total, const void* made, const int64_t* rows, const float* weights, int64_t count,
                  int64_t size);

}  // namespace specinfer
