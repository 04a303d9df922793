// act(gate) * up from rows that hold gate and up side by side.

#include <algorithm>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops.h"
#include "vector.h"

namespace {

using namespace specinfer;

constexpr int64_t kPiece = 1 << 12;    // elements that are shared out together
constexpr int64_t kThreadPieces = 12;  // worth another thread

Floats silu(Floats x) { return x / (1.0f + exp(-x)); }

// 0.5 x (1 + tanh(u)) is x / (1 + e^-2u), with u = sqrt(2 / pi) (x + 0.044715 x^3).
Floats gelu_tanh(Floats x) {
  const Floats u = 0.7978845608f * (x + 0.044715f * x * x * x);
  return x / (1.0f + exp(-2.0f * u));
}

template <typename T, Floats (*act)(Floats)>
at::Tensor gated_rows(const at::Tensor& gate_up) {
  const int64_t n = gate_up.size(1) / 2, pieces = (n + kPiece - 1) / kPiece;
  at::Tensor out = at::empty({gate_up.size(0), n}, gate_up.options());
  const T* const from = gate_up.const_data_ptr<T>();
  T* const to = out.mutable_data_ptr<T>();
  at::parallel_for(0, gate_up.size(0) * pieces, kThreadPieces, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t row = piece / pieces, first = piece % pieces * kPiece, last = std::min(n, first + kPiece);
      const T* const gate = from + row * 2 * n;
      for (int64_t i = first; i < last; i += kLanes) {
        const Floats up = load(gate + n + i, last - i);
        store(to + row * n + i, act(load(gate + i, last - i)) * up, last - i);
      }
    }
  });
  return out;
}

template <Floats (*act)(Floats)>
at::Tensor gated(const at::Tensor& gate_up) {
  TORCH_CHECK(gate_up.dim() == 2 && gate_up.is_contiguous() && gate_up.size(1) % 2 == 0,
              "gate_up must be contiguous rows of even size, got ", gate_up.sizes());
  if (gate_up.scalar_type() == at::kBFloat16) return gated_rows<BFloat16, act>(gate_up);
  TORCH_CHECK(gate_up.scalar_type() == at::kFloat, "gate_up must be bfloat16 or float32, got ",
              gate_up.scalar_type());
  return gated_rows<float, act>(gate_up);
}

}  // namespace

at::Tensor specinfer::silu_mul(const at::Tensor& gate_up) { return gated<silu>(gate_up); }
at::Tensor specinfer::gelu_tanh_mul(const at::Tensor& gate_up) { return gated<gelu_tanh>(gate_up); }

TORCH_LIBRARY_FRAGMENT(specinfer, m) {
  m.def("silu_mul(Tensor gate_up) -> Tensor");
  m.impl("silu_mul", c10::DispatchKey::CPU, TORCH_FN(specinfer::silu_mul));
  m.def("gelu_tanh_mul(Tensor gate_up) -> Tensor");
  m.impl("gelu_tanh_mul", c10::DispatchKey::CPU, TORCH_FN(specinfer::gelu_tanh_mul));
}
