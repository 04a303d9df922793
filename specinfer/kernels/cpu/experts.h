// A mixture of experts: each row uses the few MLPs that its router chooses. models/experts.py has the same
// computation op by op, with the same bits.

#pragma once

#include "layer_ops.h"

namespace specinfer {

// As in kernels/structures.py, as is Experts. If `sigmoid`, an expert's score is the sigmoid of its logit, not a
// softmax; those with the largest sums of score and bias are chosen, and weigh `scale` times their score.
struct Scores {
  int32_t sigmoid;
  float scale, epsilon;  // epsilon is added to the sum of scores that divides normalized ones
  const float* bias;     // [count]; null: none
};

struct Experts {
  Product router;                 // float32: a logit per expert, then the shared expert's gate, if any
  const Product *gate_up, *down;  // per expert
  int64_t count, per_token;
  int32_t normalized;  // the weights of a row's experts add up to 1
  int32_t shared;      // all rows use one more expert
  int32_t shared_gated;  // it weighs the sigmoid of its gate; otherwise 1
  int32_t gated;         // down(act(gate(x)) * up(x)); otherwise gate_up is up, and down(act(up(x)))
  Product shared_gate_up, shared_down;
  Scores scores;
};

// y = the weighted sum of its experts' results for each row of x, [T, D]. A row's result depends on no other row: it
// is a float32 sum over its own experts by ascending number, rounded once. There is no result if a rank is lost.
void run_experts(const Experts& experts, Type type, Activation activation, const void* x, int64_t rows, void* y);

// The experts of each row, ascending, and their weights, [rows, each], from `count` logits; rows are `stride` apart.
// The largest logits win; ties go to the lower number. If a logit is not finite, the first experts are chosen with
// NaN weights, so the row's result is NaN.
void choose_experts(const float* logits, int64_t stride, int64_t rows, int64_t count, int64_t each, bool normalized,
                    const Scores& scores, int64_t* chosen, float* weights);

// The sigmoids of the shared expert's gate logits, which are `stride` apart.
void open_gates(const float* logits, int64_t stride, int64_t rows, float* open);

// total[rows[n]] += weights[n] * made[n], for `count` distinct rows; null: all rows in order.
void add_weighted(Type type, float* total, const void* made, const int64_t* rows, const float* weights, int64_t count,
                  int64_t size);

}  // namespace specinfer
