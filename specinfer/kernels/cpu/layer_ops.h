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

// out = x + y, if there is a y; rows of out are `stride` elements apart. out may be x.
void copy_rows(Type type, const void* x_TD, const void* y_TD, void* out, int64_t stride, int64_t rows, int64_t size);

// x = x * factor.
void scale_rows(Type type, void* x_TD, float factor, int64_t rows, int64_t size);

// Clamps x to [-limit, limit].
void clip_rows(Type type, void* x_TD, float limit, int64_t rows, int64_t size);

// Numbered as in kernels/structures.py.
enum class Activation : int32_t { kSilu, kGeluTanh, kRelu, kGelu, kClampedSwish, kActivations };

// out = act(gate) * up; a row holds gate, then up. With kClampedSwish up becomes clamp(up, -7, 7) + 1.
void gate(Type type, Activation activation, const void* gate_up_T2F, void* out_TF, int64_t rows, int64_t size);

// out = act(x).
void activate(Type type, Activation activation, const void* x_TF, void* out_TF, int64_t rows, int64_t size);

// out = table rows of `ids`, times scale; returns false and does nothing if an id is outside the table.
bool embed(Type type, const void* table_VD, int64_t entries, const int64_t* ids_T, float scale, void* out_TD,
           int64_t rows, int64_t size);

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
};

// Normalizes and rotates query and key heads, writes K and V to the rows' slots and queries to q_TNH. cos, sin:
// float32 [T, H / 2], or null.
void rope_and_store(Type type, const Heads& heads, const Paths& paths, const void* qkv, const float* cos,
                    const float* sin, void* k_cache_PKH, void* v_cache_PKH, void* q_TNH);

// Normalizes and rotates the keys of a text's rows, and writes them and values to their slots, for layer `layer`. A
// row of `made` has keys, then values, for each of `layers` layers.
void store_keys_and_values(Type type, const Heads& heads, const void* made, int64_t layer, int64_t layers,
                           const int64_t* slots, int64_t rows, const float* cos, const float* sin, void* k_cache_PKH,
                           void* v_cache_PKH);

void tree_attention(Type type, const Heads& heads, const Paths& paths, const void* q_TNH, const void* k_cache_PKH,
                    const void* v_cache_PKH, void* out_TNH);

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
