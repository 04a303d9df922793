// act(gate) * up from rows that hold gate and up side by side.

#include "layer_ops.h"

namespace specinfer {
namespace {

constexpr int64_t kPart = 1 << 12;     // elements that are computed together
constexpr int64_t kPieceElements = 1 << 10;  // worth being shared out

Floats silu(Floats x) { return x / (exp(Floats(0.0f) - x) + 1.0f); }

// 0.5 x (1 + tanh(u)) is x / (1 + e^-2u), with u = sqrt(2 / pi) (x + 0.044715 x^3).
Floats gelu_tanh(Floats x) {
  const Floats u = Floats(0.7978845608f) * (x + Floats(0.044715f) * x * x * x);
  return x / (exp(Floats(-2.0f) * u) + 1.0f);
}

template <Floats (*act)(Floats), typename T>
void gated_rows(const T* from, T* to, int64_t rows, int64_t n) {
  const int64_t parts = (n + kPart - 1) / kPart;
  Pool::get().split(rows * parts, kPieceElements / std::min(n, kPart) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const int64_t row = part / parts, first = part % parts * kPart, last = std::min(n, first + kPart);
      const T* const gate = from + row * 2 * n;
      for (int64_t i = first; i < last; i += kLanes) {
        const Floats up = load(gate + n + i, last - i);
        store(to + row * n + i, act(load(gate + i, last - i)) * up, last - i);
      }
    }
  });
}

}  // namespace

void gate(Type type, bool gelu, const void* gate_up, void* out, int64_t rows, int64_t n) {
  by_type(type, [&](auto element) {
    using T = decltype(element);
    const auto* const from = static_cast<const T*>(gate_up);
    gelu ? gated_rows<gelu_tanh>(from, static_cast<T*>(out), rows, n)
         : gated_rows<silu>(from, static_cast<T*>(out), rows, n);
  });
}

}  // namespace specinfer
