// RMSNorm with the residual sum in front of it, one pass over the row; and rows of an embedding table.

#include <algorithm>
#include <cmath>

#include "layer_ops.h"

namespace specinfer {
namespace {

constexpr int64_t kPieceElements = 1 << 11;  // worth being shared out

// kept = x + y, rounded to T; out = kept / rms(kept) * weight. Where there is no y, kept is x. kept may be x or out.
template <typename T>
void norm_row(const T* x, const T* y, const T* weight, T* kept, T* out, int64_t n, float eps) {
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

}  // namespace

void add_rms_norm(Type type, void* x, const void* y, const void* weight, void* out, const int64_t* chosen,
                  int64_t rows, int64_t n, float eps, bool in_place) {
  by_type(type, [&](auto element) {
    using T = decltype(element);
    Pool::get().split(rows, kPieceElements / n + 1, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        const int64_t from = (chosen == nullptr ? r : chosen[r]) * n;
        T* const to = static_cast<T*>(out) + r * n;
        T* const given = static_cast<T*>(x) + from;
        norm_row(given, y == nullptr ? nullptr : static_cast<const T*>(y) + from, static_cast<const T*>(weight),
                 in_place ? given : to, to, n, eps);
      }
    });
  });
}

void copy_rows(Type type, const void* x, const void* y, void* out, int64_t stride, int64_t rows, int64_t n) {
  by_type(type, [&](auto element) {
    using T = decltype(element);
    Pool::get().split(rows, kPieceElements / n + 1, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        const T* const from = static_cast<const T*>(x) + r * n;
        T* const to = static_cast<T*>(out) + r * stride;
        if (y == nullptr) {
          std::copy(from, from + n, to);
          continue;
        }
        const T* const added = static_cast<const T*>(y) + r * n;
        for (int64_t i = 0; i < n; i += kLanes) store(to + i, load(from + i, n - i) + load(added + i, n - i), n - i);
      }
    });
  });
}

bool embed(Type type, const void* table, int64_t entries, const int64_t* ids, float scale, void* out, int64_t rows,
           int64_t n) {
  if (std::any_of(ids, ids + rows, [=](int64_t id) { return id < 0 || id >= entries; })) return false;
  by_type(type, [&](auto element) {
    using T = decltype(element);
    Pool::get().split(rows, kPieceElements / n + 1, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        const T* const from = static_cast<const T*>(table) + ids[r] * n;
        T* const to = static_cast<T*>(out) + r * n;
        if (scale == 1.0f) {
          std::copy(from, from + n, to);
          continue;
        }
        for (int64_t i = 0; i < n; i += kLanes) store(to + i, load(from + i, n - i) * scale, n - i);
      }
    });
  });
  return true;
}

}  // namespace specinfer
