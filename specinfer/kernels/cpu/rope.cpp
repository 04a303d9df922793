// From the rows of the qkv product to attention: norm and turn each query and key head, write K and V to
// their cache slots, return the queries.

#include <algorithm>
#include <cmath>
#include <optional>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops.h"
#include "vector.h"

namespace {

using namespace specinfer;

constexpr int64_t kThreadElements = 1 << 15;  // worth another thread
constexpr int64_t kMaxHead = 512;

// What is done to a query or key head; null pointers where a model does not have it.
struct Turn {
  const float* cos;  // [rows, H / 2]
  const float* sin;
  float eps;
};

// to = rotate(from / rms(from) * weight); the pair (i, i + H / 2) is a point that is turned.
template <typename T>
void turn_head(const T* from, const T* weight, const Turn& turn, int64_t row, int64_t head, T* to) {
  if (weight == nullptr && turn.cos == nullptr) {
    std::copy(from, from + head, to);
    return;
  }
  alignas(64) float x[kMaxHead + kLanes];
  Floats squares{};
  for (int64_t i = 0; i < head; i += kLanes) {
    const Floats v = load(from + i, head - i);
    squares = fma(v, v, squares);
    store(x + i, v);
  }
  if (weight != nullptr) {
    const Floats scale = broadcast(1.0f / std::sqrt(sum(squares) / static_cast<float>(head) + turn.eps));
    for (int64_t i = 0; i < head; i += kLanes) {
      store(x + i, load(x + i) * scale * load(weight + i, head - i));
    }
  }
  if (turn.cos == nullptr) {
    for (int64_t i = 0; i < head; i += kLanes) store(to + i, load(x + i), head - i);
    return;
  }
  const int64_t half = head / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = half - i;
    const Floats c = load(turn.cos + row * half + i, n), s = load(turn.sin + row * half + i, n);
    const Floats a = load(x + i), b = load(x + half + i);
    store(to + i, a * c - b * s, n);
    store(to + half + i, b * c + a * s, n);
  }
}

struct Norms {
  const std::optional<at::Tensor>&q, &k;
};

template <typename T>
at::Tensor store_rows(const at::Tensor& qkv, const Norms& norms, const Turn& turn, at::Tensor& k_cache,
                      at::Tensor& v_cache, const at::Tensor& slots) {
  const int64_t rows = qkv.size(0), kv_heads = k_cache.size(1), head = k_cache.size(2);
  const int64_t width = qkv.size(1) / head, heads = width - 2 * kv_heads;
  at::Tensor q = at::empty({rows, heads, head}, qkv.options());
  const T* const from = qkv.const_data_ptr<T>();
  const T* const q_weight = norms.q ? norms.q->const_data_ptr<T>() : nullptr;
  const T* const k_weight = norms.k ? norms.k->const_data_ptr<T>() : nullptr;
  const int32_t* const slot = slots.const_data_ptr<int32_t>();
  T* const q_data = q.mutable_data_ptr<T>();
  T* const k_data = k_cache.mutable_data_ptr<T>();
  T* const v_data = v_cache.mutable_data_ptr<T>();
  // A lone row that is run as two writes its slot twice: from one thread, then.
  const int64_t grain = std::max<int64_t>(2, kThreadElements / (width * head));
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* x = from + r * width * head;
      for (int64_t n = 0; n < heads; ++n, x += head) {
        turn_head(x, q_weight, turn, r, head, q_data + (r * heads + n) * head);
      }
      const int64_t at = slot[r] * kv_heads * head;
      for (int64_t n = 0; n < kv_heads; ++n, x += head) {
        turn_head(x, k_weight, turn, r, head, k_data + at + n * head);
      }
      std::copy(x, x + kv_heads * head, v_data + at);
    }
  });
  return q;
}

}  // namespace

at::Tensor specinfer::rope_and_store(const at::Tensor& qkv, const std::optional<at::Tensor>& q_norm,
                                     const std::optional<at::Tensor>& k_norm, double eps,
                                     const std::optional<at::Tensor>& cos, const std::optional<at::Tensor>& sin,
                                     at::Tensor k_cache, at::Tensor v_cache, const at::Tensor& slots) {
  const auto dtype = qkv.scalar_type();
  TORCH_CHECK(k_cache.dim() == 3 && k_cache.is_contiguous() && v_cache.sizes() == k_cache.sizes() &&
                  v_cache.is_contiguous() && k_cache.scalar_type() == dtype && v_cache.scalar_type() == dtype,
              "the caches must be contiguous [P, K, H] of qkv's dtype, got ", k_cache.sizes(), " and ",
              v_cache.sizes());
  const int64_t kv_heads = k_cache.size(1), head = k_cache.size(2);
  TORCH_CHECK(head <= kMaxHead, "a head has at most ", kMaxHead, " elements, got ", head);
  TORCH_CHECK(qkv.dim() == 2 && qkv.is_contiguous() && qkv.size(1) % head == 0 &&
                  qkv.size(1) > 2 * kv_heads * head,
              "qkv must be contiguous rows of whole heads, got ", qkv.sizes(), " for heads of ", head);
  TORCH_CHECK(slots.scalar_type() == at::kInt && slots.is_contiguous() && slots.numel() == qkv.size(0),
              "slots must be int32, one a row, got ", slots.sizes());
  for (const int32_t slot : c10::ArrayRef<int32_t>(slots.const_data_ptr<int32_t>(), slots.numel())) {
    TORCH_CHECK(0 <= slot && slot < k_cache.size(0), "slot ", slot, " of a cache of ", k_cache.size(0));
  }
  for (const auto* weight : {&q_norm, &k_norm}) {
    TORCH_CHECK(!*weight || ((*weight)->numel() == head && (*weight)->is_contiguous() &&
                             (*weight)->scalar_type() == dtype),
                "a head norm's weight must be [", head, "] of qkv's dtype");
  }
  TORCH_CHECK(cos.has_value() == sin.has_value(), "cos and sin come together");
  for (const auto* table : {&cos, &sin}) {
    TORCH_CHECK(!*table || ((*table)->scalar_type() == at::kFloat && (*table)->is_contiguous() &&
                            (*table)->numel() == qkv.size(0) * (head / 2) && head % 2 == 0),
                "cos and sin must be float32 [rows, ", head / 2, "]");
  }
  const Turn turn{cos ? cos->const_data_ptr<float>() : nullptr, sin ? sin->const_data_ptr<float>() : nullptr,
                  static_cast<float>(eps)};
  const Norms norms{q_norm, k_norm};
  if (dtype == at::kBFloat16) return store_rows<BFloat16>(qkv, norms, turn, k_cache, v_cache, slots);
  TORCH_CHECK(dtype == at::kFloat, "qkv must be bfloat16 or float32, got ", dtype);
  return store_rows<float>(qkv, norms, turn, k_cache, v_cache, slots);
}

TORCH_LIBRARY_FRAGMENT(specinfer, m) {
  m.def(
      "rope_and_store(Tensor qkv, Tensor? q_norm, Tensor? k_norm, float eps, Tensor? cos, Tensor? sin, "
      "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots) -> Tensor");
  m.impl("rope_and_store", c10::DispatchKey::CPU, TORCH_FN(specinfer::rope_and_store));
}
