// Products with int8 and int4 weights in vector registers.

#include "quantized_rows.h"
#include "register_tiles.h"
#include "scratch.h"

namespace specinfer {
namespace {

// ---- four products a channel at once ----

// 64 unsigned bytes: four inner elements of 16 channels.
struct Bytes {
  using Part = uint8_t __attribute__((vector_size(kRegister)));
  Part part[kParts];
};

inline Bytes load_bytes(const uint8_t* from) {
  Bytes bytes;
  each<kParts>([&](auto i) { std::memcpy(&bytes.part[i], from + i * kRegister, kRegister); });
  return bytes;
}

inline int32_t word_at(const int8_t* a) {
  int32_t four;
  std::memcpy(&four, a, sizeof four);
  return four;
}

#if (defined(__AVX512VNNI__) && defined(__AVX512BW__)) || defined(__AVXVNNI__) || \
    (defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8))

// The unsigned bytes of weights as they are multiplied with the signed ones of rows.
inline Bytes multiplicand(Bytes weights) { return weights; }
constexpr bool kOffset = true;  // int8 weights are 128 too large, which the sum of the row makes up for

// The halves of bytes, 16 times too large, as the high ones are where they lie.
inline Bytes low_halves(Bytes v) {
  using Shorts = uint16_t __attribute__((vector_size(kRegister)));
  each<kParts>([&](auto i) { v.part[i] = (Bytes::Part)((Shorts)v.part[i] << 4) & 0xf0; });
  return v;
}
inline Bytes high_halves(Bytes v) {
  each<kParts>([&](auto i) { v.part[i] = v.part[i] & 0xf0; });
  return v;
}
constexpr int kTimes = 16;

// sums[c] += four elements of channel c times the four of `a`.
inline Ints add_products(Ints sums, Bytes weights, const int8_t* a) {
  const int32_t four = word_at(a);
#if defined(__AVX512F__)
  sums.part[0] = (Ints::Part)_mm512_dpbusd_epi32((__m512i)sums.part[0], (__m512i)weights.part[0],
                                                 _mm512_set1_epi32(four));
#elif defined(__aarch64__)
  each<kParts>([&](auto i) {
    sums.part[i] = (Ints::Part)vusdotq_s32((int32x4_t)sums.part[i], (uint8x16_t)weights.part[i],
                                           vreinterpretq_s8_s32(vdupq_n_s32(four)));
  });
#else
  each<kParts>([&](auto i) {
    sums.part[i] = (Ints::Part)_mm256_dpbusd_avx_epi32((__m256i)sums.part[i], (__m256i)weights.part[i],
                                                       _mm256_set1_epi32(four));
  });
#endif
  return sums;
}

#else

// Signed bytes: products of pairs, of at most 2 * 127 * 127, stay exact in 16 bits.
inline Bytes multiplicand(Bytes weights) {
  each<kParts>([&](auto i) { weights.part[i] = weights.part[i] ^ 0x80; });
  return weights;
}
constexpr bool kOffset = false;

inline Bytes low_halves(Bytes v) {
  each<kParts>([&](auto i) { v.part[i] = v.part[i] & 15; });
  return v;
}

#if defined(__AVX2__)

inline Bytes high_halves(Bytes v) {
  using Shorts = uint16_t __attribute__((vector_size(kRegister)));
  each<kParts>([&](auto i) { v.part[i] = (Bytes::Part)((Shorts)v.part[i] >> 4) & 15; });
  return v;
}

inline Ints add_products(Ints sums, Bytes weights, const int8_t* a) {
  const __m256i four = _mm256_set1_epi32(word_at(a)), size = _mm256_abs_epi8(four);
  each<kParts>([&](auto i) {
    const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8((__m256i)weights.part[i], four));
    sums.part[i] += (Ints::Part)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  });
  return sums;
}

#else

inline Bytes high_halves(Bytes v) {
  each<kParts>([&](auto i) { v.part[i] = v.part[i] >> 4; });
  return v;
}
constexpr int kTimes = 1;

inline Ints add_products(Ints sums, Bytes weights, const int8_t* a) {
  const int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(word_at(a)));
  each<kParts>([&](auto i) {
    const auto w = (int8x16_t)weights.part[i];
#if defined(__ARM_FEATURE_DOTPROD)
    sums.part[i] = (Ints::Part)vdotq_s32((int32x4_t)sums.part[i], w, four);
#else
    const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(four)), high = vmull_high_s8(w, four);
    sums.part[i] += (Ints::Part)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#endif
  });
  return sums;
}

#endif
#endif

// ---- a group of an int4 weight ----
//
// A GroupSum adds a row's products with a group up, eight elements at a time. with(zeros, values) is 16 times their
// sum + zeros times `values`, minus the sum of the row's values (quantized_rows.h); both fit 16 bits.

#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)

// Eight sums of two products of at most 15 * 127 fit 16 bits.
struct GroupSum {
  using Shorts = int16_t __attribute__((vector_size(kRegister)));
  Shorts pairs[kParts] = {};

  void add(const Bytes& low, const Bytes& high, const int8_t* a) {
    const __m256i four = _mm256_set1_epi32(word_at(a)), next = _mm256_set1_epi32(word_at(a + 4));
    each<kParts>([&](auto i) {
      pairs[i] += (Shorts)_mm256_maddubs_epi16((__m256i)low.part[i], four);
      pairs[i] += (Shorts)_mm256_maddubs_epi16((__m256i)high.part[i], next);
    });
  }

  Ints with(Ints zeros, int32_t values) const {
    Ints sums;
    each<kParts>([&](auto i) {
      const __m256i all = _mm256_madd_epi16((__m256i)pairs[i], _mm256_set1_epi16(16));
      const __m256i of_zeros = _mm256_madd_epi16((__m256i)zeros.part[i], _mm256_set1_epi32(values));
      sums.part[i] = (Ints::Part)_mm256_add_epi32(all, of_zeros);
    });
    return sums;
  }
};

#else

struct GroupSum {
  Ints products = 0;

  void add(const Bytes& low, const Bytes& high, const int8_t* a) {
    products = add_products(add_products(products, low, a), high, a + 4);
  }

  Ints with(Ints zeros, int32_t values) const {
#if defined(__AVX512F__)
    return std::bit_cast<Ints>(_mm512_dpwssd_epi32((__m512i)products.part[0], (__m512i)zeros.part[0],
                                                   _mm512_set1_epi32(values)));
#elif defined(__AVXVNNI__)
    return by_parts<int32_t>(
        [&](auto p, auto z) { return _mm256_dpwssd_avx_epi32((__m256i)p, (__m256i)z, _mm256_set1_epi32(values)); },
        products, zeros);
#else
    return bits_as<int32_t>(bits_as<uint32_t>(products) << (kTimes == 16 ? 0 : 4)) + zeros * values;
#endif
  }
};

#endif

// ---- tiles: R rows by B blocks ----

struct StraightRow {
  int8_t* to;

  int8_t* values(int64_t group) const { return to + group * kGroup; }
};

struct StraightRows {
  int8_t* to;
  int64_t groups;

  StraightRow operator()(int64_t row) const { return {to + row * groups * kGroup}; }
};

#if !defined(SPECINFER_TILED)  // where tiles do that

template <bool Nontemporal>
struct Int8Weight {
  const uint8_t* weights;
  const int8_t* values;  // [rows, inner]
  const float* row_scales;
  const int32_t* offsets;
  int64_t rows, blocks, inner, block_bytes;
  const Output& out;

  // Most registers hold sums.
  static constexpr int kRows = kRegister == 64 ? 16 : kRegister == 32 ? 4 : 6;
  static constexpr int kPairRows = kRegister == 64 ? 12 : 0;

  template <int R, int B>
  void tile(int64_t row, int64_t block) const {
    const int8_t* const a = values + row * inner;
    const uint8_t* const from = weights + block * block_bytes;
    Ints sums[R][B];
    each<R>([&](auto r) { each<B>([&](auto b) { sums[r][b] = Ints(kOffset ? offsets[row + r] : 0); }); });
    for (int64_t k = 0; k < inner; k += 4) {
      Bytes four[B];
      each<B>([&](auto b) {
        const uint8_t* const at = from + b * block_bytes + k * kBlock;
        prefetch<Nontemporal>(at);
        four[b] = multiplicand(load_bytes(at));
      });
      each<R>([&](auto r) {
        each<B>([&](auto b) { sums[r][b] = add_products(sums[r][b], four[b], a + r * inner + k); });
      });
    }
    TileResults<R, B, Ints> results;
    each<R>([&](auto r) { each<B>([&](auto b) { results.of[r][b] = sums[r][b]; }); });
    results.store(out, row, block, row_scales);
  }
};

#endif

template <bool Nontemporal, bool Divided>
struct Int4Weight {
  const uint8_t* levels;
  const Half* scales;
  const uint8_t* zeros;
  const int8_t* values;     // [rows, inner]
  const float* row_scales;  // [rows, groups]
  const int32_t* row_sums;
  int64_t rows, blocks, groups, block_bytes;
  const Division& division;
  const Output& out;

#if defined(SPECINFER_TILED)
  static constexpr int kRows = kFewRows;
#else
  static constexpr int kRows = kRegister == 64 ? 12 : kRegister == 32 ? 2 : 4;
#endif
  static constexpr int kPairRows = 0;

  template <int R, int B>
  void tile(int64_t row, int64_t block) const {
    static_assert(B == 1);
    add_tile<R, 1, Divided>(
        division, out, row, block,
        [&](TileResults<R, 1>& to, int64_t begin, int64_t end) __attribute__((always_inline)) {
          add_groups(row, block, begin / kGroup, end / kGroup, to);
        });
  }

 private:
  template <int R>
  [[gnu::always_inline]] void add_groups(int64_t row, int64_t block, int64_t begin, int64_t end,
                                         TileResults<R, 1>& results) const {
    const int8_t* const a = values + row * groups * kGroup;
    const float* const a_scales = row_scales + row * groups;
    const int32_t* const a_sums = row_sums + row * groups;
    Floats total[R];
    each<R>([&](auto r) { total[r] = Floats(0.0f); });
    for (int64_t g = begin; g < end; ++g) {
      const int64_t group = block * groups + g;
      GroupSum sums[R];
      each<4>([&](auto j) {
        const uint8_t* const at = levels + group * kGroupBytes + 64 * j;
        prefetch<Nontemporal>(at);
        const Bytes both = load_bytes(at), low = low_halves(both), high = high_halves(both);
        each<R>([&](auto r) { sums[r].add(low, high, a + (r * groups + g) * kGroup + 8 * j); });
      });
      const Ints of_zeros = bits_as<int32_t>(widened(zeros + group * kBlock));
      const Floats of_channels = load(scales + group * kBlock);
      each<R>([&](auto r) {
        const int64_t at = r * groups + g;
        total[r] = total[r] + to_floats(sums[r].with(of_zeros, a_sums[at])) * (of_channels * a_scales[at]);
      });
    }
    each<R>([&](auto r) { results.of[r][0] = total[r]; });
  }
};

}  // namespace

#if !defined(SPECINFER_TILED)
void multiply_int8(const Product& product, const Rows& rows, const Output& out) {
  const int64_t inner = padded_inner(product.kind, product.inner), groups = inner / kGroup;
  Scratch& scratch = Scratch::get();
  const StraightRows place{scratch.take<int8_t>(rows.count * inner), groups};
  auto* const scales = scratch.take<float>(rows.count);
  auto* const offsets = scratch.take<int32_t>(rows.count);
  quantize<Kind::kInt8>(product, rows, groups, place, scales, offsets);
  by_temporality(product, [&](auto nontemporal) {
    multiply_in_registers(Int8Weight<nontemporal>{static_cast<const uint8_t*>(product.weight), place.to, scales,
                                                  offsets, rows.count, blocks_of(product.channels), inner,
                                                  inner * kBlock, out});
  });
}
#endif

void multiply_int4(const Product& product, const Rows& rows, const Output& out) {
  const int64_t groups = padded_inner(product.kind, product.inner) / kGroup;
  Scratch& scratch = Scratch::get();
  const StraightRows place{scratch.take<int8_t>(rows.count * groups * kGroup), groups};
  auto* const scales = scratch.take<float>(rows.count * groups);
  auto* const sums = scratch.take<int32_t>(rows.count * groups);
  quantize<Kind::kInt4>(product, rows, groups, place, scales, sums);
  const Division division(product, rows);
  by_division(product, division, [&](auto nontemporal, auto divided) {
    multiply_in_registers(Int4Weight<nontemporal, divided>{static_cast<const uint8_t*>(product.weight),
                                                           static_cast<const Half*>(product.scales),
                                                           static_cast<const uint8_t*>(product.zeros), place.to,
                                                           scales, sums, rows.count, blocks_of(product.channels),
                                                           groups, groups * kGroupBytes, division, out});
  });
}

}  // namespace specinfer
