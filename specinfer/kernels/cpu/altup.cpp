// The residual streams of Gemma 3n (models/altup.py), row by row: their prediction before a layer, their correction
// after it, and gates of which few remain. S streams of D elements are [T, S, D].

#include <algorithm>
#include <cmath>

#include "layer_ops.h"

namespace specinfer {
namespace {

constexpr int64_t kPieceElements = 1 << 11;  // minimum work of a job

// to[c] = the sum of coefficients[c] * tanh(routed / D), [count, S].
void factors_of(const Streams& streams, const float* routed, const float* coefficients, int64_t count, float* to) {
  float modes[kMostStreams];
  for (int64_t s = 0; s < streams.count; ++s) modes[s] = std::tanh(routed[s] / static_cast<float>(streams.size));
  for (int64_t c = 0; c < count; ++c) {
    to[c] = 0.0f;
    for (int64_t s = 0; s < streams.count; ++s) to[c] += coefficients[c * streams.count + s] * modes[s];
  }
}

}  // namespace

void predict_streams(Type type, const Streams& streams, const void* x, const float* routed, const float* coefficients,
                     void* out, void* active, int64_t rows) {
  const int64_t count = streams.count, n = streams.size;
  by_type(type, [&](auto element) {
    using T = decltype(element);
    Pool::get().split(rows, kPieceElements / (count * n) + 1, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        float factors[kMostStreams * kMostStreams];
        factors_of(streams, routed + r * count, coefficients, count * count, factors);
        const T* const from = static_cast<const T*>(x) + r * count * n;
        T* const to = static_cast<T*>(out) + r * count * n;
        for (int64_t j = 0; j < count; ++j) {
          for (int64_t i = 0; i < n; i += kLanes) {
            Floats v = load(from + j * n + i, n - i);
            for (int64_t k = 0; k < count; ++k) {
              v = fma(load(from + k * n + i, n - i), Floats(factors[j * count + k]), v);
            }
            store(to + j * n + i, v, n - i);
          }
        }
        std::copy_n(to + streams.active * n, n, static_cast<T*>(active) + r * n);
      }
    });
  });
}

void correct_streams(Type type, const Streams& streams, void* x, const float* routed, const float* coefficients,
                     const void* before, const void* behind, int64_t rows) {
  const int64_t count = streams.count, n = streams.size;
  by_type(type, [&](auto element) {
    using T = decltype(element);
    Pool::get().split(rows, kPieceElements / (count * n) + 1, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        float factors[kMostStreams];
        factors_of(streams, routed + r * count, coefficients, count, factors);
        const T* const was = static_cast<const T*>(before) + r * n;
        const T* const is = static_cast<const T*>(behind) + r * n;
        for (int64_t j = 0; j < count; ++j) {
          T* const own = static_cast<T*>(x) + (r * count + j) * n;
          for (int64_t i = 0; i < n; i += kLanes) {
            const Floats moved = load(is + i, n - i) - load(was + i, n - i);
            store(own + i, fma(moved, Floats(factors[j] + 1.0f), load(own + i, n - i)), n - i);
          }
        }
      }
    });
  });
}

void cut_off(Type type, void* gates, int64_t stride, float deviations, int64_t rows, int64_t n) {
  by_type(type, [&](auto element) {
    using T = decltype(element);
    Pool::get().split(rows, kPieceElements / n + 1, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        T* const own = static_cast<T*>(gates) + r * stride;
        Floats total = 0.0f, squares = 0.0f;
        for (int64_t i = 0; i < n; i += kLanes) total = total + load(own + i, n - i);
        const float mean = sum(total) / static_cast<float>(n);
        for (int64_t i = 0; i < n; i += kLanes) {
          const Ints inside = lane_numbers() < static_cast<int32_t>(std::min<int64_t>(n - i, kLanes));
          const Floats apart = select(inside, load(own + i, n - i) - mean, Floats(0.0f));
          squares = fma(apart, apart, squares);
        }
        const float least = mean + deviations * std::sqrt(sum(squares) / static_cast<float>(n));
        for (int64_t i = 0; i < n; i += kLanes) {
          const Floats v = load(own + i, n - i) - least;
          store(own + i, select(v < 0.0f, Floats(0.0f), v), n - i);
        }
      }
    });
  });
}

}  // namespace specinfer
