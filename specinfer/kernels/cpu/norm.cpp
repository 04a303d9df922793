// RMSNorm with the residual sum in front of it, one pass over the row.

#include <cmath>
#include <optional>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "ops.h"
#include "vector.h"

namespace {

using namespace specinfer;

constexpr int64_t kThreadElements = 1 << 15;  // worth another thread

// x += y, rounded to T as the sum is kept; out = x / rms(x) * weight.
template <typename T>
void norm_row(T* x, const T* y, const T* weight, T* out, int64_t n, float eps) {
  Floats squares{};
  for (int64_t i = 0; i < n; i += kLanes) {
    Floats v = load(x + i, n - i);
    if (y != nullptr) {
      store(x + i, v + load(y + i, n - i), n - i);
      v = load(x + i, n - i);
    }
    squares = fma(v, v, squares);
  }
  const Floats scale = broadcast(1.0f / std::sqrt(sum(squares) / static_cast<float>(n) + eps));
  for (int64_t i = 0; i < n; i += kLanes) {
    store(out + i, load(x + i, n - i) * scale * load(weight + i, n - i), n - i);
  }
}

template <typename T>
at::Tensor norm_rows(const at::Tensor& x, const at::Tensor* y, const at::Tensor& weight, float eps) {
  at::Tensor out = at::empty_like(x);
  const int64_t n = x.size(1);
  T* const x_data = x.mutable_data_ptr<T>();
  const T* const y_data = y == nullptr ? nullptr : y->const_data_ptr<T>();
  const T* const weight_data = weight.const_data_ptr<T>();
  T* const out_data = out.mutable_data_ptr<T>();
  at::parallel_for(0, x.size(0), std::max<int64_t>(1, kThreadElements / n), [&](int64_t first, int64_t last) {
    for (int64_t r = first * n; r < last * n; r += n) {
      norm_row(x_data + r, y_data == nullptr ? nullptr : y_data + r, weight_data, out_data + r, n, eps);
    }
  });
  return out;
}

}  // namespace

at::Tensor specinfer::add_rms_norm(at::Tensor x, const std::optional<at::Tensor>& y, const at::Tensor& weight,
                                   double eps) {
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous(), "x must be contiguous rows, got ", x.sizes());
  TORCH_CHECK(weight.dim() == 1 && weight.size(0) == x.size(1) && weight.is_contiguous() &&
                  weight.scalar_type() == x.scalar_type(),
              "weight must be [", x.size(1), "] of x's dtype, got ", weight.sizes());
  if (y) {
    TORCH_CHECK(y->sizes() == x.sizes() && y->is_contiguous() && y->scalar_type() == x.scalar_type(),
                "y must be as x is, got ", y->sizes());
  }
  const at::Tensor* const addend = y ? &*y : nullptr;
  if (x.scalar_type() == at::kBFloat16) return norm_rows<BFloat16>(x, addend, weight, static_cast<float>(eps));
  TORCH_CHECK(x.scalar_type() == at::kFloat, "x must be bfloat16 or float32, got ", x.scalar_type());
  return norm_rows<float>(x, addend, weight, static_cast<float>(eps));
}

TORCH_LIBRARY_FRAGMENT(specinfer, m) {
  m.def("add_rms_norm(Tensor(a!) x, Tensor? y, Tensor weight, float eps) -> Tensor");
  m.impl("add_rms_norm", c10::DispatchKey::CPU, TORCH_FN(specinfer::add_rms_norm));
}
