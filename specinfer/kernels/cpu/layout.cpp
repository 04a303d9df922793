#include "layout.h"

namespace specinfer {
namespace {

// 16 rows of 64 bytes -> 16 words of each row side by side; rows and words that are not there are zeros.
void lay_out_words(const char* from, int64_t row_bytes, int64_t rows, int64_t bytes, uint32_t flip, char* to) {
  Words v[kLanes];
  for (int r = 0; r < kLanes; ++r) {
    v[r] = Words(0);
    if (r < rows && bytes > 0) std::memcpy(&v[r], from + r * row_bytes, std::min<int64_t>(bytes, sizeof(Words)));
  }
  transpose(v);
  for (int r = 0; r < kLanes; ++r) store_vector(to + r * sizeof(Words), v[r] ^ flip);
}

}  // namespace

void lay_out_weight(Kind kind, const void* from, int64_t channels, int64_t inner, void* to) {
  const int64_t element = kind == Kind::kFloat32 ? 4 : kind == Kind::kBFloat16 ? 2 : 1;
  const int64_t row_bytes = inner * element, padded = padded_inner(kind, inner) * element;
  const uint32_t flip = kind == Kind::kInt8 ? 0x80808080u : 0;
  const auto* const rows = static_cast<const char*>(from);
  auto* const blocks = static_cast<char*>(to);
  share_blocks(blocks_of(channels), padded * kBlock, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      const int64_t row = block * kBlock;
      for (int64_t at = 0; at < padded; at += sizeof(Words)) {
        alignas(64) char words[kLanes * sizeof(Words)];
        lay_out_words(rows + row * row_bytes + at, row_bytes, channels - row, row_bytes - at, flip, words);
        const int64_t used = std::min<int64_t>(sizeof(Words), padded - at);
        std::memcpy(blocks + block * padded * kBlock + at * kBlock, words, used * kBlock);
      }
    }
  });
}

}  // namespace specinfer
