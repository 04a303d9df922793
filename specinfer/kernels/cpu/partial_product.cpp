// Products whose inner elements are divided between processes.

#include "exchange.h"
#include "part_tree.h"
#include "quantized_rows.h"
#include "scratch.h"

namespace specinfer {

void find_maxima(const Product& product, const Rows& rows, float* maxima) {
  constexpr int64_t kPieceElements = 1 << 10;  // minimum work of a job
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

void finish(const Product& product, const Rows& rows, const float* branches, void* out) {
  const Output output(product, {nullptr, rows.type, rows.count}, out);
  const Parts& parts = product.parts;
  const int64_t channels = product.channels, blocks = blocks_of(channels);
  if (channels == 0) return;
  Pool::get().split(rows.count, kPieceBytes / (channels * sizeof *branches) + 1, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      for (int64_t block = 0; block < blocks; ++block) {
        const float* from = branches + r * channels + block * kBlock;
        Floats sums[PartTree::kMost];
        PartTree all(0);
        for (int64_t rank = 0; rank < parts.ranks; ++rank) {
          const PartTree its = branches_of(parts.shares[rank], parts.shares[rank + 1] - parts.shares[rank]);
          for (int n = 0; n < its.size(); ++n, from += rows.count * channels) {
            int at = all.size();
            sums[at] = load(from, channels - block * kBlock);
            for (int times = all.push(its.parts(n)); times > 0; --times, --at) sums[at - 1] = sums[at - 1] + sums[at];
          }
        }
        for (int at = all.size() - 1; at > 0; --at) sums[at - 1] = sums[at - 1] + sums[at];
        output.store(r, block, sums[0]);
      }
    }
  });
}

namespace {

void add_exactly(const Product& product, const Rows& rows, void* out) {
  Exchange& exchange = *product.exchange;
  const int64_t count = rows.count * product.channels;
  auto* const maxima = Scratch::get().take<float>(rows.count);
  auto* const sums = Scratch::get().take<int32_t>(count);
  find_maxima(product, rows, maxima);
  if (!exchange.largest(maxima, rows.count)) return;
  const Rows parts{rows.data, rows.type, rows.count, true, maxima};
  multiply(product, parts, sums);
  if (exchange.add(sums, count)) finish(product, parts, sums, out);
}

void add_in_order(const Product& product, const Rows& rows, void* out) {
  const Parts& parts = product.parts;
  auto* const bytes = Scratch::get().take<int64_t>(parts.ranks);
  int64_t all = 0, own = 0;
  for (int64_t r = 0; r < parts.ranks; ++r) {
    const int branches = branches_of(parts.shares[r], parts.shares[r + 1] - parts.shares[r]).size();
    bytes[r] = branches * rows.count * product.channels * static_cast<int64_t>(sizeof(float));
    all += bytes[r];
    if (parts.shares[r] == parts.first) own = bytes[r];
  }
  auto* const from = Scratch::get().take<char>(own);
  auto* const branches = Scratch::get().take<char>(all);
  multiply(product, {rows.data, rows.type, rows.count, true}, from);
  if (!product.exchange->gather(from, bytes, branches)) return;
  finish(product, rows, reinterpret_cast<const float*>(branches), out);
}

}  // namespace

void multiply_with_others(const Product& product, const Rows& rows, void* out) {
  if (product.kind == Kind::kInt8) return add_exactly(product, rows, out);
  add_in_order(product, rows, out);
}

bool lost(const Product& product) {
  return product.exchange != nullptr && product.exchange->loss() != Loss::kNone;
}

}  // namespace specinfer
