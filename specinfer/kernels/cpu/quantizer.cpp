// Floats of a file as int8 and int4 weights. kernels/layout.py defines the numbers; every operation here rounds as
// there, and the squares of a group's errors are added in the same order, so all bits are equal.
//
// Sixteen rows are quantized together, one per lane, which is the layout of products.

#include <atomic>
#include <limits>
#include <vector>

#include "file_blocks.h"

namespace specinfer {
namespace {

constexpr int kHalf = kGroup / 2;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kMinScale = 0x1p-24f, kMaxScale = 65504.0f;
constexpr uint32_t kAll = (1u << kLanes) - 1;

// If one is NaN: the second. (GCC 12 would compare with a constant, and then select.)
inline Floats smaller(Floats a, Floats b) {
#if defined(__AVX512F__)
  return by_parts<float>([](auto x, auto y) { return _mm512_min_ps((__m512)x, (__m512)y); }, a, b);
#elif defined(__AVX2__)
  return by_parts<float>([](auto x, auto y) { return _mm256_min_ps((__m256)x, (__m256)y); }, a, b);
#else
  return select(a < b, a, b);
#endif
}
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return by_parts<float>([](auto x, auto y) { return _mm512_max_ps((__m512)x, (__m512)y); }, a, b);
#elif defined(__AVX2__)
  return by_parts<float>([](auto x, auto y) { return _mm256_max_ps((__m256)x, (__m256)y); }, a, b);
#else
  return select(a > b, a, b);
#endif
}
inline Floats limited(Floats v, float least, float most) { return smaller(larger(v, Floats(least)), Floats(most)); }

// To the nearest integer, ties to even.
inline Floats nearest(Floats v) {
#if defined(__AVX512F__)
  return by_parts<float>([](auto x) { return _mm512_roundscale_ps((__m512)x, 0); }, v);
#elif defined(__AVX2__)
  return by_parts<float>([](auto x) { return _mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT); }, v);
#else
  return by_parts<float>([](auto x) { return vrndnq_f32((float32x4_t)x); }, v);
#endif
}

// Rows of a file as channels begin .. end - 1 of a block.
struct BlockRows {
  FileKind kind;  // of floats
  const uint8_t* data;
  int64_t row_bytes, inner, begin, end;

  // Elements of a group, with a channel in each lane: zeros for other channels, and after the row's end.
  void load_group(int64_t g, Floats* x) const {
    if (kind == FileKind::kBFloat16) {
      Words pairs[kLanes];
      load_rows<uint32_t>(pairs, g, sizeof(BFloat16), 0, [](const uint8_t* from) { return load_vector<uint32_t>(from); });
      transpose(pairs);
      for (int i = 0; i < kLanes; ++i) {
        x[2 * i] = bits_as<float>(pairs[i] << 16);
        x[2 * i + 1] = bits_as<float>(pairs[i] & 0xffff0000u);
      }
    } else if (kind == FileKind::kFloat16) {
      load_halves<Half>(g, x);
    } else {
      load_halves<float>(g, x);
    }
  }

 private:
  template <typename T>
  void load_halves(int64_t g, Floats* x) const {
    for (int half = 0; half < 2; ++half) {
      Words rows[kLanes];
      load_rows<T>(rows, g, sizeof(T), half * kHalf, [](const uint8_t* from) {
        return bits_as<uint32_t>(load(reinterpret_cast<const T*>(from)));
      });
      transpose(rows);
      for (int i = 0; i < kHalf; ++i) x[half * kHalf + i] = bits_as<float>(rows[i]);
    }
  }

  // The vector of each row from element `skip` of a group on; `of` reads 16 numbers of T.
  template <typename T, typename F>
  void load_rows(Words* rows, int64_t g, int64_t element, int64_t skip, const F& of) const {
    const int64_t at = (g * kGroup + skip) * element, there = inner * element - at;
    for (int c = 0; c < kLanes; ++c) {
      const uint8_t* const from = data + (c - begin) * row_bytes + at;
      if (c < begin || c >= end || there <= 0) {
        rows[c] = Words(0);
      } else if (there >= kLanes * static_cast<int64_t>(sizeof(T))) {
        rows[c] = of(from);
      } else {
        uint8_t numbers[kLanes * sizeof(T)] = {};
        std::memcpy(numbers, from, static_cast<size_t>(there));
        rows[c] = of(numbers);
      }
    }
  }
};

// Stores the lanes of channels begin .. end - 1.
template <typename T>
inline void store_lanes(T* to, const T* lanes, int64_t begin, int64_t end) {
  if (end - begin == kBlock) {
    std::memcpy(to, lanes, sizeof(T) * kBlock);
  } else {
    std::copy(lanes + begin, lanes + end, to + begin);
  }
}

inline void store_words(uint32_t* to, Words v, int64_t begin, int64_t end) {
  uint32_t lanes[kLanes];
  store_vector(lanes, v);
  store_lanes(to, lanes, begin, end);
}

// ---- int4 ----

constexpr float kSpans[] = {15, 14, 13, 12, 11, 10, 15.5f, 16, 16.5f, 17};
constexpr int kNumSpans = 10;
// Spans before these give no level above 15, and none below 0, if the scale is a normal number of float16.
constexpr int kAbove = 6, kBelow = 8;
constexpr float kMinRange = 17 * 0x1p-14f;
constexpr float kMaxRange = 10 * kMaxScale;  // from which on scales are limited

// A group is scale * (level - zero).
struct Grid {
  Floats scale, zero;

  [[gnu::always_inline]] static Grid over(Floats low, Floats range, float span) {
    Half halves[kLanes];
    store(halves, limited(range / span, kMinScale, kMaxScale));
    const Floats scale = load(halves);
    return {scale, limited(nearest(low * -16.0f / scale), 0, 255) * 0.0625f};
  }

  Floats level(Floats x) const { return limited(nearest(x / scale + zero), 0, 15); }

  void choose(Ints mask, const Grid& other) {
    scale = select(mask, other.scale, scale);
    zero = select(mask, other.zero, zero);
  }
};

// The error of a grid for each channel, as PyTorch computes it.
[[gnu::noinline]] Floats exact_error(const Floats* x, const Grid& grid) {
  Floats sums[2] = {0.0f, 0.0f};  // of the halves of a group
  for (int i = 0; i < kGroup; ++i) {
    const Floats error = (grid.level(x[i]) - grid.zero) * grid.scale - x[i];
    sums[i / kHalf] = sums[i / kHalf] + error * error;
  }
  return sums[0] + sums[1];
}

// The first grid of least error as PyTorch finds it, for the channels in `among`: a mask for each grid.
void find_exactly(const Floats* x, Floats low, Floats range, const Ints* among, Grid& best) {
  Floats least = kInfinity;
  for (int n = 0; n < kNumSpans; ++n) {
    if (lanes_of(among[n]) == 0) continue;
    const Grid grid = Grid::over(low, range, kSpans[n]);
    const Floats error = exact_error(x, grid);
    const Ints better = among[n] & (error < least);
    least = select(better, error, least);
    best.choose(better, grid);
  }
}

// The sum of the squares of a group's errors in units of the scale, nearly. Of levels, only those can be out of range that
// the parameters name.
template <bool kAbove, bool kBelow>
[[gnu::always_inline]] inline Floats squares(const Floats* x, Floats inverse, Floats zero) {
  const auto error = [&](Floats element) __attribute__((always_inline)) {
    const Floats place = fma(element, inverse, zero);
    Floats level = nearest(place);
    if constexpr (kAbove) level = smaller(level, Floats(15.0f));
    if constexpr (kBelow) level = larger(level, Floats(0.0f));
    return level - place;
  };
  Floats even = 0.0f, odd = 0.0f;
  for (int i = 0; i < kGroup; i += 2) {
    const Floats one = error(x[i]), other = error(x[i + 1]);
    even = fma(one, one, even);
    odd = fma(other, other, odd);
  }
  return even + odd;
}

// The grid of least error for each channel, as PyTorch finds it, but several times as fast: errors are computed with fewer
// roundings. If several errors of a channel are too near to the least, these are computed again as PyTorch does. `place`
// above is at most 32, so its two roundings, and the two of PyTorch's, err by less than 2^-18, and an element's error differs
// from PyTorch's by less than d = 2^-16, also if the level differs. So the sum s of squares differs by less than d (8 + 4 s),
// since the sum of 32 absolute values is at most 4 + 2 s, and by roundings of the sums. False if a number is not finite, or
// an error too large.
bool find_grid(const Floats* x, Grid& best) {
  constexpr float kEach = 9 * 0x1p-16f, kOfSum = 5 * 0x1p-16f;
  Floats low = 0.0f, high = 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    low = smaller(x[i], low);
    high = larger(x[i], high);
  }
  const Floats range = high - low;
  const bool normal = lanes_of(range > kMinRange) == kAll;
  Floats least = kInfinity, at_most = kInfinity;  // the least error, and the most that PyTorch may find for it
  Floats at_least[kNumSpans];                     // the least that PyTorch may find for each grid
  if (lanes_of(range < kMaxRange) == kAll) {
    for (int n = 0; n < kNumSpans; ++n) {
      const Grid grid = Grid::over(low, range, kSpans[n]);
      const Floats inverse = Floats(1.0f) / grid.scale;
      const Floats sum = !normal || n >= kBelow ? squares<true, true>(x, inverse, grid.zero)
                         : n >= kAbove          ? squares<true, false>(x, inverse, grid.zero)
                                                : squares<false, false>(x, inverse, grid.zero);
      const Floats square = grid.scale * grid.scale, error = sum * square;
      const Floats margin = fma(error, Floats(kOfSum), square * kEach);
      const Ints better = error < least;
      at_least[n] = error - margin;
      at_most = smaller(error + margin, at_most);
      least = select(better, error, least);
      best.choose(better, grid);
    }
  }
  Ints among[kNumSpans];  // channels for which a grid may be the best
  if (lanes_of(at_most < kInfinity) != kAll) {  // a number is not finite, or near the limit of float32
    if (lanes_of(exact_error(x, Grid::over(low, range, kSpans[0])) < kInfinity) != kAll) return false;
    std::fill(among, among + kNumSpans, Ints(-1));
    find_exactly(x, low, range, among, best);
    return true;
  }
  Ints count = 0;
  for (int n = 0; n < kNumSpans; ++n) {
    among[n] = at_least[n] <= at_most;
    count = count - among[n];
  }
  const Ints unclear = count > Ints(1);
  if (lanes_of(unclear) == 0) return true;
  for (Ints& one : among) one = one & unclear;
  find_exactly(x, low, range, among, best);
  return true;
}

bool quantize_int4(const BlockRows& rows, int64_t block, int64_t end, const Product& to) {
  const int64_t groups = padded_inner(to.kind, to.inner) / kGroup;
  auto* const levels = static_cast<uint32_t*>(const_cast<void*>(to.weight)) + block * groups * 4 * kBlock;
  auto* const scales = static_cast<uint16_t*>(const_cast<void*>(to.scales)) + block * groups * kBlock;
  auto* const zeros = static_cast<uint8_t*>(const_cast<void*>(to.zeros)) + block * groups * kBlock;
  for (int64_t g = 0; g < groups; ++g) {
    Floats x[kGroup];
    rows.load_group(g, x);
    Grid grid{1.0f, 0.0f};
    if (!find_grid(x, grid)) return false;
    for (Floats& one : x) one = grid.level(one);
    for (int j = 0; j < 4; ++j) {
      Words word = 0;
      for (int i = 0; i < 4; ++i) {
        const Floats both = fma(x[8 * j + 4 + i], Floats(16.0f), x[8 * j + i]);
        word = word | bits_as<uint32_t>(to_ints(both)) << (8 * i);
      }
      store_words(levels + (g * 4 + j) * kBlock, word, rows.begin, end);
    }
    Half halves[kLanes];
    uint16_t bits[kLanes];
    uint8_t sixteenths[kLanes];
    store(halves, grid.scale);
    std::memcpy(bits, halves, sizeof bits);
    const Ints zero = to_ints(grid.zero * 16.0f);
    for (int c = 0; c < kLanes; ++c) sixteenths[c] = static_cast<uint8_t>(zero[c]);
    store_lanes(scales + g * kBlock, bits, rows.begin, end);
    store_lanes(zeros + g * kBlock, sixteenths, rows.begin, end);
  }
  return true;
}

// ---- int8 ----

inline void rotate(Floats* x) {
  for (int width = kHalf; width > 0; width /= 2) {
    for (int i = 0; i < kGroup; i += 2 * width) {
      for (int n = i; n < i + width; ++n) {
        const Floats first = x[n], second = x[n + width];
        x[n] = first + second;
        x[n + width] = first - second;
      }
    }
  }
}

// `rotated` has room for the block's groups. False if a number is not finite.
bool quantize_int8(const BlockRows& rows, int64_t block, int64_t end, const Product& to, std::vector<Floats>& rotated) {
  const int64_t groups = round_up(to.inner, kGroup) / kGroup, words = padded_inner(to.kind, to.inner) / 4;
  auto* const values = static_cast<uint32_t*>(const_cast<void*>(to.weight)) + block * words * kBlock;
  auto* const scales = static_cast<float*>(const_cast<void*>(to.scales)) + block * kBlock;
  Floats most = 0.0f, odd = 0.0f;
  rotated.resize(static_cast<size_t>(groups * kGroup));
  for (int64_t g = 0; g < groups; ++g) {
    Floats* const x = rotated.data() + g * kGroup;
    rows.load_group(g, x);
    rotate(x);
    odd = odd + (x[0] - x[0]);  // the sum of all elements; NaN if one is not finite
    for (int i = 0; i < kGroup; ++i) most = larger(bits_as<float>(bits_as<uint32_t>(x[i]) & 0x7fffffffu), most);
  }
  if (lanes_of((odd == 0.0f) & (most < kInfinity)) != kAll) return false;
  const Floats scale = larger(most * (1.0f / kGroup) / 127.0f, Floats(kMinScale)), step = scale * static_cast<float>(kGroup);
  for (int64_t j = 0; j < words; ++j) {
    Words word = 0x80808080u;
    if (j < groups * kGroup / 4) {
      word = 0;
      for (int i = 0; i < 4; ++i) {
        const Ints value = to_ints(nearest(rotated[4 * j + i] / step)) + 128;
        word = word | bits_as<uint32_t>(value) << (8 * i);
      }
    }
    store_words(values + j * kBlock, word, rows.begin, end);
  }
  float lanes[kLanes];
  store(lanes, scale);
  std::fill(lanes + rows.end, lanes + kLanes, 0.0f);
  store_lanes(scales, lanes, rows.begin, end);
  return true;
}

}  // namespace

Stored quantize(const FileRows& rows, int64_t channel, const Product& to) {
  std::atomic<Stored> result{Stored::kWhole};
  const int64_t last = channel + rows.count, first_block = channel / kBlock;
  const bool blocks = rows.kind < FileKind::kFloat32;
  Pool::get().split(blocks_of(last) - first_block, 1, [&](int64_t from, int64_t until) {
    std::vector<uint8_t> octets(static_cast<size_t>(kBlock * rows.row_bytes));
    std::vector<float> elements(static_cast<size_t>(blocks ? kBlock * to.inner : 0));
    std::vector<Floats> rotated;
    for (int64_t block = first_block + from; block < first_block + until; ++block) {
      const int64_t start = block * kBlock, begin = std::max(start, channel), end = std::min(start + kBlock, last);
      if (!read_rows(rows, begin - channel, end - channel, octets.data())) {
        result = Stored::kUnread;
        return;
      }
      BlockRows these{rows.kind, octets.data(), rows.row_bytes, to.inner, begin - start, end - start};
      if (blocks) {
        to_elements(rows.kind, octets.data(), (end - begin) * to.inner, Type::kFloat32, elements.data());
        these.kind = FileKind::kFloat32;
        these.data = reinterpret_cast<const uint8_t*>(elements.data());
        these.row_bytes = to.inner * static_cast<int64_t>(sizeof(float));
      }
      const int64_t stored = end == to.channels ? kBlock : these.end;  // the last rows fill their block with zeros
      if (!(to.kind == Kind::kInt4 ? quantize_int4(these, block, stored, to)
                                   : quantize_int8(these, block, stored, to, rotated))) {
        result = Stored::kNotFinite;
        return;
      }
    }
  });
  return result;
}

}  // namespace specinfer
