// The operations between the products of a decoder layer. Each divides its rows among the pool's threads. Shapes: T
// rows, D hidden size, F MLP size, N query heads, K key-value heads, H head size, P cache slots.

#pragma once

#include "paths.h"
#include "product.h"

namespace specinfer {

// A norm of rows, as in kernels/structures.py: x / rms(x) * weight; if `centred`, LayerNorm of x - mean(x), with a
// bias if there is one. No weight: no norm.
struct Norm {
  const void *weight, *bias;  // [D]
  float eps;
  int32_t centred;
};

// out = norm(x + y), if there is a y, of the rows in `chosen`, or of all. In place x becomes the sum; then rows must
// be distinct. out may be x.
void add_norm(Type type, void* x_TD, const void* y_TD, const Norm& norm, void* out_RD, const int64_t* chosen_R,
              int64_t rows, int64_t size, bool in_place);

// x as float32: x itself, or a copy in Scratch.
const float* widened_rows(Type type, const void* x_TD, int64_t rows, int64_t size);

// out = x + y, if there is a y; rows of out are `stride` elements apart. out may be x.
void copy_rows(Type type, const void* x_TD, const void* y_TD, void* out, int64_t stride, int64_t rows, int64_t size);

// x = x * factor.
void scale_rows(Type type, void* x_TD, float factor, int64_t rows, int64_t size);

// Clamps x to [-limit, limit].
void clip_rows(Type type, void* x_TD, float limit, int64_t rows, int64_t size);

// Numbered as in kernels/structures.py.
enum class Activation : int32_t { kSilu, kGeluTanh, kRelu, kGelu, kClampedSwish, kRelu2, kActivations };

// out = act(gate) * up; a row holds gate, then up. With kClampedSwish up becomes clamp(up, -7, 7) + 1.
void gate(Type type, Activation activation, const void* gate_up_T2F, void* out_TF, int64_t rows, int64_t size);

// out = act(gate) * up; rows of up are `stride` elements apart.
void gate_beside(Type type, Activation activation, const void* gate_TF, const void* up, int64_t stride, void* out_TF,
                 int64_t rows, int64_t size);

// out = act(x).
void activate(Type type, Activation activation, const void* x_TF, void* out_TF, int64_t rows, int64_t size);

// values *= sigmoid(gates), whose rows are `stride` elements apart.
void open_values(Type type, const void* gates, int64_t stride, void* values_TF, int64_t rows, int64_t size);

// out = table rows of `ids`, times scale; returns false and does nothing if an id is outside the table.
bool embed(Type type, const void* table_VD, int64_t entries, const int64_t* ids_T, float scale, void* out_TD,
           int64_t rows, int64_t size);

// The residual streams of Gemma 3n, in altup.cpp: [T, count, size], of which `active` is the one that layers compute.
struct Streams {
  int64_t count, size, active;
};

constexpr int64_t kMostStreams = 8;

// out = x_j + the sum of x_k * f_jk, and its active stream, [T, D]. Factors are coefficients, [S * S, S], times the
// tanh of routed, [T, S], / D; both are float32.
void predict_streams(Type type, const Streams& streams, const void* x_TSD, const float* routed,
                     const float* coefficients, void* out_TSD, void* active_TD, int64_t rows);

// x_j += (behind - before) * (f_j + 1), with coefficients [S, S].
void correct_streams(Type type, const Streams& streams, void* x_TSD, const float* routed, const float* coefficients,
                     const void* before_TD, const void* behind_TD, int64_t rows);

// Subtracts each row's mean and that many standard deviations; negative values become 0. Rows are `stride` elements
// apart.
void cut_off(Type type, void* gates, int64_t stride, float deviations, int64_t rows, int64_t size);

// The heads of an attention block, as in kernels/structures.py.
struct Heads {
  int64_t heads, kv_heads, head;
  float scale, eps;
  int64_t window;  // a row attends to that many last positions of its path; 0: all
  const void *q_norm, *k_norm;  // [H], or null; for whole rows of queries and of keys [N H] and [K H]
  int32_t whole_norms;
  float softcap;        // a score becomes cap * tanh(score / cap); 0: no cap
  const float* slopes;  // [N], ALiBi slopes; or null
  int32_t rounded;      // ALiBi as in Falcon (models/config.py)
  const void* sinks;    // [N], logits without a value; or null
  int32_t gated;        // rows of q, k and v go on with a gate [N H] (open_values)
  // Matrices beside that of queries. 2: keys, values; 1: keys, which before norm and rotation are the values; 0: K and
  // V are in the cache already.
  int32_t kv_matrices = 2;
  int32_t value_norm;  // values become v / rms(v)
};

// K and V of a layer, [P, K, H], as in kernels/structures.py: of the type of activations; or int8, with the scale of
// each row and head, [P, K].
struct LayerCache {
  void *keys, *values;
  BFloat16 *key_scales, *value_scales;  // null unless int8
};

// Normalizes and rotates query and key heads, writes K and V to the rows' slots and queries to q_TNH. cos, sin:
// float32 [T, H / 2], or null.
void rope_and_store(Type type, const Heads& heads, const Paths& paths, const void* qkv, const float* cos,
                    const float* sin, const LayerCache& cache, void* q_TNH);

// Normalizes and rotates the keys of a text's rows, and writes them and values to their slots, for layer `layer`. A
// row of `made` has keys, then values, for each of `layers` layers.
void store_keys_and_values(Type type, const Heads& heads, const void* made, int64_t layer, int64_t layers,
                           const int64_t* slots, int64_t rows, const float* cos, const float* sin, void* k_cache_PKH,
                           void* v_cache_PKH);

void tree_attention(Type type, const Heads& heads, const Paths& paths, const void* q_TNH, const LayerCache& cache,
                    void* out_TNH);

constexpr int64_t kMostHead = 512;  // maximum elements of a head

// f(T{}) for the float type.
template <typename F>
void by_type(Type type, const F& f) {
  if (type == Type::kBFloat16) {
    f(BFloat16{});
  } else {
    f(float{});
  }
}

}  // namespace specinfer
