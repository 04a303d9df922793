#include "file_blocks.h"

#include <unistd.h>

#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <vector>

namespace specinfer {
namespace {

constexpr int kHalf = kGroup / 2;
constexpr int8_t kOddest = -128;

// A group of 32 elements of a row: scale * step * level - min * min_step.
struct Group {
  uint16_t scale, min;  // float16
  int8_t steps[2];      // of each half
  uint8_t min_step;
  int8_t levels[kGroup];
};

inline uint16_t half_at(const uint8_t* from) { return static_cast<uint16_t>(from[0] | from[1] << 8); }

inline bool is_finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

inline uint16_t negated(uint16_t half) { return half ^ 0x8000; }

// The low halves of 16 bytes, then the high ones.
inline void read_halves(const uint8_t* from, Group& to) {
  for (int i = 0; i < kHalf; ++i) {
    to.levels[i] = static_cast<int8_t>(from[i] & 15);
    to.levels[kHalf + i] = static_cast<int8_t>(from[i] >> 4);
  }
}

// The same with a fifth bit for each level, less `offset`.
inline void read_fives(const uint8_t* fifth, const uint8_t* from, int offset, Group& to) {
  uint32_t bits;
  std::memcpy(&bits, fifth, 4);
  read_halves(from, to);
  for (int i = 0; i < kGroup; ++i) to.levels[i] = static_cast<int8_t>((to.levels[i] | (bits >> i & 1) << 4) - offset);
}

inline void set_scales(Group& to, uint16_t scale, uint16_t min = 0, uint8_t min_step = 0) {
  to.scale = scale;
  to.steps[0] = to.steps[1] = 1;
  to.min = min;
  to.min_step = min_step;
}

// Eight steps and eight min steps of six bits, in 12 bytes.
inline void read_steps(const uint8_t* block, Group* to) {
  const uint8_t* const packed = block + 4;
  for (int g = 0; g < kSpan; ++g) {
    const int low = g & 3;
    const bool late = g >= 4;
    const uint8_t step = late ? (packed[8 + low] & 15) | packed[low] >> 6 << 4 : packed[low] & 63;
    const uint8_t min_step = late ? packed[8 + low] >> 4 | packed[4 + low] >> 6 << 4 : packed[4 + low] & 63;
    set_scales(to[g], half_at(block), half_at(block + 2), min_step);
    to[g].steps[0] = to[g].steps[1] = static_cast<int8_t>(step);
  }
}

// Each 32 bytes have two groups, in their low and in their high halves.
inline void read_pairs(const uint8_t* from, Group* to) {
  for (int g = 0; g < kSpan; ++g) {
    for (int i = 0; i < kGroup; ++i) to[g].levels[i] = static_cast<int8_t>(from[g / 2 * kGroup + i] >> (g % 2 * 4) & 15);
  }
}

// Of each type: bytes of a block, its groups, and `read`, which reads a block.
template <FileKind>
struct Blocks;

template <>
struct Blocks<FileKind::kQ4_0> {
  static constexpr int kBytes = 18, kGroups = 1;
  static void read(const uint8_t* block, Group* to) {
    set_scales(*to, half_at(block), half_at(block), 8);  // a level of 8 represents 0
    read_halves(block + 2, *to);
  }
};

template <>
struct Blocks<FileKind::kQ4_1> {
  static constexpr int kBytes = 20, kGroups = 1;
  static void read(const uint8_t* block, Group* to) {
    set_scales(*to, half_at(block), negated(half_at(block + 2)), 1);
    read_halves(block + 4, *to);
  }
};

template <>
struct Blocks<FileKind::kQ5_0> {
  static constexpr int kBytes = 22, kGroups = 1;
  static void read(const uint8_t* block, Group* to) {
    set_scales(*to, half_at(block));
    read_fives(block + 2, block + 6, 16, *to);
  }
};

template <>
struct Blocks<FileKind::kQ5_1> {
  static constexpr int kBytes = 24, kGroups = 1;
  static void read(const uint8_t* block, Group* to) {
    set_scales(*to, half_at(block), negated(half_at(block + 2)), 1);
    read_fives(block + 4, block + 8, 0, *to);
  }
};

template <>
struct Blocks<FileKind::kQ8_0> {
  static constexpr int kBytes = 34, kGroups = 1;
  static void read(const uint8_t* block, Group* to) {
    set_scales(*to, half_at(block));
    std::memcpy(to->levels, block + 2, kGroup);
  }
};

template <>
struct Blocks<FileKind::kQ4_K> {
  static constexpr int kBytes = 144, kGroups = kSpan;
  static void read(const uint8_t* block, Group* to) {
    read_steps(block, to);
    read_pairs(block + 16, to);
  }
};

template <>
struct Blocks<FileKind::kQ5_K> {
  static constexpr int kBytes = 176, kGroups = kSpan;
  static void read(const uint8_t* block, Group* to) {
    read_steps(block, to);
    read_pairs(block + 48, to);
    for (int g = 0; g < kSpan; ++g) {
      for (int i = 0; i < kGroup; ++i) to[g].levels[i] |= static_cast<int8_t>((block[16 + i] >> g & 1) << 4);
    }
  }
};

template <>
struct Blocks<FileKind::kQ6_K> {
  static constexpr int kBytes = 210, kGroups = kSpan;
  // Two halves of 128 levels; 32 bytes have the upper two bits of four groups each.
  static void read(const uint8_t* block, Group* to) {
    for (int g = 0; g < kSpan; ++g) {
      const int part = g / 4, own = g % 4;
      const uint8_t* const low = block + part * 64 + own % 2 * kGroup;
      const uint8_t* const high = block + 128 + part * kGroup;
      set_scales(to[g], half_at(block + 208));
      std::memcpy(to[g].steps, block + 192 + 2 * g, 2);
      for (int i = 0; i < kGroup; ++i) {
        to[g].levels[i] = static_cast<int8_t>(((low[i] >> own / 2 * 4 & 15) | (high[i] >> 2 * own & 3) << 4) - 32);
      }
    }
  }
};

template <typename F>
auto by_kind(FileKind kind, F f) {
  switch (kind) {
    case FileKind::kQ4_0: return f(Blocks<FileKind::kQ4_0>());
    case FileKind::kQ4_1: return f(Blocks<FileKind::kQ4_1>());
    case FileKind::kQ5_0: return f(Blocks<FileKind::kQ5_0>());
    case FileKind::kQ5_1: return f(Blocks<FileKind::kQ5_1>());
    case FileKind::kQ8_0: return f(Blocks<FileKind::kQ8_0>());
    case FileKind::kQ4_K: return f(Blocks<FileKind::kQ4_K>());
    case FileKind::kQ5_K: return f(Blocks<FileKind::kQ5_K>());
    default: return f(Blocks<FileKind::kQ6_K>());
  }
}

// The arrays of a product's weight, to be written.
struct Arrays {
  explicit Arrays(const Product& to)
      : levels(writable<uint32_t>(to.weight)),
        scales(writable<uint16_t>(to.scales)),
        mins(writable<uint16_t>(to.blocks.mins)),
        steps(writable<uint8_t>(to.blocks.steps)),
        min_steps(writable<uint8_t>(to.blocks.min_steps)),
        span(to.blocks.span),
        groups(padded_inner(to.kind, to.inner) / kGroup),
        spans((groups + span - 1) / span),
        bits(to.kind == Kind::kBlocks4 ? 4 : to.kind == Kind::kBlocks6 ? 6 : 8) {}

  template <typename T>
  static T* writable(const void* array) {
    return static_cast<T*>(const_cast<void*>(array));
  }

  // Stores group `g` of channels begin .. end - 1 of a block; `of(channel)` is a channel's group.
  template <typename F>
  void store(int64_t block, int64_t g, int64_t begin, int64_t end, const F& of) const {
    const int64_t group = block * groups + g;
    const auto word = [](const int8_t* at) {
      uint32_t found;
      std::memcpy(&found, at, 4);
      return found;
    };
    const auto packed = [&](const int8_t* from, int j) {
      if (bits == 4) return word(from + 8 * j) | word(from + 8 * j + 4) << 4;
      if (bits == 8) return word(from + 4 * j) ^ 0x80808080u;
      const int8_t* const half = from + j / 3 * kHalf;
      const auto six = [&](int n) { return (word(half + 4 * n) ^ 0x20202020u) & 0x3f3f3f3fu; };
      return six(j % 3) | (six(3) >> j % 3 * 2 & 0x03030303u) << 6;
    };
    for (int j = 0; j < bits; ++j) {
      uint32_t* const to = levels + (group * bits + j) * kBlock;
      for (int64_t c = begin; c < end; ++c) to[c] = packed(of(c).levels, j);
    }
    const int64_t of_span = (block * spans + g / span) * kBlock;
    for (int64_t c = begin; c < end; ++c) {
      const Group& from = of(c);
      if (g % span == 0) {
        scales[of_span + c] = from.scale;
        if (mins != nullptr) mins[of_span + c] = from.min;
      }
      if (min_steps != nullptr) min_steps[group * kBlock + c] = from.min_step;
      if (steps == nullptr) continue;
      const int parts = bits == 4 ? 1 : 2;
      for (int n = 0; n < parts; ++n) {
        steps[(parts * group + n) * kBlock + c] = static_cast<uint8_t>(from.steps[n] + 128);
      }
    }
  }

  uint32_t* const levels;
  uint16_t *const scales, *const mins;
  uint8_t *const steps, *const min_steps;
  const int64_t span, groups, spans;
  const int bits;  // of a level
};

bool read_at(int file, uint8_t* to, int64_t bytes, int64_t offset) {
  while (bytes > 0) {
    const ssize_t count = pread(file, to, static_cast<size_t>(bytes), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    to += count;
    bytes -= count;
    offset += count;
  }
  return true;
}

inline float float_of(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
  if (rest < 0x400) return std::bit_cast<float>(std::bit_cast<uint32_t>(static_cast<float>(rest) * 0x1p-24f) | sign);
  return std::bit_cast<float>(sign | ((rest << 13) + (rest < 0x7c00 ? 112u << 23 : 224u << 23)));
}

}  // namespace

bool read_rows(const FileRows& rows, int64_t begin, int64_t end, uint8_t* to) {
  if (rows.order == nullptr) {
    return read_at(rows.file, to, (end - begin) * rows.row_bytes, rows.offset + (rows.first + begin) * rows.row_bytes);
  }
  for (int64_t row = begin; row < end; ++row) {
    uint8_t* const there = to + (row - begin) * rows.row_bytes;
    if (!read_at(rows.file, there, rows.row_bytes, rows.offset + rows.order[row] * rows.row_bytes)) return false;
  }
  return true;
}

Stored lay_out(const FileRows& rows, int64_t channel, const Product& to) {
  const Arrays arrays(to);
  std::atomic<Stored> result{Stored::kWhole};
  const int64_t end = channel + rows.count, first_block = channel / kBlock;
  Pool::get().split(blocks_of(end) - first_block, 1, [&](int64_t from, int64_t until) {
    std::vector<uint8_t> octets(static_cast<size_t>(kBlock * rows.row_bytes));
    for (int64_t block = first_block + from; block < first_block + until; ++block) {
      const int64_t start = block * kBlock, begin = std::max(start, channel), stop = std::min(start + kBlock, end);
      if (!read_rows(rows, begin - channel, stop - channel, octets.data())) {
        result = Stored::kUnread;
        return;
      }
      by_kind(rows.kind, [&](auto kind) {
        Group groups[kBlock][kind.kGroups];
        for (int64_t g = 0; g < arrays.groups; g += kind.kGroups) {
          bool odd = false, finite = true;
          for (int64_t c = begin; c < stop; ++c) {
            Group* const found = groups[c - start];
            kind.read(octets.data() + (c - begin) * rows.row_bytes + g / kind.kGroups * kind.kBytes, found);
            finite &= is_finite(found->scale) && is_finite(found->min);  // of all its groups
            if constexpr (kind.kBytes == 34) {
              for (const int8_t level : found->levels) odd |= level == kOddest;
            }
          }
          if (odd || !finite) result = odd ? Stored::kOddLevel : Stored::kNotFinite;
          for (int n = 0; n < kind.kGroups; ++n) {
            arrays.store(block, g + n, begin - start, stop - start, [&](int64_t c) -> const Group& { return groups[c][n]; });
          }
        }
      });
      if (stop != to.channels) continue;
      const Group none{};
      for (int64_t g = 0; g < arrays.groups; ++g) {
        arrays.store(block, g, stop - start, kBlock, [&](int64_t) -> const Group& { return none; });
      }
    }
  });
  return result;
}

void to_elements(FileKind kind, const uint8_t* blocks, int64_t elements, Type type, void* out) {
  by_kind(kind, [&](auto of_kind) {
    Group groups[of_kind.kGroups];
    for (int64_t at = 0; at < elements; blocks += of_kind.kBytes) {
      of_kind.read(blocks, groups);
      for (const Group& group : groups) {
        const float scale = float_of(group.scale), min = float_of(group.min) * static_cast<float>(group.min_step);
        float values[kGroup];
        for (int i = 0; i < kGroup; ++i) {
          values[i] = scale * static_cast<float>(group.steps[i / kHalf]) * static_cast<float>(group.levels[i]) - min;
        }
        for (int i = 0; i < kGroup; i += kLanes, at += kLanes) {
          if (type == Type::kBFloat16) {
            store(static_cast<BFloat16*>(out) + at, load(values + i));
          } else {
            store(static_cast<float*>(out) + at, load(values + i));
          }
        }
      }
    }
  });
}

}  // namespace specinfer
