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

Left run_layers(const Layer* layers, int64_t count, Type type, const Paths& paths, const Rope ropes[3],
                const void* const* keys, const void* const* values, void* x, void* y, const Taps& taps,
                const AdaptedRows* adapted) {
  const Scratch::Mark mark;
  const int64_t rows = paths.rows, size = layers[0].qkv.inner, element = type == Type::kBFloat16 ? 2 : 4;
  int64_t wide = 0, inside = 0, attended = 0, beside = 0;
  for (int64_t i = 0; i < count; ++i) {
    wide = std::max({wide, layers[i].qkv.channels, layers[i].up.channels});
    inside = std::max(inside, layers[i].down.inner);
    attended = std::max(attended, layers[i].o.inner);
    if (layers[i].parallel != 0) beside = size;
  }
  const auto buffer = [&](int64_t width) { return Scratch::get().take<char>(rows * width * element); };
  void* const normed = buffer(size);
  void* const product = buffer(wide);
  void* const queries = buffer(attended);
  void* const inner = buffer(std::max(attended, inside));
  void* const other = buffer(beside);

  // x += added; then norm(x), or x itself if there is no norm.
  const auto entered = [&](const void* added, const Norm& norm) -> const void* {
    const Timed timed(Stage::kNorm);
    if (norm.weight == nullptr) {
      if (added != nullptr) copy_rows(type, x, added, x, size, rows, size);
      return x;
    }
    add_norm(type, x, added, norm, normed, nullptr, rows, size, true);
    return normed;
  };
  // The term still to be added to x after a block has made `made`, which may be overwritten.
  const auto left = [&](const Layer& layer, void* made, const Norm& after) -> const void* {
    const Timed timed(Stage::kNorm);
    if (after.weight != nullptr) add_norm(type, made, nullptr, after, made, nullptr, rows, size, true);
    if (layer.scale != 1.0f) scale_rows(type, made, layer.scale, rows, size);
    return made;
  };
  const auto tap = [&](int64_t layer, const void* added) {
    const Timed timed(Stage::kNorm);
    for (int64_t n = 0; n < taps.count; ++n) {
      if (taps.layers[n] != layer) continue;
      void* const to = static_cast<char*>(taps.out) + n * size * element;
      copy_rows(type, x, added, to, taps.count * size, rows, size);
    }
  };
  const auto times = [&](const Product& by, int64_t number, const void* from, void* to) {
    const Timed timed(Stage::kProduct);
    multiply_adapted(by, {from, type, rows}, adapted, number, to);
  };
  const auto attend = [&](int64_t i, const void* from, void* to) {
    const Layer& layer = layers[i];
    auto* const k = const_cast<void*>(keys[i]);
    auto* const v = const_cast<void*>(values[i]);
    times(layer.qkv, 4 * i, from, product);
    {
      const Timed timed(Stage::kRope);
      const Rope& own = ropes[layer.rope];
      if (layer.clip > 0.0f) clip_rows(type, product, layer.clip, rows, layer.qkv.channels);
      rope_and_store(type, layer.heads, paths, product, own.cos, own.sin, k, v, queries);
    }
    {
      const Timed timed(Stage::kAttention);
      tree_attention(type, layer.heads, paths, queries, k, v, inner);
    }
    times(layer.o, 4 * i + 1, inner, to);
  };
  const auto think = [&](int64_t i, const void* from, void* to) {
    const Layer& layer = layers[i];
    if (layer.experts != nullptr) return run_experts(*layer.experts, type, layer.activation, from, rows, to);
    times(layer.up, 4 * i + 2, from, product);
    {
      const Timed timed(Stage::kGate);
      (layer.gated != 0 ? gate : activate)(type, layer.activation, product, inner, rows, layer.down.inner);
    }
    times(layer.down, 4 * i + 3, inner, to);
  };

  const void* added = nullptr;
  for (int64_t i = 0; i < count; ++i) {
    const Layer& layer = layers[i];
    const void* given = entered(added, layer.before_attention);
    tap(i, nullptr);  // everything has been added to x
    attend(i, given, y);
    if (layer.parallel != 0) {
      if (layer.before_mlp.weight != nullptr) given = entered(nullptr, layer.before_mlp);
      think(i, given, other);
      const Timed timed(Stage::kNorm);
      copy_rows(type, y, other, y, size, rows, size);
    } else {
      added = left(layer, y, layer.after_attention);
      think(i, entered(added, layer.before_mlp), y);
    }
    if (lost(layer.experts != nullptr ? layer.experts->down[0] : layer.down)) return {nullptr, true};
    added = left(layer, y, layer.after_mlp);
  }
  tap(count, added);
  return {added, false};
}

}  // namespace specinfer
