// Products with int8 weights whose inner elements several processes share.

#include "exchange.h"
#include "quantized_rows.h"
#include "scratch.h"

namespace specinfer {

void find_maxima(const Product& product, const Rows& rows, float* maxima) {
  constexpr int64_t kPieceElements = 1 << 10;  // worth being shared out
  const int64_t groups = padded_inner(product.kind, product.inner) / kGroup;
  const auto all = [&](const auto* x) {
    Pool::get().split(rows.count, kPieceElements / (groups * kGroup) + 1, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        maxima[r] = rotate_row(x + r * product.inner, product.inner, groups, [](int64_t, const GroupOf32&) {});
      }
    });
  };
  if (rows.type == Type::kBFloat16) {
    all(static_cast<const BFloat16*>(rows.data));
  } else {
    all(static_cast<const float*>(rows.data));
  }
}

void finish(const Product& product, const Rows& rows, const int32_t* sums, void* out) {
  const Output output(product, {nullptr, rows.type, rows.count}, out);
  const int64_t channels = product.channels, blocks = blocks_of(channels);
  if (channels == 0) return;
  Pool::get().split(rows.count, kPieceBytes / (channels * sizeof *sums) + 1, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      const float scale = int8_scale(rows.maxima[r]);
      for (int64_t block = 0; block < blocks; ++block) {
        const auto* const from = reinterpret_cast<const float*>(sums + r * channels + block * kBlock);
        output.store(r, block, bits_as<int32_t>(load(from, channels - block * kBlock)), scale);
      }
    }
  });
}

void multiply_with_others(const Product& product, const Rows& rows, void* out) {
  Exchange& exchange = *product.exchange;
  const int64_t count = rows.count * product.channels;
  auto* const maxima = Scratch::get().take<float>(rows.count);
  auto* const sums = Scratch::get().take<int32_t>(count);
  find_maxima(product, rows, maxima);
  if (!exchange.largest(maxima, rows.count)) return;
  const Rows parts{rows.data, rows.type, rows.count, maxima};
  multiply(product, parts, sums);
  if (exchange.add(sums, count)) finish(product, parts, sums, out);
}

bool lost(const Product& product) {
  return product.exchange != nullptr && product.exchange->loss() != Loss::kNone;
}

}  // namespace specinfer
