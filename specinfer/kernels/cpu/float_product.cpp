// Products with float32 and bfloat16 weights in vector registers.
//
// bfloat16 is multiplied by pairs in float32; without an instruction for that, by two operations. A channel has two
// sums, of alternating steps, so that consecutive operations are independent; the order is the same for every number
// of rows.

#include "register_tiles.h"
#include "scratch.h"

namespace specinfer {
namespace {

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool kPairs = true;  // instructions multiply pairs of bfloat16
#else
constexpr bool kPairs = false;
#endif

// A step: kWords words of a row times a vector of weights, the same word of 16 channels.
struct OfFloat32 {
  static constexpr int kElements = 1;  // of a word of weights
  static constexpr int kWords = 1;
  static constexpr int kRows = kRegister == 64 ? 6 : 2;  // see register_tiles.h
  static constexpr int kPairRows = 0;
  [[gnu::always_inline]] static Floats add(Floats sums, Words weights, const uint32_t* words) {
    return fma(Floats(std::bit_cast<float>(*words)), bits_as<float>(weights), sums);
  }
};

struct OfBFloat16 {
  static constexpr int kElements = 2;
  static constexpr int kWords = kPairs ? 1 : 2;  // two: a row's elements as float32, which a load broadcasts
  static constexpr int kRows = kRegister == 64 ? 12 : 2;  // most registers hold sums
  static constexpr int kPairRows = kRegister == 64 ? 6 : 0;
  [[gnu::always_inline]] static Floats add(Floats sums, Words weights, const uint32_t* words) {
#if defined(__AVX512BF16__)
    const __m512i pair = _mm512_set1_epi32(static_cast<int>(*words));
    return std::bit_cast<Floats>(
        _mm512_dpbf16_ps((__m512)sums.part[0], (__m512bh)weights.part[0], (__m512bh)pair));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    const auto pair = (bfloat16x8_t)vdupq_n_u32(*words);
    return by_parts<float>([&](auto s, auto w) { return vbfdotq_f32((float32x4_t)s, (bfloat16x8_t)w, pair); }, sums,
                           weights);
#else
    sums = fma(bits_as<float>(weights << 16), Floats(std::bit_cast<float>(words[0])), sums);
    return fma(bits_as<float>(weights & 0xffff0000u), Floats(std::bit_cast<float>(words[1])), sums);
#endif
  }
};

template <typename Of, bool Nontemporal, bool Divided>
struct FloatWeight {
  const uint32_t* words;  // [blocks, steps, 16]
  const uint32_t* x;      // [rows, steps, Of::kWords]
  int64_t rows, blocks, steps, block_bytes;
  const Division& division;
  const Output& out;

  static constexpr int kSums = 2;  // per channel
  static constexpr int kRows = Of::kRows, kPairRows = Of::kPairRows;

  template <int R, int B>
  void tile(int64_t row, int64_t block) const {
    add_tile<R, B, Divided>(
        division, out, row, block,
        [&](TileResults<R, B>& to, int64_t begin, int64_t end) __attribute__((always_inline)) {
          add_steps(row, block, begin / Of::kElements, end / Of::kElements, to);
        });
  }

 private:
  template <int R, int B>
  [[gnu::always_inline]] void add_steps(int64_t row, int64_t block, int64_t s, int64_t end,
                                        TileResults<R, B>& results) const {
    const uint32_t* const a = x + row * steps * Of::kWords;
    const uint32_t* const from = words + block * steps * kBlock;
    Floats sums[R][B][kSums];
    each<R>([&](auto r) { each<B>([&](auto b) { each<kSums>([&](auto p) { sums[r][b][p] = Floats(0.0f); }); }); });
    const auto step = [&](int64_t s, auto p) __attribute__((always_inline)) {
      Words weights[B];
      each<B>([&](auto b) {
        const uint32_t* const word = from + (b * steps + s) * kBlock;
        prefetch<Nontemporal>(word);
        weights[b] = load_vector<uint32_t>(word);
      });
      each<R>([&](auto r) {
        const uint32_t* const x_words = a + (r * steps + s) * Of::kWords;
        each<B>([&](auto b) { sums[r][b][p] = Of::add(sums[r][b][p], weights[b], x_words); });
      });
    };
    for (; s + kSums <= end; s += kSums) each<kSums>([&](auto p) { step(s + p, p); });
    if (s < end) step(s, std::integral_constant<int, 0>{});
    each<R>([&](auto r) { each<B>([&](auto b) { results.of[r][b] = sums[r][b][0] + sums[r][b][1]; }); });
  }
};

// The rows, padded with zeros if their size is not padded already.
const void* padded_rows(const Rows& rows, int64_t inner, int64_t padded, int64_t size) {
  if (inner == padded) return rows.data;
  char* const to = Scratch::get().take<char>(rows.count * padded * size);
  for (int64_t r = 0; r < rows.count; ++r) {
    char* const row = to + r * padded * size;
    std::memcpy(row, static_cast<const char*>(rows.data) + r * inner * size, inner * size);
    std::memset(row + inner * size, 0, (padded - inner) * size);
  }
  return to;
}

// The words of all steps, [rows, steps, Of::kWords].
template <typename Of>
const uint32_t* words_of(const Rows& rows, int64_t inner, int64_t padded) {
  const void* const x = padded_rows(rows, inner, padded, sizeof(uint32_t) / Of::kElements);
  if constexpr (Of::kWords == 1) return static_cast<const uint32_t*>(x);
  const auto* const from = static_cast<const uint16_t*>(x);
  const int64_t count = rows.count * padded;
  uint32_t* const to = Scratch::get().take<uint32_t>(count);
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<uint32_t>(from[i]) << 16;
  return to;
}

template <typename Of>
void multiply_words(const Product& product, const Rows& rows, const Output& out) {
  const int64_t inner = padded_inner(product.kind, product.inner), steps = inner / Of::kElements;
  const uint32_t* const x = words_of<Of>(rows, product.inner, inner);
  const int64_t blocks = blocks_of(product.channels);
  const Division division(product, rows);
  const int64_t block_bytes = steps * kBlock * static_cast<int64_t>(sizeof(uint32_t));
  by_division(product, division, [&](auto nontemporal, auto divided) {
    multiply_in_registers(FloatWeight<Of, nontemporal, divided>{static_cast<const uint32_t*>(product.weight),
                                                                x, rows.count, blocks, steps, block_bytes, division,
                                                                out});
  });
}

}  // namespace

void multiply_floats(const Product& product, const Rows& rows, const Output& out) {
#if !defined(SPECINFER_TILED)  // otherwise tiles do that
  if (product.kind == Kind::kBFloat16) return multiply_words<OfBFloat16>(product, rows, out);
#endif
  multiply_words<OfFloat32>(product, rows, out);
}

}  // namespace specinfer
