// act(gate) * up for rows that hold gate and up side by side or apart, and act(x) for rows without a gate.

#include <algorithm>

#include "layer_ops.h"

namespace specinfer {
namespace {

constexpr int64_t kPart = 1 << 12;     // elements computed together
constexpr int64_t kPieceElements = 1 << 10;  // minimum work of a job

Floats silu(Floats x) { return x / (exp(Floats(0.0f) - x) + 1.0f); }

// 0.5 x (1 + tanh(u)) is x / (1 + e^-2u), with u = sqrt(2 / pi) (x + 0.044715 x^3).
Floats gelu_tanh(Floats x) {
  const Floats u = Floats(0.7978845608f) * (x + Floats(0.044715f) * x * x * x);
  return x / (exp(Floats(-2.0f) * u) + 1.0f);
}

Floats relu(Floats x) { return select(x < 0.0f, Floats(0.0f), x); }

Floats relu2(Floats x) { return relu(x) * relu(x); }

// x times the normal CDF at x. The CDF at -|x| is e^(-x^2 / 2) times t P(t), with t = 1 / (1 + 0.35 |x|), to a
// relative error of 3e-7.
Floats gelu(Floats x) {
  const Floats a = select(x < 0.0f, Floats(0.0f) - x, x);
  const Floats t = Floats(1.0f) / fma(a, Floats(0.35f), Floats(1.0f));
  Floats p = -0.0291461349f;
  p = fma(p, t, Floats(0.14397268f));
  p = fma(p, t, Floats(-0.255716264f));
  p = fma(p, t, Floats(0.159176439f));
  p = fma(p, t, Floats(-0.0231113769f));
  p = fma(p, t, Floats(0.105508648f));
  p = fma(p, t, Floats(0.119832709f));
  p = fma(p, t, Floats(0.139861897f));
  p = fma(p, t, Floats(0.139621407f));
  const Floats below = p * t * exp(Floats(-0.5f) * x * x);
  return select(x < 0.0f, x * below, x * (Floats(1.0f) - below));
}

// gpt-oss: x / (1 + e^(-1.702 x)) with x = min(x, 7), times clamp(up, -7, 7) + 1.
constexpr float kClamp = 7.0f;

Floats clamped_swish(Floats x) {
  x = select(x > kClamp, Floats(kClamp), x);
  return x / (exp(Floats(-1.702f) * x) + 1.0f);
}

Floats as_it_is(Floats up) { return up; }

Floats clamped_up(Floats up) {
  up = select(up > kClamp, Floats(kClamp), up);
  return select(up < -kClamp, Floats(-kClamp), up) + 1.0f;
}

// Rows, `stride` elements apart.
struct Apart {
  const void* first;
  int64_t stride;
};

// Applies `beside` to up.
template <Floats (*act)(Floats), Floats (*beside)(Floats), bool Gated, typename T>
void act_on_rows(const Apart& from, const Apart& up, T* to, int64_t rows, int64_t n) {
  const int64_t parts = (n + kPart - 1) / kPart;
  Pool::get().split(rows * parts, kPieceElements / std::min(n, kPart) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const int64_t row = part / parts, first = part % parts * kPart, last = std::min(n, first + kPart);
      const T* const given = static_cast<const T*>(from.first) + row * from.stride;
      const T* const by = static_cast<const T*>(up.first) + row * up.stride;
      for (int64_t i = first; i < last; i += kLanes) {
        Floats v = act(load(given + i, last - i));
        if constexpr (Gated) v = v * beside(load(by + i, last - i));
        store(to + row * n + i, v, last - i);
      }
    }
  });
}

template <bool Gated>
void act_on(Type type, Activation activation, const Apart& from, const Apart& up, void* to, int64_t rows, int64_t n) {
  by_type(type, [&](auto element) {
    using T = decltype(element);
    constexpr decltype(&act_on_rows<silu, as_it_is, Gated, T>) ways[static_cast<int>(Activation::kActivations)] = {
        act_on_rows<silu, as_it_is, Gated, T>, act_on_rows<gelu_tanh, as_it_is, Gated, T>,
        act_on_rows<relu, as_it_is, Gated, T>, act_on_rows<gelu, as_it_is, Gated, T>,
        act_on_rows<clamped_swish, clamped_up, Gated, T>, act_on_rows<relu2, as_it_is, Gated, T>};
    ways[static_cast<int>(activation)](from, up, static_cast<T*>(to), rows, n);
  });
}

}  // namespace

void gate(Type type, Activation activation, const void* gate_up, void* out, int64_t rows, int64_t n) {
  const int64_t bytes = type == Type::kBFloat16 ? 2 : 4;
  const void* const up = static_cast<const char*>(gate_up) + n * bytes;
  act_on<true>(type, activation, {gate_up, 2 * n}, {up, 2 * n}, out, rows, n);
}

void gate_beside(Type type, Activation activation, const void* gate, const void* up, int64_t stride, void* out,
                 int64_t rows, int64_t n) {
  act_on<true>(type, activation, {gate, n}, {up, stride}, out, rows, n);
}

void activate(Type type, Activation activation, const void* x, void* out, int64_t rows, int64_t n) {
  act_on<false>(type, activation, {x, n}, {x, n}, out, rows, n);
}

void open_values(Type type, const void* gates, int64_t stride, void* values, int64_t rows, int64_t n) {
  by_type(type, [&](auto element) {
    using T = decltype(element);
    Pool::get().split(rows, kPieceElements / n + 1, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        const T* const by = static_cast<const T*>(gates) + r * stride;
        T* const row = static_cast<T*>(values) + r * n;
        for (int64_t i = 0; i < n; i += kLanes) {
          const Floats over = exp(Floats(0.0f) - load(by + i, n - i)) + 1.0f;
          store(row + i, load(row + i, n - i) / over, n - i);
        }
      }
    });
  });
}

}  // namespace specinfer
