#include "decoder.h"

#include <algorithm>

#include "scratch.h"

namespace specinfer {

Fault run_decoder(const Decoder& decoder, const DecoderRows& rows, const Paths& paths, const void* const* keys,
                  const void* const* values, const Taps& taps, void* read, void* logits) {
  const int64_t count = paths.rows, size = decoder.layers[0].qkv.inner;
  const auto [lowest, highest] = std::minmax_element(rows.positions, rows.positions + count);
  for (const Rotations& one : decoder.rotations) {
    if (*lowest < 0 || *highest >= one.positions) return Fault::kPosition;
  }
  const Scratch::Mark mark;
  const auto room = [&] {
    return Scratch::get().take<char>(count * size * (decoder.type == Type::kBFloat16 ? 2 : 4));
  };
  void* const x = room();
  void* const y = room();
  {
    const Timed timed(Stage::kEmbed);
    if (!embed(decoder.type, decoder.embedding, decoder.tokens, rows.tokens, decoder.scale, x, count, size)) {
      return Fault::kToken;
    }
  }
  const int64_t half = decoder.layers[0].heads.head / 2;
  Rope ropes[2];
  ropes[0] = ropes[1] = decoder.rotations[0].of(rows.positions, count, half);
  if (decoder.rotations[1].cos != decoder.rotations[0].cos) {
    ropes[1] = decoder.rotations[1].of(rows.positions, count, half);
  }
  if (!run_layers(decoder.layers, decoder.num_layers, decoder.type, decoder.gelu != 0, decoder.eps, paths, ropes, keys,
                  values, x, y, taps)) {
    return Fault::kLost;
  }
  {
    const Timed timed(Stage::kNorm);
    add_rms_norm(decoder.type, x, y, decoder.norm, read, rows.chosen, rows.num_chosen, size, decoder.eps, false);
  }
  if (logits != nullptr) {
    const Timed timed(Stage::kProduct);
    multiply(decoder.output, {read, decoder.type, rows.num_chosen}, logits);
  }
  return Fault::kNone;
}

}  // namespace specinfer
