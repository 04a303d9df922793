// The CPU's matrix unit: eight tiles of up to 16 rows of 64 bytes, as defined in Intel's manual.
//
// Built with SPECINFER_TILES these are AMX instructions, with SPECINFER_PLAIN_TILES equivalent plain C++, so that code
// that uses them can be tested on any machine.
//
//   tiles 0..3   sums          `rows` rows of 16 float32 or int32
//   tiles 4, 5   weights       16 rows of 64 bytes: 16 channels with 2 bfloat16 or 4 bytes each
//   tiles 6, 7   activations   `rows` rows of 64 bytes

#pragma once

#if defined(SPECINFER_TILES) || defined(SPECINFER_PLAIN_TILES)

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(SPECINFER_TILES)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace specinfer {

constexpr int kTileRows = 16;
constexpr int kRowBytes = 64;
constexpr int kTileBytes = kTileRows * kRowBytes;

#if defined(SPECINFER_TILES)

// True if the kernel lets this process use tiles; the permission must be requested once.
inline bool tiles_allowed() {
  constexpr long kAskPermission = 0x1023, kTileData = 18;
  static const bool allowed = syscall(SYS_arch_prctl, kAskPermission, kTileData) == 0;
  return allowed;
}

// While it exists, this thread's tiles have the shapes above.
class Tiles {
 public:
  explicit Tiles(int rows) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, unused[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (int t = 0; t < 8; ++t) {
      shapes.row_bytes[t] = kRowBytes;
      shapes.rows[t] = static_cast<uint8_t>(t == 4 || t == 5 ? kTileRows : rows);
    }
    asm volatile("ldtilecfg %0" : : "m"(shapes));  // as an operand, or GCC 12 removes the stores as dead
  }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

template <int T>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(T));
}

// `stride` is the distance between rows in bytes.
template <int T>
inline void tile_load(const void* from, int64_t stride = kRowBytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
}

template <int T>
inline void tile_store(void* to, int64_t stride = kRowBytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
}

// Sums C += activations A times weights B, in bfloat16.
template <int C, int A, int B>
inline void tile_add_bfloat16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

// The same for signed activations and unsigned weights.
template <int C, int A, int B>
inline void tile_add_int8() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

// The same for signed weights.
template <int C, int A, int B>
inline void tile_add_signed() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

#else

inline bool tiles_allowed() { return true; }

struct PlainTiles {
  int rows = 0;
  alignas(64) uint8_t data[8][kTileRows][kRowBytes];

  int rows_of(int t) const { return t == 4 || t == 5 ? kTileRows : rows; }
};
inline thread_local PlainTiles plain_tiles;

class Tiles {
 public:
  explicit Tiles(int rows) {
    plain_tiles.rows = rows;
    std::memset(plain_tiles.data, 0, sizeof plain_tiles.data);
  }
  ~Tiles() { plain_tiles.rows = 0; }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

template <int T>
inline void tile_zero() {
  std::memset(plain_tiles.data[T], 0, kTileBytes);
}

template <int T>
inline void tile_load(const void* from, int64_t stride = kRowBytes) {
  tile_zero<T>();
  for (int r = 0; r < plain_tiles.rows_of(T); ++r) {
    std::memcpy(plain_tiles.data[T][r], static_cast<const char*>(from) + r * stride, kRowBytes);
  }
}

template <int T>
inline void tile_store(void* to, int64_t stride = kRowBytes) {
  for (int r = 0; r < plain_tiles.rows_of(T); ++r) {
    std::memcpy(static_cast<char*>(to) + r * stride, plain_tiles.data[T][r], kRowBytes);
  }
}

// A subnormal number counts as zero, as an operand and as a result.
inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

inline float float_of(const uint8_t* bfloat16) {
  uint16_t half;
  std::memcpy(&half, bfloat16, sizeof half);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return flushed(x);
}

// Even and odd elements have separate sums, which are added at the end; each step rounds once.
template <int C, int A, int B>
inline void tile_add_bfloat16() {
  for (int m = 0; m < plain_tiles.rows; ++m) {
    for (int n = 0; n < kTileRows; ++n) {
      float parts[2] = {};
      for (int k = 0; k < kTileRows; ++k) {
        for (int i = 0; i < 2; ++i) {
          const float a = float_of(plain_tiles.data[A][m] + 4 * k + 2 * i);
          const float b = float_of(plain_tiles.data[B][k] + 4 * n + 2 * i);
          parts[i] = flushed(std::fma(a, b, parts[i]));
        }
      }
      float sum;
      uint8_t* const at = plain_tiles.data[C][m] + 4 * n;
      std::memcpy(&sum, at, sizeof sum);
      sum = flushed(flushed(sum) + flushed(parts[0] + parts[1]));
      std::memcpy(at, &sum, sizeof sum);
    }
  }
}

template <int C, int A, int B, typename Weight = uint8_t>
inline void tile_add_int8() {
  for (int m = 0; m < plain_tiles.rows; ++m) {
    for (int n = 0; n < kTileRows; ++n) {
      int32_t sum;
      uint8_t* const at = plain_tiles.data[C][m] + 4 * n;
      std::memcpy(&sum, at, sizeof sum);
      for (int k = 0; k < kTileRows; ++k) {
        for (int i = 0; i < 4; ++i) {
          const auto weight = static_cast<Weight>(plain_tiles.data[B][k][4 * n + i]);
          sum += static_cast<int8_t>(plain_tiles.data[A][m][4 * k + i]) * weight;
        }
      }
      std::memcpy(at, &sum, sizeof sum);
    }
  }
}

template <int C, int A, int B>
inline void tile_add_signed() {
  tile_add_int8<C, A, B, int8_t>();
}

#endif

}  // namespace specinfer

#endif
