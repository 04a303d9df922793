// Norms of rows after a residual sum: RMSNorm, in two passes over the row, and LayerNorm.

#include <cmath>

#include "layer_ops.h"

namespace specinfer {
namespace {

constexpr int64_t kPieceElements = 1 << 11;  // minimum work of a job

// kept = x + y, rounded to T; out = kept / rms(kept) * weight. Without a y, kept is x. kept may be x or out.
template <typename T>
void rms_norm_row(const T* x, const T* y, const T* weight, const T*, T* kept, T* out, int64_t n, float eps) {
  Floats squares = 0.0f;
  for (int64_t i = 0; i < n; i += kLanes) {
    Floats v = load(x + i, n - i);
    if (y != nullptr) {
      store(kept + i, v + load(y + i, n - i), n - i);
      v = load(kept + i, n - i);
    }
    squares = fma(v, v, squares);
  }
  const T* const summed = y == nullptr ? x : kept;
  const Floats scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(n) + eps);
  for (int64_t i = 0; i < n; i += kLanes) {
    store(out + i, load(summed + i, n - i) * scale * load(weight + i, n - i), n - i);
  }
}

// The same for LayerNorm: out = (kept - mean(kept)) / std(kept) * weight + bias, if there is one.
template <typename T>
void layer_norm_row(const T* x, const T* y, const T* weight, const T* bias, T* kept, T* out, int64_t n, float eps) {
  Floats total = 0.0f;
  for (int64_t i = 0; i < n; i += kLanes) {
    Floats v = load(x + i, n - i);
    if (y != nullptr) {
      store(kept + i, v + load(y + i, n - i), n - i);
      v = load(kept + i, n - i);
    }
    total = total + v;
  }
  const T* const summed = y == nullptr ? x : kept;
  const Floats mean = sum(total) / static_cast<float>(n);
  Floats squares = 0.0f;
  for (int64_t i = 0; i < n; i += kLanes) {
    // Lanes after the row hold zeros, which must not count.
    const Ints inside = lane_numbers() < static_cast<int32_t>(std::min<int64_t>(n - i, kLanes));
    const Floats v = select(inside, load(summed + i, n - i) - mean, Floats(0.0f));
    squares = fma(v, v, squares);
  }
  const Floats scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(n) + eps);
  for (int64_t i = 0; i < n; i += kLanes) {
    const Floats v = (load(summed + i, n - i) - mean) * scale * load(weight + i, n - i);
    store(out + i, bias == nullptr ? v : v + load(bias + i, n - i), n - i);
  }
}

}  // namespace

void add_norm(Type type, void* x, const void* y, const Norm& norm, void* out, const int64_t* chosen, int64_t rows,
              int64_t n, bool in_place) {
  by_type(type, [&](auto element) {
    using T = decltype(element);
    const auto norm_row = norm.centred != 0 ? layer_norm_row<T> : rms_norm_row<T>;
    const auto *const weight = static_cast<const T*>(norm.weight), *const bias = static_cast<const T*>(norm.bias);
    Pool::get().split(rows, kPieceElements / n + 1, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        const int64_t from = (chosen == nullptr ? r : chosen[r]) * n;
        T* const to = static_cast<T*>(out) + r * n;
        T* const given = static_cast<T*>(x) + from;
        norm_row(given, y == nullptr ? nullptr : static_cast<const T*>(y) + from, weight, bias, in_place ? given : to,
                 to, n, norm.eps);
      }
    });
  });
}

}  // namespace specinfer
