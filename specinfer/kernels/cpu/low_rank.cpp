#include "low_rank.h"

#include <array>

#include "scratch.h"

namespace specinfer {
namespace {

constexpr int kTileRows = kRegister == 64 ? 8 : 2;  // rows of one adapter that share loaded weights
constexpr int kSums = 2;                            // per row of A, so that consecutive operations are independent
constexpr int64_t kUpBlocks = 32;                   // maximum blocks of B per job

// Rows of one adapter.
struct Tile {
  const LowRank* adapter;
  int64_t first, rows;  // their places
};

// Some blocks of a tile's A, or of the B of one of its parts.
struct Job {
  const Tile* tile;
  const LowRankPart* part;
  int64_t block, last;
};

template <typename T, int R>
void go_down(const void* weights, const float* x, int64_t inner, float* to, int64_t stride) {
  const T* const down = static_cast<const T*>(weights);
  Floats sums[R][kSums];
  each<R>([&](auto r) { each<kSums>([&](auto p) { sums[r][p] = Floats(0.0f); }); });
  const auto step = [&](int64_t i, auto p) __attribute__((always_inline)) {
    const Floats w = load(down + i * kBlock);
    each<R>([&](auto r) { sums[r][p] = fma(w, Floats(x[r * inner + i]), sums[r][p]); });
  };
  int64_t i = 0;
  for (; i + kSums <= inner; i += kSums) each<kSums>([&](auto p) { step(i + p, p); });
  if (i < inner) step(i, std::integral_constant<int, 0>{});
  each<R>([&](auto r) { store(to + r * stride, sums[r][0] + sums[r][1]); });
}

template <typename T, int R>
void go_up(const LowRankPart& part, int64_t block, const float* x, int64_t stride, float* to, int64_t channels) {
  const T* const up = static_cast<const T*>(part.up) + block * part.rank * kBlock;
  Floats sums[R];
  each<R>([&](auto r) { sums[r] = Floats(0.0f); });
  for (int64_t i = 0; i < part.rank; ++i) {
    const Floats w = load(up + i * kBlock);
    each<R>([&](auto r) { sums[r] = fma(w, Floats(x[r * stride + part.offset + i]), sums[r]); });
  }
  const int64_t first = block * kBlock, n = std::min(kBlock, part.channels - first);
  each<R>([&](auto r) { store(to + r * channels + part.first + first, sums[r] * part.scale, n); });
}

// f(number of rows), as a compile-time constant.
template <typename F>
void by_rows(int64_t rows, const F& f) {
  each<kTileRows>([&](auto r) {
    if (rows == r + 1) f(std::integral_constant<int, r + 1>{});
  });
}

template <typename T>
class LowRankSums {
 public:
  LowRankSums(const AdaptedRows& adapted, int64_t number, const Product& product, const T* x)
      : adapted_(adapted), number_(number), inner_(product.inner), channels_(product.channels), x_(x) {}

  // The adapters' terms, [adapted rows, channels]; null: none.
  const float* operator()() {
    const int64_t total = adapted_.count == 0 ? 0 : adapted_.ends[adapted_.count - 1];
    int64_t ranks = 0;
    for (int64_t a = 0; a < adapted_.count; ++a) ranks = std::max(ranks, of(a).ranks);
    if (total == 0 || ranks == 0) return nullptr;
    rows_ = Scratch::get().take<float>(total * inner_);
    stride_ = round_up(ranks, kBlock);
    low_ = Scratch::get().take<float>(total * stride_);
    sums_ = Scratch::get().take<float>(total * channels_);
    gather(total);
    cut(total);
    go_down_all();
    go_up_all();
    return sums_;
  }

 private:
  const LowRank& of(int64_t adapter) const { return adapted_.adapters[adapter][number_]; }

  // Gather the rows as float32.
  void gather(int64_t total) {
    const int64_t bytes = inner_ * static_cast<int64_t>(sizeof(float));
    Pool::get().split(total, kPieceBytes / bytes + 1, [&](int64_t first, int64_t last) {
      for (int64_t place = first; place < last; ++place) {
        const T* const from = x_ + adapted_.rows[place] * inner_;
        float* const to = rows_ + place * inner_;
        for (int64_t i = 0; i < inner_; i += kBlock) {
          const int64_t n = std::min(kBlock, inner_ - i);
          store(to + i, load(from + i, n), n);
        }
      }
    });
  }

  // Divide the rows of each adapter into tiles; adapters without a part of the product are skipped.
  void cut(int64_t total) {
    tiles_ = Scratch::get().take<Tile>(total);
    int64_t first = 0;
    for (int64_t a = 0; a < adapted_.count; ++a) {
      const LowRank& adapter = of(a);
      const int64_t end = adapted_.ends[a];
      int64_t covered = 0;
      for (int64_t p = 0; p < adapter.count; ++p) covered += adapter.parts[p].channels;
      if (covered < channels_) std::fill(sums_ + first * channels_, sums_ + end * channels_, 0.0f);
      for (; first < end && adapter.count > 0; first += kTileRows) {
        tiles_[num_tiles_++] = {&adapter, first, std::min<int64_t>(kTileRows, end - first)};
      }
      first = end;
    }
  }

  void go_down_all() {
    int64_t count = 0;
    for (int64_t t = 0; t < num_tiles_; ++t) count += blocks_of(tiles_[t].adapter->ranks);
    Job* const jobs = Scratch::get().take<Job>(count);
    Job* next = jobs;
    for (int64_t t = 0; t < num_tiles_; ++t) {
      const int64_t blocks = blocks_of(tiles_[t].adapter->ranks);
      for (int64_t block = 0; block < blocks; ++block) *next++ = {tiles_ + t, nullptr, block, block + 1};
    }
    const int64_t bytes = inner_ * kBlock * static_cast<int64_t>(sizeof(T));
    Pool::get().split(count, kPieceBytes / bytes + 1, [&](int64_t first, int64_t last) {
      for (int64_t j = first; j < last; ++j) {
        const Tile& tile = *jobs[j].tile;
        const T* const down = static_cast<const T*>(tile.adapter->down) + jobs[j].block * inner_ * kBlock;
        float* const to = low_ + tile.first * stride_ + jobs[j].block * kBlock;
        by_rows(tile.rows, [&](auto r) { go_down<T, r>(down, rows_ + tile.first * inner_, inner_, to, stride_); });
      }
    });
  }

  void go_up_all() {
    int64_t count = 0;
    each_up([&](const Job&) { ++count; });
    Job* const jobs = Scratch::get().take<Job>(count);
    Job* next = jobs;
    each_up([&](const Job& job) { *next++ = job; });
    Pool::get().split(count, 1, [&](int64_t first, int64_t last) {
      for (int64_t j = first; j < last; ++j) {
        const Tile& tile = *jobs[j].tile;
        const float* const x = low_ + tile.first * stride_;
        float* const to = sums_ + tile.first * channels_;
        by_rows(tile.rows, [&](auto r) {
          for (int64_t block = jobs[j].block; block < jobs[j].last; ++block) {
            go_up<T, r>(*jobs[j].part, block, x, stride_, to, channels_);
          }
        });
      }
    });
  }

  template <typename F>
  void each_up(const F& f) const {
    for (int64_t t = 0; t < num_tiles_; ++t) {
      const LowRank& adapter = *tiles_[t].adapter;
      for (int64_t p = 0; p < adapter.count; ++p) {
        const int64_t blocks = blocks_of(adapter.parts[p].channels);
        for (int64_t block = 0; block < blocks; block += kUpBlocks) {
          f(Job{tiles_ + t, adapter.parts + p, block, std::min(block + kUpBlocks, blocks)});
        }
      }
    }
  }

  const AdaptedRows& adapted_;
  const int64_t number_, inner_, channels_;
  const T* const x_;
  int64_t stride_ = 0, num_tiles_ = 0;
  float *rows_ = nullptr, *low_ = nullptr, *sums_ = nullptr;
  Tile* tiles_ = nullptr;
};

}  // namespace

void multiply_adapted(const Product& product, Rows rows, const AdaptedRows* adapted, int64_t number, void* out) {
  const Scratch::Mark mark;
  if (adapted != nullptr) {
    rows.places = adapted->places;
    rows.added = rows.type == Type::kBFloat16
                     ? LowRankSums(*adapted, number, product, static_cast<const BFloat16*>(rows.data))()
                     : LowRankSums(*adapted, number, product, static_cast<const float*>(rows.data))();
  }
  multiply(product, rows, out);
}

}  // namespace specinfer
