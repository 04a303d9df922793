// The two products of attention, over laid-out blocks of 64 keys.
//
// Both are the same loop, C[query, column] += A[query, step] * B[step, column], where a step is a 32-bit word:
// one float, two bfloat16, or four int8, whose C is int32. With `Anew` C is overwritten.
//
//   scores   A = queries,  step = word of the head,  B = keys transposed,  column = key
//   values   A = weights,  step = keys of a word,    B = values,           column = element of the head
//
// On tiles of the matrix unit 16 steps are one operation, with separate sums of even and of odd elements; elsewhere
// steps follow in order. In both cases the order of a sum is fixed, independent of the other rows.

#pragma once

#include <array>
#include <cstring>

#include "byte_products.h"
#include "layer_ops.h"
#include "tiles.h"

namespace specinfer {

constexpr int kKeys = 64;                     // per block
constexpr int kKeyVectors = kKeys / kLanes;
constexpr int kStepsAtOnce = 16;              // steps of one operation of the matrix unit; steps are padded to it
constexpr int kMostQueries = 384;             // queries that share laid-out blocks: their sums stay in the L2 cache
constexpr int kQueriesAtOnce = 96;            // queries at once: their scores and weights stay in the L1 cache

template <typename T>
constexpr int kPerWord = sizeof(uint32_t) / sizeof(T);

template <typename T>
using SumOf = std::conditional_t<kPerWord<T> == 4, int32_t, float>;

// Keys and values that are read next, of one head and by slot. They are prefetched line by line during the products: a
// CPU waits for a few dozen lines at once, and stalls if it is told of more.
struct Ahead {
  const char *k, *v;
  int64_t stride, head;  // bytes
  const int32_t* slots;
  int64_t count;
  int64_t at = 0;

  void line() {
    if (count == 0) return;
    __builtin_prefetch(k + *slots * stride + at);
    __builtin_prefetch(v + *slots * stride + at);
    at += 64;
    if (at < head) return;
    at = 0;
    ++slots;
    --count;
  }

  void rest() {
    while (count > 0) line();
  }
};

// ---- on vectors ----

template <typename T>
[[gnu::always_inline]] inline Vector<SumOf<T>> multiply_words(uint32_t a, Words b, Vector<SumOf<T>> sum) {
  if constexpr (kPerWord<T> == 4) {
    return add_products(sum, multiplicand(std::bit_cast<Bytes>(b)), reinterpret_cast<const int8_t*>(&a));
  } else if constexpr (kPerWord<T> == 1) {
    return fma(Floats(std::bit_cast<float>(a)), bits_as<float>(b), sum);
  } else {
#if defined(__AVX512BF16__)
    const __m512i pair = _mm512_set1_epi32(static_cast<int>(a));
    return std::bit_cast<Floats>(_mm512_dpbf16_ps((__m512)sum.part[0], (__m512bh)pair, (__m512bh)b.part[0]));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    const auto pair = (bfloat16x8_t)vdupq_n_u32(a);
    return by_parts<float>([&](auto s, auto w) { return vbfdotq_f32((float32x4_t)s, pair, (bfloat16x8_t)w); }, sum, b);
#else
    sum = fma(Floats(std::bit_cast<float>(a << 16)), bits_as<float>(b << 16), sum);
    return fma(Floats(std::bit_cast<float>(a & 0xffff0000u)), bits_as<float>(b & 0xffff0000u), sum);
#endif
  }
}

// C[R, N vectors] += A[R, steps] * B[steps, N vectors]; strides in words.
template <typename T, bool Anew, int R, int N>
void vector_tile(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, SumOf<T>* c,
                 int64_t c_stride, int64_t steps, Ahead& ahead) {
  using Sum = Vector<SumOf<T>>;
  Sum sums[R][N];
  each<R>([&](auto r) {
    each<N>([&](auto n) { sums[r][n] = Anew ? Sum(0) : load_vector<SumOf<T>>(c + r * c_stride + n * kLanes); });
  });
  for (int64_t s = 0; s < steps; ++s) {
    ahead.line();
    Words words[N];
    each<N>([&](auto n) { words[n] = load_vector<uint32_t>(b + s * b_stride + n * kLanes); });
    each<R>([&](auto r) {
      const uint32_t word = a[r * a_stride + s];
      each<N>([&](auto n) { sums[r][n] = multiply_words<T>(word, words[n], sums[r][n]); });
    });
  }
  each<R>([&](auto r) { each<N>([&](auto n) { store_vector(c + r * c_stride + n * kLanes, sums[r][n]); }); });
}

constexpr int kVectorRows = kRegister == 64 ? 6 : kRegister == 32 ? 2 : 4;
constexpr int kVectorColumns = kRegister == 64 ? 4 : kRegister == 32 ? 2 : 1;  // vectors

template <typename T, bool Anew, int R>
void vector_rows(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, SumOf<T>* c,
                 int64_t c_stride, int64_t steps, int64_t columns, Ahead& ahead) {
  int64_t n = 0;
  for (; n + kVectorColumns * kLanes <= columns; n += kVectorColumns * kLanes) {
    vector_tile<T, Anew, R, kVectorColumns>(a, a_stride, b + n, b_stride, c + n, c_stride, steps, ahead);
  }
  for (; n < columns; n += kLanes) {
    vector_tile<T, Anew, R, 1>(a, a_stride, b + n, b_stride, c + n, c_stride, steps, ahead);
  }
}

template <typename T, bool Anew>
void multiply_on_vectors(int64_t rows, const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
                         SumOf<T>* c, int64_t c_stride, int64_t steps, int64_t columns, Ahead& ahead) {
  using Rows = decltype(&vector_rows<T, Anew, 1>);
  static constexpr auto by_rows = []<size_t... R>(std::index_sequence<R...>) {
    return std::array<Rows, sizeof...(R)>{vector_rows<T, Anew, static_cast<int>(R) + 1>...};
  }(std::make_index_sequence<kVectorRows>{});
  for (int64_t r = 0; r < rows; r += kVectorRows) {
    const int64_t n = std::min<int64_t>(kVectorRows, rows - r);
    by_rows[n - 1](a + r * a_stride, a_stride, b, b_stride, c + r * c_stride, c_stride, steps, columns, ahead);
  }
}

// ---- on tiles ----

#if defined(SPECINFER_TILED)

// M tiles of rows by N of columns; the second tile of rows starts `below` rows after the first.
template <bool Anew, int M, int N>
void tile_rows(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, float* c,
               int64_t c_stride, int64_t steps, int64_t below) {
  constexpr int64_t kWord = sizeof(uint32_t);
  each<M>([&](auto m) {
    each<N>([&](auto n) {
      if constexpr (Anew) {
        tile_zero<m * 2 + n>();
      } else {
        tile_load<m * 2 + n>(c + m * below * c_stride + n * kLanes, c_stride * kWord);
      }
    });
  });
  for (int64_t s = 0; s < steps; s += kStepsAtOnce) {
    each<M>([&](auto m) { tile_load<6 + m>(a + m * below * a_stride + s, a_stride * kWord); });
    each<N>([&](auto n) {
      tile_load<4 + n>(b + s * b_stride + n * kLanes, b_stride * kWord);
      each<M>([&](auto m) { tile_add_bfloat16<m * 2 + n, 6 + m, 4 + n>(); });
    });
  }
  each<M>([&](auto m) {
    each<N>([&](auto n) { tile_store<m * 2 + n>(c + m * below * c_stride + n * kLanes, c_stride * kWord); });
  });
}

// Rows are padded to whole tiles of kTileRows, unless there are fewer rows in total.
template <bool Anew>
void multiply_on_tiles(int64_t rows, const uint32_t* a, int64_t a_stride, const uint32_t* b,
                              int64_t b_stride, float* c, int64_t c_stride, int64_t steps, int64_t columns) {
  const Tiles tiles(static_cast<int>(std::min<int64_t>(rows, kTileRows)));
  for (int64_t r = 0; r < rows; r += 2 * kTileRows) {
    const auto two = r + kTileRows < rows;
    const uint32_t* const from = a + r * a_stride;
    float* const to = c + r * c_stride;
    int64_t n = 0;
    for (; n + 2 * kLanes <= columns; n += 2 * kLanes) {
      (two ? tile_rows<Anew, 2, 2> : tile_rows<Anew, 1, 2>)(from, a_stride, b + n, b_stride, to + n, c_stride, steps, kTileRows);
    }
    if (n < columns) {
      (two ? tile_rows<Anew, 2, 1> : tile_rows<Anew, 1, 1>)(from, a_stride, b + n, b_stride, to + n, c_stride, steps, kTileRows);
    }
  }
}

#endif

template <typename T>
constexpr bool kOnTiles =
#if defined(SPECINFER_TILED)
    kPerWord<T> == 2;
#else
    false;
#endif

// C += A * B; `columns` is a multiple of kLanes. A and B are padded with zeros to whole kStepsAtOnce.
template <typename T, bool Anew>
void multiply_block(int64_t rows, const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
                    SumOf<T>* c, int64_t c_stride, int64_t steps, int64_t columns, Ahead& ahead) {
#if defined(SPECINFER_TILED)
  if constexpr (kOnTiles<T>) {
    multiply_on_tiles<Anew>(rows, a, a_stride, b, b_stride, c, c_stride, steps, columns);
    return;
  } else
#endif
  {
    multiply_on_vectors<T, Anew>(rows, a, a_stride, b, b_stride, c, c_stride, steps, columns, ahead);
  }
}

// ---- a few rows, with values in place ----

// Two rows of a cache as the words of a step.
template <typename T>
[[gnu::always_inline]] inline Words step_of(const T* one, const T* other, int64_t n) {
  const Words low = bits_as<uint32_t>(load(one, n));
  if constexpr (kPerWord<T> == 1) return low;
  return other == nullptr ? low >> 16 : (low >> 16) | bits_as<uint32_t>(load(other, n));
}

// C[R, head] += weights[R, keys] * the values at `slots`, with the order and the bits of multiply_block.
template <typename T, int R>
void multiply_in_place(const T* weights, int64_t weights_stride, const T* v, const int32_t* slots, int64_t stride,
                       int64_t keys, int64_t head, float* c, int64_t c_stride) {
  const auto word = [&](int r, int64_t key) {
    uint32_t word;
    std::memcpy(&word, weights + r * weights_stride + key, sizeof word);
    return word;
  };
  for (int64_t i = 0; i < head; i += kLanes) {
    const int64_t n = head - i;
    Floats sums[R];
    each<R>([&](auto r) { sums[r] = load(c + r * c_stride + i); });
    if constexpr (kOnTiles<T>) {
      for (int64_t first = 0; first < keys; first += 2 * kStepsAtOnce) {
        Floats even[R], odd[R];
        each<R>([&](auto r) { even[r] = odd[r] = Floats(0.0f); });
        for (int64_t key = first; key < std::min<int64_t>(keys, first + 2 * kStepsAtOnce); key += 2) {
          const Floats one = load(v + slots[key] * stride + i, n);
          const Floats other = key + 1 < keys ? load(v + slots[key + 1] * stride + i, n) : Floats(0.0f);
          each<R>([&](auto r) {
            const uint32_t pair = word(r, key);
            even[r] = fma(Floats(std::bit_cast<float>(pair << 16)), one, even[r]);
            odd[r] = fma(Floats(std::bit_cast<float>(pair & 0xffff0000u)), other, odd[r]);
          });
        }
        each<R>([&](auto r) { sums[r] = sums[r] + (even[r] + odd[r]); });
      }
    } else {
      for (int64_t key = 0; key < keys; key += kPerWord<T>) {
        const T* const other = key + 1 < keys ? v + slots[key + 1] * stride + i : nullptr;
        const Words values = step_of<T>(v + slots[key] * stride + i, other, n);
        each<R>([&](auto r) { sums[r] = multiply_words<T>(word(r, key), values, sums[r]); });
      }
    }
    each<R>([&](auto r) { store(c + r * c_stride + i, sums[r]); });
  }
}

// ---- layout ----

// Bytes of weights as products take them.
inline Words unsigned_bytes(Words v) { return v ^ 0x80808080u; }

struct CacheShape {
  int64_t head;
  int64_t steps;   // words of a query or key head, padded
  int64_t padded;  // elements of a value head, whole vectors
  int64_t stride;  // elements between slots
};

// keys[step, key of 64] of `count` slots, with zeros after the head.
template <typename T>
void lay_out_keys(const CacheShape& shape, const T* k, const int32_t* slots, int64_t count, uint32_t* keys) {
  const int64_t size = shape.head * static_cast<int64_t>(sizeof(T));
  for (int64_t first = 0; first < count; first += kLanes) {
    const T* rows[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) rows[i] = k + slots[std::min(first + i, count - 1)] * shape.stride;
    for (int64_t step = 0; step < shape.steps; step += kLanes) {
      const int64_t bytes = std::clamp<int64_t>(size - step * sizeof(uint32_t), 0, sizeof(Words));
      Words v[kLanes];
      if (bytes == sizeof(Words)) {
        each<kLanes>([&](auto i) { v[i] = load_vector<uint32_t>(rows[i] + step * kPerWord<T>); });
      } else {
        each<kLanes>([&](auto i) {
          v[i] = Words(0);
          std::memcpy(&v[i], rows[i] + step * kPerWord<T>, bytes);
        });
      }
      transpose(v);
      each<kLanes>([&](auto i) {
        store_vector(keys + (step + i) * kKeys + first, kPerWord<T> == 4 ? unsigned_bytes(v[i]) : v[i]);
      });
    }
  }
}

// values[four keys, element] of int8 rows. Keys beyond the last are repeated, and have weights 0.
inline void lay_out_values(const CacheShape& shape, const int8_t* v, const int32_t* slots, int64_t count,
                           uint32_t* values) {
  for (int64_t key = 0; key < count; key += 4, values += shape.padded) {
    const uint8_t* rows[4];
    each<4>([&](auto n) {
      rows[n] = reinterpret_cast<const uint8_t*>(v + slots[std::min<int64_t>(key + n, count - 1)] * shape.stride);
    });
    for (int64_t i = 0; i < shape.padded; i += kLanes) {
      Words word = 0u;
      each<4>([&](auto n) {
        uint8_t rest[kLanes] = {};
        const bool whole = i + kLanes <= shape.head;
        if (!whole) std::memcpy(rest, rows[n] + i, shape.head - i);
        word = word | (widened(whole ? rows[n] + i : rest) << (8 * n));
      });
      store_vector(values + i, unsigned_bytes(word));
    }
  }
}

// values[keys of a word, element] of `count` slots, padded with zeros to whole kStepsAtOnce.
template <typename T>
void lay_out_values(const CacheShape& shape, const T* v, const int32_t* slots, int64_t count, uint32_t* values) {
  const int64_t steps = (count + kPerWord<T> - 1) / kPerWord<T>;
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t key = step * kPerWord<T>;
    const T* const one = v + slots[key] * shape.stride;
    const T* const other = key + 1 < count ? v + slots[std::min(key + 1, count - 1)] * shape.stride : nullptr;
    for (int64_t i = 0; i < shape.padded; i += kLanes) {
      store_vector(values + step * shape.padded + i,
                   step_of<T>(one + i, other == nullptr ? nullptr : other + i, shape.head - i));
    }
  }
  const int64_t padded = round_up(steps, kStepsAtOnce);
  std::memset(values + steps * shape.padded, 0, (padded - steps) * shape.padded * sizeof(uint32_t));
}

}  // namespace specinfer
