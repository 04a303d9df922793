#include "layers.h"

#include "scratch.h"

namespace specinfer {

Rope Rotations::of(const int64_t* at, int64_t rows, int64_t half) const {
  auto* const own_cos = Scratch::get().take<float>(rows * half);
  auto* const own_sin = Scratch::get().take<float>(rows * half);
  for (int64_t r = 0; r < rows; ++r) {
    std::copy_n(cos + at[r] * half, half, own_cos + r * half);
    std::copy_n(sin + at[r] * half, half, own_sin + r * half);
  }
  return {own_cos, own_sin};
}

bool run_layers(const Layer* layers, int64_t count, Type type, bool gelu, float eps, const Paths& paths,
                const Rope rope[2], const void* const* keys, const void* const* values, void* x, void* y,
                const Taps& taps) {
  const Scratch::Mark mark;
  const int64_t rows = paths.rows, size = layers[0].qkv.inner, element = type == Type::kBFloat16 ? 2 : 4;
  int64_t wide = 0, gated = 0, attended = 0;
  for (int64_t i = 0; i < count; ++i) {
    wide = std::max({wide, layers[i].qkv.channels, layers[i].gate_up.channels});
    gated = std::max(gated, layers[i].down.inner);
    attended = std::max(attended, layers[i].o.inner);
  }
  const auto buffer = [&](int64_t width) { return Scratch::get().take<char>(rows * width * element); };
  void* const normed = buffer(size);
  void* const product = buffer(wide);
  void* const queries = buffer(attended);
  void* const inner = buffer(std::max(attended, gated));

  const auto norm = [&](const void* added, const void* weight) {
    const Timed timed(Stage::kNorm);
    add_rms_norm(type, x, added, weight, normed, nullptr, rows, size, eps, true);
  };
  const auto norm_alone = [&](void* in_place, const void* weight) {
    const Timed timed(Stage::kNorm);
    add_rms_norm(type, in_place, nullptr, weight, in_place, nullptr, rows, size, eps, true);
  };
  const auto tap = [&](int64_t layer, const void* added) {
    const Timed timed(Stage::kNorm);
    for (int64_t n = 0; n < taps.count; ++n) {
      if (taps.layers[n] != layer) continue;
      void* const to = static_cast<char*>(taps.out) + n * size * element;
      copy_rows(type, x, added, to, taps.count * size, rows, size);
    }
  };
  const auto times = [&](const Product& by, const void* from, void* to) {
    const Timed timed(Stage::kProduct);
    multiply(by, {from, type, rows}, to);
  };

  const void* added = nullptr;
  for (int64_t i = 0; i < count; ++i) {
    const Layer& layer = layers[i];
    auto* const k = const_cast<void*>(keys[i]);
    auto* const v = const_cast<void*>(values[i]);
    norm(added, layer.before_attention);
    tap(i, nullptr);  // the norm has added what was to be added
    times(layer.qkv, normed, product);
    {
      const Timed timed(Stage::kRope);
      const Rope& own = rope[layer.local != 0 ? 1 : 0];
      rope_and_store(type, layer.heads, paths, product, own.cos, own.sin, k, v, queries);
    }
    {
      const Timed timed(Stage::kAttention);
      tree_attention(type, layer.heads, paths, queries, k, v, inner);
    }
    times(layer.o, inner, y);
    if (layer.after_attention != nullptr) norm_alone(y, layer.after_attention);
    norm(y, layer.before_mlp);
    times(layer.gate_up, normed, product);
    {
      const Timed timed(Stage::kGate);
      gate(type, gelu, product, inner, rows, layer.down.inner);
    }
    times(layer.down, inner, y);
    if (lost(layer.down)) return false;
    if (layer.after_mlp != nullptr) norm_alone(y, layer.after_mlp);
    added = y;
  }
  tap(count, added);
  return true;
}

}  // namespace specinfer
