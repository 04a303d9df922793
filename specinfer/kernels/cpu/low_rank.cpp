#include "low_rank.h"

#include <atomic>

#include "patience.h"
#include "scratch.h"

namespace specinfer {
namespace {

constexpr int kTileRows = kRegister == 64 ? 8 : 2;  // rows of one adapter that share loaded weights
constexpr int kSums = 2;                            // per row of A, so that consecutive operations are independent
constexpr int64_t kChunk = 64;                      // elements of a row that are converted to float32 at a time

// Rows of one adapter.
struct Tile {
  const LowRank* adapter;
  int64_t first, rows;  // their places
};

// A block of a tile's A.
struct DownBlock {
  const Tile* tile;
  int64_t block;
};

// A block of 16 rows of a matrix.
template <typename W>
struct Block {
  static constexpr bool kScaled = std::is_same_v<W, int8_t>;
  const char* at;

  Block(const void* matrix, int64_t block, int64_t inner)
      : at(static_cast<const char*>(matrix) + block * (scale_bytes() + inner * kBlock * static_cast<int64_t>(sizeof(W)))) {}

  static constexpr int64_t scale_bytes() { return kScaled ? kBlock * static_cast<int64_t>(sizeof(float)) : 0; }
  [[gnu::always_inline]] Floats operator[](int64_t i) const { return load(reinterpret_cast<const W*>(at + scale_bytes()) + i * kBlock); }
  [[gnu::always_inline]] Floats scaled(Floats sums) const {
    if constexpr (kScaled) return sums * load(reinterpret_cast<const float*>(at));
    return sums;
  }
};

// Sums of R rows times a block, over all elements of the rows.
template <typename W, int R>
struct Sums {
  Floats of[R][kSums];

  Sums() {
    each<R>([&](auto r) { each<kSums>([&](auto p) { of[r][p] = Floats(0.0f); }); });
  }

  // Add the products of n elements x [R, stride] with those of the block from `first` on, an even number.
  [[gnu::always_inline]] void add(const Block<W>& block, int64_t first, const float* x, int64_t stride, int64_t n) {
    const auto step = [&](int64_t i, auto p) __attribute__((always_inline)) {
      const Floats w = block[first + i];
      each<R>([&](auto r) __attribute__((always_inline)) { of[r][p] = fma(w, Floats(x[r * stride + i]), of[r][p]); });
    };
    int64_t i = 0;
    for (; i + kSums <= n; i += kSums) each<kSums>([&](auto p) __attribute__((always_inline)) { step(i + p, p); });
    if (i < n) step(i, std::integral_constant<int, 0>{});
  }

  [[gnu::always_inline]] Floats operator[](int r) const { return of[r][0] + of[r][1]; }
};

// Rows x [inner] -> 16 elements of A x per row.
template <typename T, typename W, int R>
void go_down(const Block<W>& down, const T* const* x, int64_t inner, float* to, int64_t stride) {
  Sums<W, R> sums;
  for (int64_t first = 0; first < inner; first += kChunk) {
    const int64_t n = std::min(kChunk, inner - first);
    alignas(64) float chunk[R][kChunk];
    for (int r = 0; r < R; ++r) {
      for (int64_t i = 0; i < n; i += kLanes) store(chunk[r] + i, load(x[r] + first + i, n - i));
    }
    sums.add(down, first, chunk[0], kChunk, n);
  }
  each<R>([&](auto r) { store(to + r * stride, down.scaled(sums[r])); });
}

// low [R, stride], the rows' A x -> 16 channels of the terms of all parts per row.
template <typename W, int R>
void go_up(const LowRank& adapter, int64_t block, const float* low, int64_t stride, float* to) {
  Floats total[R];
  each<R>([&](auto r) { total[r] = Floats(0.0f); });
  for (int64_t p = 0; p < adapter.count; ++p) {
    const LowRankPart& part = adapter.parts[p];
    if (block < part.block || block >= part.block + part.blocks) continue;
    const Block<W> up(part.up, block - part.block, part.rank);
    Sums<W, R> sums;
    sums.add(up, 0, low + part.offset, stride, part.rank);
    each<R>([&](auto r) { total[r] = total[r] + up.scaled(sums[r]) * part.scale; });
  }
  each<R>([&](auto r) { store(to + r * kBlock, total[r]); });
}

// Calls f(a weight, number of rows), as compile-time constants.
template <typename F>
void by_tile(const Tile& tile, const F& f) {
  each<kTileRows>([&](auto r) {
    if (tile.rows != r + 1) return;
    const std::integral_constant<int, r + 1> rows;
    switch (tile.adapter->kind) {
      case Kind::kInt8: return f(int8_t{}, rows);
      case Kind::kBFloat16: return f(BFloat16{}, rows);
      default: return f(float{}, rows);
    }
  });
}

template <typename T>
class LowRankTerms final : public AddedTerms {
 public:
  LowRankTerms(const AdaptedRows& adapted, int64_t number, const Product& product, const T* x)
      : adapted_(adapted), number_(number), inner_(product.inner), x_(x) {
    places = adapted.places;
    count = adapted.ends[adapted.count - 1];
    for (int64_t a = 0; a < adapted_.count; ++a) ranks_ = std::max(ranks_, round_up(of(a).ranks, kBlock));
    low_ = Scratch::get().take<float>(count * ranks_);
    sums = Scratch::get().take<float>(count * blocks_of(product.channels) * kBlock);
    cut();
    jobs = num_downs_ == 0 ? 0 : Pool::get().ranges(num_downs_, 1);
  }

  void run(int64_t job) const override {
    for (int64_t i = num_downs_ * job / jobs; i < num_downs_ * (job + 1) / jobs; ++i) go_down(downs_[i]);
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == jobs) done_.notify_all();
  }

  void compute(int64_t first, int64_t last) const override {
    const auto all_done = [&] { return done_.load(std::memory_order_acquire) == jobs; };
    while (!look_for(all_done)) {
      const int64_t done = done_.load();
      if (done != jobs) done_.wait(done);
    }
    for (const Tile* tile = tiles_; tile < tiles_ + num_tiles_; ++tile) {
      by_tile(*tile, [&](auto weight, auto r) {
        for (int64_t block = first; block < last; ++block) {
          float* const to = sums + (block * count + tile->first) * kBlock;
          go_up<decltype(weight), r>(*tile->adapter, block, low_ + tile->first * ranks_, ranks_, to);
        }
      });
    }
  }

 private:
  const LowRank& of(int64_t adapter) const { return adapted_.adapters[adapter][number_]; }

  // Divide the rows of each adapter into tiles, and the tiles' A into blocks.
  void cut() {
    tiles_ = Scratch::get().take<Tile>(count);
    int64_t first = 0;
    for (int64_t a = 0; a < adapted_.count; ++a) {
      const int64_t end = adapted_.ends[a];
      for (; first < end; first += kTileRows) {
        tiles_[num_tiles_++] = {&of(a), first, std::min<int64_t>(kTileRows, end - first)};
        num_downs_ += blocks_of(of(a).ranks);
      }
      first = end;
    }
    downs_ = Scratch::get().take<DownBlock>(num_downs_);
    DownBlock* next = downs_;
    for (const Tile* tile = tiles_; tile < tiles_ + num_tiles_; ++tile) {
      for (int64_t block = 0; block < blocks_of(tile->adapter->ranks); ++block) *next++ = {tile, block};
    }
  }

  void go_down(const DownBlock& of_tile) const {
    const Tile& tile = *of_tile.tile;
    const T* rows[kTileRows];
    for (int64_t r = 0; r < tile.rows; ++r) rows[r] = x_ + adapted_.rows[tile.first + r] * inner_;
    float* const to = low_ + tile.first * ranks_ + of_tile.block * kBlock;
    by_tile(tile, [&](auto weight, auto r) {
      using W = decltype(weight);
      if constexpr (std::is_same_v<W, T> || std::is_same_v<W, int8_t>) {  // floats have the type of the rows
        specinfer::go_down<T, W, r>({tile.adapter->down, of_tile.block, inner_}, rows, inner_, to, ranks_);
      }
    });
  }

  const AdaptedRows& adapted_;
  const int64_t number_, inner_;
  const T* const x_;
  int64_t ranks_ = 0, num_tiles_ = 0, num_downs_ = 0;
  float* low_ = nullptr;
  Tile* tiles_ = nullptr;
  DownBlock* downs_ = nullptr;
  mutable std::atomic<int64_t> done_{0};
};

template <typename T>
void multiply_with_terms(const Product& product, Rows rows, const AdaptedRows& adapted, int64_t number, void* out) {
  const Scratch::Mark mark;
  const LowRankTerms<T> terms(adapted, number, product, static_cast<const T*>(rows.data));
  if (terms.jobs > 0) rows.added = &terms;
  multiply(product, rows, out);
}

}  // namespace

void multiply_adapted(const Product& product, Rows rows, const AdaptedRows* adapted, int64_t number, void* out) {
  if (adapted == nullptr) return multiply(product, rows, out);
  if (rows.type == Type::kBFloat16) return multiply_with_terms<BFloat16>(product, rows, *adapted, number, out);
  multiply_with_terms<float>(product, rows, *adapted, number, out);
}

}  // namespace specinfer
