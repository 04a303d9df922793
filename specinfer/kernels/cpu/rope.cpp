// Prepares the rows of the qkv product for attention: normalizes and rotates query and key heads, writes K and V to
// their cache slots, and stores the queries.

#include <algorithm>
#include <cmath>

#include "layer_ops.h"
#include "quantized_rows.h"

namespace specinfer {
namespace {

constexpr int64_t kPieceElements = 1 << 10;  // minimum work of a job

// The operations on a query or key head; a null pointer means none.
struct Rotation {
  const float* cos;  // [rows, H / 2]
  const float* sin;
  float eps;
};

// 1 / rms(x), of n elements.
template <typename T>
float root_of(const T* x, int64_t n, float eps) {
  Floats squares = 0.0f;
  for (int64_t i = 0; i < n; i += kLanes) {
    const Floats v = load(x + i, n - i);
    squares = fma(v, v, squares);
  }
  return 1.0f / std::sqrt(sum(squares) / static_cast<float>(n) + eps);
}

// to = rotate(from / rms(from) * weight); the pair (i, i + H / 2) is rotated as a point. `root` is 1 / rms of the
// whole row that the head is a part of; 0: no such norm.
template <typename T>
void rotate_head(const T* from, const T* weight, float root, const Rotation& rotation, int64_t row, int64_t head,
                 T* to) {
  if (weight == nullptr && rotation.cos == nullptr) {
    std::copy(from, from + head, to);
    return;
  }
  alignas(64) float x[kMostHead + kLanes];
  Floats squares = 0.0f;
  for (int64_t i = 0; i < head; i += kLanes) {
    const Floats v = load(from + i, head - i);
    squares = fma(v, v, squares);
    store(x + i, v);
  }
  if (weight != nullptr) {
    const Floats scale =
        root > 0.0f ? root : 1.0f / std::sqrt(sum(squares) / static_cast<float>(head) + rotation.eps);
    for (int64_t i = 0; i < head; i += kLanes) {
      store(x + i, load(x + i) * scale * load(weight + i, head - i));
    }
  }
  if (rotation.cos == nullptr) {
    for (int64_t i = 0; i < head; i += kLanes) store(to + i, load(x + i), head - i);
    return;
  }
  const int64_t half = head / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = half - i;
    const Floats c = load(rotation.cos + row * half + i, n), s = load(rotation.sin + row * half + i, n);
    const Floats a = load(x + i), b = load(x + half + i);
    store(to + i, a * c - b * s, n);
    store(to + half + i, b * c + a * s, n);
  }
}

// to = from / rms(from), if `norm`.
template <typename T>
void store_value(const T* from, bool norm, float eps, int64_t head, T* to) {
  if (!norm) {
    std::copy(from, from + head, to);
    return;
  }
  const Floats root = root_of(from, head, eps);
  for (int64_t i = 0; i < head; i += kLanes) store(to + i, load(from + i, head - i) * root, head - i);
}

// Head `n` of a cache = what `write` writes, as int8 if there are scales.
template <typename T, typename F>
void keep(void* heads, BFloat16* scales, int64_t n, int64_t head, const F& write) {
  if (scales == nullptr) return write(static_cast<T*>(heads) + n * head);
  T exact[kMostHead];
  write(exact);
  scales[n] = quantize_head(exact, head, static_cast<int8_t*>(heads) + n * head);
}

}  // namespace

void rope_and_store(Type type, const Heads& heads, const Paths& paths, const void* qkv, const float* cos,
                    const float* sin, const LayerCache& cache, void* q) {
  const int64_t head = heads.head;
  const int64_t width = heads.heads * (heads.gated != 0 ? 2 : 1) + heads.kv_matrices * heads.kv_heads;
  const Rotation rotation{cos, sin, heads.eps};
  by_type(type, [&](auto element) {
    using T = decltype(element);
    Pool::get().split(paths.rows, kPieceElements / (width * head) + 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin, request = 0; r < end; ++r) {
        while (paths.requests[request].end <= r) ++request;
        const T* x = static_cast<const T*>(qkv) + r * width * head;
        const auto rotate = [&](int64_t count, const void* norm, const auto& put) {
          const float root = heads.whole_norms != 0 ? root_of(x, count * head, heads.eps) : 0.0f;
          const auto* weight = static_cast<const T*>(norm);
          for (int64_t n = 0; n < count; ++n, x += head) {
            put(n, [&](T* to) { rotate_head(x, weight, root, rotation, r, head, to); });
            if (heads.whole_norms != 0) weight += head;
          }
        };
        rotate(heads.heads, heads.q_norm, [&](int64_t n, const auto& write) {
          write(static_cast<T*>(q) + (r * heads.heads + n) * head);
        });
        if (heads.kv_matrices == 0) continue;
        const int64_t at = paths.own_slot(paths.requests[request], r) * heads.kv_heads;
        const T* v = heads.kv_matrices == 1 ? x : x + heads.kv_heads * head;
        rotate(heads.kv_heads, heads.k_norm, [&](int64_t n, const auto& write) {
          keep<T>(cache.keys, cache.key_scales, at + n, head, write);
        });
        for (int64_t n = 0; n < heads.kv_heads; ++n, v += head) {
          keep<T>(cache.values, cache.value_scales, at + n, head,
                  [&](T* to) { store_value(v, heads.value_norm != 0, heads.eps, head, to); });
        }
      }
    });
  });
}

void store_keys_and_values(Type type, const Heads& heads, const void* made, int64_t layer, int64_t layers,
                           const int64_t* slots, int64_t rows, const float* cos, const float* sin, void* k_cache,
                           void* v_cache) {
  const int64_t head = heads.head, width = heads.kv_heads * head;
  const Rotation rotation{cos, sin, heads.eps};
  by_type(type, [&](auto element) {
    using T = decltype(element);
    Pool::get().split(rows, kPieceElements / (2 * width) + 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* const x = static_cast<const T*>(made) + (r * layers + layer) * 2 * width;
        const int64_t at = slots[r] * width;
        for (int64_t n = 0; n < heads.kv_heads; ++n) {
          rotate_head(x + n * head, static_cast<const T*>(heads.k_norm), 0.0f, rotation, r, head,
                      static_cast<T*>(k_cache) + at + n * head);
        }
        std::copy(x + width, x + 2 * width, static_cast<T*>(v_cache) + at);
      }
    });
  });
}

}  // namespace specinfer
