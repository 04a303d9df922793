// Element-wise operations on rows: copies with the residual sum, scales, limits, rows of an embedding table.

#include <algorithm>

#include "layer_ops.h"
#include "scratch.h"

namespace specinfer {
namespace {

constexpr int64_t kPieceElements = 1 << 11;  // minimum work of a job

// x = f(x).
template <typename F>
void change_rows(Type type, void* x, int64_t rows, int64_t n, const F& f) {
  by_type(type, [&](auto element) {
    using T = decltype(element);
    Pool::get().split(rows, kPieceElements / n + 1, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        T* const row = static_cast<T*>(x) + r * n;
        for (int64_t i = 0; i < n; i += kLanes) store(row + i, f(load(row + i, n - i)), n - i);
      }
    });
  });
}

}  // namespace

void scale_rows(Type type, void* x, float factor, int64_t rows, int64_t n) {
  change_rows(type, x, rows, n, [=](Floats v) { return v * factor; });
}

void clip_rows(Type type, void* x, float limit, int64_t rows, int64_t n) {
  change_rows(type, x, rows, n, [=](Floats v) {
    v = select(v > limit, Floats(limit), v);
    return select(v < -limit, Floats(-limit), v);
  });
}

const float* widened_rows(Type type, const void* x, int64_t rows, int64_t n) {
  if (type == Type::kFloat32) return static_cast<const float*>(x);
  auto* const to = Scratch::get().take<float>(rows * n);
  const auto* const from = static_cast<const BFloat16*>(x);
  Pool::get().split(rows, kPieceElements / n + 1, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      for (int64_t i = r * n, end = i + n; i < end; i += kLanes) store(to + i, load(from + i, end - i), end - i);
    }
  });
  return to;
}

void copy_rows(Type type, const void* x, const void* y, void* out, int64_t stride, int64_t rows, int64_t n) {
  by_type(type, [&](auto element) {
    using T = decltype(element);
    Pool::get().split(rows, kPieceElements / n + 1, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        const T* const from = static_cast<const T*>(x) + r * n;
        T* const to = static_cast<T*>(out) + r * stride;
        if (y == nullptr) {
          if (to != from) std::copy(from, from + n, to);
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
