#include "decoder.h"

#include <algorithm>

#include "scratch.h"

namespace specinfer {

Fault run_decoder(const Decoder& decoder, const DecoderRows& rows, const Paths& paths, const LayerCache* caches,
                  const Taps& taps, void* read, void* logits) {
  const int64_t count = paths.rows, size = decoder.layers[0].size();
  const auto [lowest, highest] = std::minmax_element(rows.positions, rows.positions + count);
  if (*lowest < 0) return Fault::kPosition;
  for (int64_t n = 0; n < decoder.num_rotations; ++n) {
    if (*highest >= decoder.rotations[n].positions) return Fault::kPosition;
  }
  if (decoder.places != nullptr && *highest + decoder.place_offset >= decoder.num_places) return Fault::kPosition;
  const Type type = decoder.type;
  const int64_t bytes = size * (type == Type::kBFloat16 ? 2 : 4);
  const Scratch::Mark mark;
  char* const x = Scratch::get().take<char>(count * bytes);
  char* const y = Scratch::get().take<char>(count * bytes);
  {
    const Timed timed(Stage::kEmbed);
    if (!embed(type, decoder.embedding, decoder.tokens, rows.tokens, decoder.scale, x, count, size)) {
      return Fault::kToken;
    }
    if (decoder.places != nullptr) {
      const auto* const places = static_cast<const char*>(decoder.places) + decoder.place_offset * bytes;
      embed(type, places, decoder.num_places - decoder.place_offset, rows.positions, 1.0f, y, count, size);
      copy_rows(type, x, y, x, size, count, size);
    }
  }
  int64_t half[3] = {};  // of the heads of each rope
  for (int64_t i = 0; i < decoder.num_layers; ++i) {
    const Layer& layer = decoder.layers[i];
    if (layer.qkv.weight != nullptr) half[layer.rope] = layer.heads.head / 2;
  }
  Rope ropes[3] = {};
  if (decoder.num_rotations > 1) {
    for (int64_t n = 0; n < 2; ++n) ropes[n] = decoder.rotations[n].of(rows.positions, count, half[n]);
  } else if (decoder.num_rotations > 0) {
    ropes[0] = ropes[1] = decoder.rotations[0].of(rows.positions, count, std::max(half[0], half[1]));
  }
  const Left left = run_layers(decoder.layers, decoder.num_layers, type, paths, ropes, caches, x, y, taps,
                               rows.adapted, rows.states, rows.per_layer);
  if (left.lost) return Fault::kLost;
  {
    const Timed timed(Stage::kNorm);
    if (decoder.norm.weight != nullptr) {
      add_norm(type, x, left.added, decoder.norm, read, rows.chosen, rows.num_chosen, size, false);
    } else {
      if (left.added != nullptr) copy_rows(type, x, left.added, x, size, count, size);
      for (int64_t r = 0; r < rows.num_chosen; ++r) {
        const int64_t row = rows.chosen == nullptr ? r : rows.chosen[r];
        std::copy_n(x + row * bytes, bytes, static_cast<char*>(read) + r * bytes);
      }
    }
  }
  if (logits != nullptr) {
    const Timed timed(Stage::kProduct);
    multiply(decoder.output, {read, type, rows.num_chosen}, logits);
  }
  return Fault::kNone;
}

}  // namespace specinfer
