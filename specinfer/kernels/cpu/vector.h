// Sixteen lanes of 32 bits at a time, in as many registers as the CPU needs for them: one of AVX-512, two of AVX2, four
// of NEON.
//
// Every function is a fixed sequence of operations, so a row's result depends neither on its place in memory nor on other
// rows.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace specinfer {

struct BFloat16 {
  uint16_t bits;
};

struct Half {
  uint16_t bits;
};

constexpr int kLanes = 16;
#if defined(__AVX512F__)
constexpr int kRegister = 64;  // bytes
#elif defined(__AVX2__)
constexpr int kRegister = 32;
#else
constexpr int kRegister = 16;
#endif
constexpr int kParts = 64 / kRegister;       // registers per vector
constexpr int kPartLanes = kLanes / kParts;  // lanes per register

// A register of N lanes.
template <typename T>
struct Register;
template <>
struct Register<float> {
  using Part = float __attribute__((vector_size(kRegister)));
};
template <>
struct Register<int32_t> {
  using Part = int32_t __attribute__((vector_size(kRegister)));
};
template <>
struct Register<uint32_t> {
  using Part = uint32_t __attribute__((vector_size(kRegister)));
};

template <typename T>
struct Vector {
  using Part = typename Register<T>::Part;
  Part part[kParts];

  Vector() = default;
  [[gnu::always_inline]] Vector(T x) {
    // Lane by lane: compilers do not treat 0 + x as a broadcast, since it turns -0 into 0.
    const Part all = [x]<size_t... I>(std::index_sequence<I...>) __attribute__((always_inline)) {
      return Part{(static_cast<void>(I), x)...};
    }(std::make_index_sequence<kPartLanes>{});
    for (Part& p : part) p = all;
  }

  T operator[](int lane) const { return part[lane / kPartLanes][lane % kPartLanes]; }
};

using Floats = Vector<float>;
using Ints = Vector<int32_t>;
using Words = Vector<uint32_t>;

// Apply `f` to each register of some vectors, giving a vector of T.
template <typename T, typename F, typename... Vectors>
[[gnu::always_inline]] inline Vector<T> by_parts(F f, const Vectors&... v) {
  Vector<T> out;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) out.part[i] = (typename Vector<T>::Part)f(v.part[i]...);
  return out;
}

#define SPECINFER_OPERATOR(op)                                                       \
  template <typename T>                                                              \
  [[gnu::always_inline]] inline Vector<T> operator op(Vector<T> a, Vector<T> b) {    \
    return by_parts<T>([](auto x, auto y) { return x op y; }, a, b);                 \
  }                                                                                  \
  template <typename T>                                                              \
  [[gnu::always_inline]] inline Vector<T> operator op(Vector<T> a, std::type_identity_t<T> b) { \
    return a op Vector<T>(b);                                                        \
  }
SPECINFER_OPERATOR(+)
SPECINFER_OPERATOR(-)
SPECINFER_OPERATOR(*)
SPECINFER_OPERATOR(/)
SPECINFER_OPERATOR(&)
SPECINFER_OPERATOR(|)
SPECINFER_OPERATOR(^)
#undef SPECINFER_OPERATOR

// Comparisons: all bits of a lane are set if it holds, else none.
#define SPECINFER_COMPARISON(op)                                                     \
  template <typename T>                                                              \
  [[gnu::always_inline]] inline Ints operator op(Vector<T> a, Vector<T> b) {         \
    return by_parts<int32_t>([](auto x, auto y) { return x op y; }, a, b);           \
  }                                                                                  \
  template <typename T>                                                              \
  [[gnu::always_inline]] inline Ints operator op(Vector<T> a, std::type_identity_t<T> b) { \
    return a op Vector<T>(b);                                                        \
  }
SPECINFER_COMPARISON(<)
SPECINFER_COMPARISON(<=)
SPECINFER_COMPARISON(>)
SPECINFER_COMPARISON(>=)
SPECINFER_COMPARISON(==)
SPECINFER_COMPARISON(!=)
#undef SPECINFER_COMPARISON

inline Words operator<<(Words a, int bits) {
  return by_parts<uint32_t>([=](auto x) { return x << bits; }, a);
}
inline Words operator>>(Words a, int bits) {
  return by_parts<uint32_t>([=](auto x) { return x >> bits; }, a);
}

// Lanes of a if the mask is set, else of b.
template <typename T>
[[gnu::always_inline]] inline Vector<T> select(Ints mask, Vector<T> a, Vector<T> b) {
  return by_parts<T>([](auto m, auto x, auto y) { return m ? x : y; }, mask, a, b);
}

template <typename To, typename From>
[[gnu::always_inline]] inline Vector<To> bits_as(Vector<From> v) {
  return std::bit_cast<Vector<To>>(v);
}

inline Floats to_floats(Ints v) {
  return by_parts<float>([](auto x) { return __builtin_convertvector(x, Floats::Part); }, v);
}
inline Floats to_floats(Words v) {
  return by_parts<float>([](auto x) { return __builtin_convertvector(x, Floats::Part); }, v);
}
inline Ints to_ints(Floats v) {
  return by_parts<int32_t>([](auto x) { return __builtin_convertvector(x, Ints::Part); }, v);
}

inline Ints lane_numbers() {
  constexpr int32_t numbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Ints v;
  std::memcpy(&v, numbers, sizeof v);
  return v;
}

// One bit per lane of a mask.
inline uint32_t lanes_of(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask.part[0]);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)mask.part[0])) |
         static_cast<uint32_t>(_mm256_movemask_ps((__m256)mask.part[1])) << 8;
#else
  uint32_t any = 0, bits = 0;
  for (const auto& part : mask.part) {
    for (int i = 0; i < kPartLanes; ++i) any |= part[i];
  }
  if (any == 0) return 0;
  for (int i = 0; i < kLanes; ++i) bits |= (mask[i] != 0 ? 1u : 0u) << i;
  return bits;
#endif
}

// ---- memory ----

template <typename T>
inline Vector<T> load_vector(const void* from) {
  Vector<T> v;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) {
    std::memcpy(&v.part[i], static_cast<const char*>(from) + i * kRegister, kRegister);
  }
  return v;
}

template <typename T>
inline void store_vector(void* to, Vector<T> v) {
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) {
    std::memcpy(static_cast<char*>(to) + i * kRegister, &v.part[i], kRegister);
  }
}

inline Floats load(const float* from) { return load_vector<float>(from); }

// Sixteen narrower numbers, one per lane: `widen` applied per register. GCC 12 would widen bytes one by one, and the
// others by halves.
template <typename T, typename From, typename F>
[[gnu::always_inline]] inline Vector<T> load_narrow(const From* from, F widen) {
  Vector<T> v;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) v.part[i] = (typename Vector<T>::Part)widen(from + i * kPartLanes);
  return v;
}

inline Words widened(const uint8_t* from) {
  return load_narrow<uint32_t>(from, [](const uint8_t* x) {
#if defined(__AVX512F__)
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
#elif defined(__AVX2__)
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
#else
    uint32_t four;
    std::memcpy(&four, x, sizeof four);
    return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
#endif
  });
}

inline Ints widened(const int8_t* from) {
  return load_narrow<int32_t>(from, [](const int8_t* x) {
#if defined(__AVX512F__)
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
#elif defined(__AVX2__)
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
#else
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(static_cast<uint32_t>(four)))));
#endif
  });
}

[[gnu::always_inline]] inline Words widened(const uint16_t* from) {
  return load_narrow<uint32_t>(from, [](const uint16_t* x) {
#if defined(__AVX512F__)
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
#elif defined(__AVX2__)
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
#else
    return vmovl_u16(vld1_u16(x));
#endif
  });
}

[[gnu::always_inline]] inline Floats load(const BFloat16* from) {
  return bits_as<float>(widened(reinterpret_cast<const uint16_t*>(from)) << 16);
}

inline Floats load(const int8_t* from) { return to_floats(widened(from)); }

inline Floats load(const Half* from) {
  return load_narrow<float>(from, [](const Half* x) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
#elif defined(__AVX2__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
#elif defined(__aarch64__)
    float16x4_t four;
    std::memcpy(&four, x, sizeof four);
    return vcvt_f32_f16(four);
#else
#error "this CPU needs its own conversion of float16"
#endif
  });
}

inline void store(float* to, Floats v) { store_vector(to, v); }

// Round to nearest, ties to even; keeps NaN.
inline void store(BFloat16* to, Floats v) {
#if defined(__AVX512BF16__)
  constexpr int kSubnormal = 0x20;  // which the instruction would flush to zero
  if (_mm512_fpclass_ps_mask((__m512)v.part[0], kSubnormal) == 0) [[likely]] {
    const __m256bh halves = _mm512_cvtneps_pbh((__m512)v.part[0]);
    std::memcpy(to, &halves, sizeof halves);
    return;
  }
#endif
  using Narrow = uint16_t __attribute__((vector_size(kRegister / 2)));
  const Words bits = bits_as<uint32_t>(v);
  const Words rounded = select(v == v, (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, Words(0x7fc0));
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) {
    const Narrow narrow = __builtin_convertvector(rounded.part[i], Narrow);
    std::memcpy(to + i * kPartLanes, &narrow, sizeof narrow);
  }
}

// Round to nearest, ties to even.
inline void store(Half* to, Floats v) {
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) {
#if defined(__AVX512F__)
    const auto narrow = _mm512_cvtps_ph((__m512)v.part[i], _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
    const auto narrow = _mm256_cvtps_ph((__m256)v.part[i], _MM_FROUND_TO_NEAREST_INT);
#else
    const auto narrow = vcvt_f16_f32((float32x4_t)v.part[i]);
#endif
    std::memcpy(to + i * kPartLanes, &narrow, sizeof narrow);
  }
}

// The first n lanes; zeros in the others.
template <typename T>
inline Floats load(const T* from, int64_t n) {
  if (n >= kLanes) return load(from);
  T lanes[kLanes] = {};
  if (n > 0) std::memcpy(lanes, from, n * sizeof(T));
  return load(lanes);
}

template <typename T>
inline void store(T* to, Floats v, int64_t n) {
  if (n >= kLanes) return store(to, v);
  T lanes[kLanes];
  store(lanes, v);
  std::memcpy(to, lanes, n * sizeof(T));
}

}  // namespace specinfer
