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

namespace {

// True if a rank is lost that shares one of the layer's sums.
bool layer_lost(const Layer& layer) {
  const Experts* const experts = layer.experts;
  return lost(layer.o) || lost(experts != nullptr ? experts->down[0] : layer.down) ||
         (layer.recurrence != nullptr && lost(layer.recurrence->last));
}

}  // namespace

int64_t Layer::size() const {
  if (qkv.weight != nullptr) return qkv.inner;
  if (recurrence != nullptr) return recurrence->first.inner;
  return experts != nullptr ? experts->router.inner : up.inner;
}

Left run_layers(const Layer* layers, int64_t count, Type type, const Paths& paths, const Rope ropes[3],
                const LayerCache* caches, void* x, void* y, const Taps& taps,
                const AdaptedRows* adapted, const States* states, const PerLayerInputs& per_layer) {
  const Scratch::Mark mark;
  const int64_t rows = paths.rows, size = layers[0].size(), element = type == Type::kBFloat16 ? 2 : 4;
  int64_t wide = 0, inside = 0, attended = 0, beside = 0;
  for (int64_t i = 0; i < count; ++i) {
    wide = std::max({wide, layers[i].qkv.channels, layers[i].up.channels});
    inside = std::max(inside, layers[i].down.inner);
    attended = std::max(attended, layers[i].o.inner);
    if (const Recurrence* const its = layers[i].recurrence) {
      wide = std::max(wide, its->first.channels);
      inside = std::max(inside, its->last.inner);
    }
    if (layers[i].parallel != 0 || (layers[i].recurrence != nullptr && layers[i].qkv.weight != nullptr)) beside = size;
    if (const PerLayer* const own = layers[i].per_layer) {
      wide = std::max(wide, own->gate.channels);
      inside = std::max(inside, own->out.inner);
    }
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
  const auto add = [&](const void* made) {  // y += made
    const Timed timed(Stage::kNorm);
    copy_rows(type, y, made, y, size, rows, size);
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
    times(layer.qkv, 4 * i, from, product);
    {
      const Timed timed(Stage::kRope);
      const Rope& own = ropes[layer.rope];
      if (layer.clip > 0.0f) clip_rows(type, product, layer.clip, rows, layer.qkv.channels);
      rope_and_store(type, layer.heads, paths, product, own.cos, own.sin, caches[i], queries);
    }
    {
      const Timed timed(Stage::kAttention);
      tree_attention(type, layer.heads, paths, queries, caches[i], inner);
      if (layer.heads.gated != 0) {
        const int64_t width = layer.qkv.channels, own = layer.o.inner;
        open_values(type, static_cast<char*>(product) + (width - own) * element, width, inner, rows, own);
      }
    }
    times(layer.o, 4 * i + 1, inner, to);
  };
  const auto remember = [&](int64_t i, int64_t number, const void* from, void* to) {
    const Recurrence& its = *layers[i].recurrence;
    const Scratch::Mark gates_end;
    float* gates = nullptr;
    times(its.first, number, from, product);
    if (its.gates.weight != nullptr) {
      const Timed timed(Stage::kProduct);
      gates = Scratch::get().take<float>(rows * its.gates.channels);
      multiply(its.gates, {widened_rows(type, from, rows, size), Type::kFloat32, rows}, gates);
    }
    {
      const Timed timed(Stage::kRecurrence);
      recur(its, type, product, gates, *states, rows, inner);
    }
    times(its.last, number + 1, inner, to);
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

  // The term of per-layer inputs, of x.
  const auto add_per_layer = [&](const Layer& layer, const void* from) {
    const PerLayer& own = *layer.per_layer;
    {
      const Timed timed(Stage::kProduct);
      multiply(own.gate, {from, type, rows}, product);
    }
    {
      const Timed timed(Stage::kGate);
      const char* const inputs = static_cast<const char*>(per_layer.rows) + own.first * element;
      gate_beside(type, layer.activation, product, inputs, per_layer.width, inner, rows, own.gate.channels);
    }
    const Timed timed(Stage::kProduct);
    multiply(own.out, {inner, type, rows}, y);
  };

  const void* added = nullptr;
  for (int64_t i = 0; i < count; ++i) {
    const Layer& layer = layers[i];
    const bool attends = layer.qkv.weight != nullptr, remembers = layer.recurrence != nullptr;
    const bool thinks = layer.experts != nullptr || layer.up.weight != nullptr;
    if (attends || remembers) {
      const void* given = entered(added, layer.before_attention);
      tap(i, nullptr);  // everything has been added to x
      if (attends) attend(i, given, y);
      if (remembers) remember(i, 4 * (attends ? count + i : i), given, attends ? other : y);
      if (attends && remembers) add(other);
      if (layer.parallel != 0) {
        if (layer.before_mlp.weight != nullptr) given = entered(nullptr, layer.before_mlp);
        think(i, given, other);
        add(other);
      } else {
        added = left(layer, y, layer.after_attention);
        if (thinks) think(i, entered(added, layer.before_mlp), y);
      }
    } else {
      const void* const given = entered(added, layer.before_mlp);
      tap(i, nullptr);
      think(i, given, y);
    }
    if (layer_lost(layer)) return {nullptr, true};
    if (thinks) added = left(layer, y, layer.after_mlp);
    if (layer.per_layer != nullptr) {
      add_per_layer(layer, entered(added, {}));
      added = left(layer, y, layer.per_layer->after);
    }
    if (layer.factor != nullptr) {
      const Timed timed(Stage::kNorm);
      scale_rows(type, x, *layer.factor, rows, size);
      scale_rows(type, y, *layer.factor, rows, size);
    }
  }
  tap(count, added);
  return {added, false};
}

}  // namespace specinfer
