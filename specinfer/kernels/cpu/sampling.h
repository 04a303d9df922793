// What sampling and verification ask of logits; kernels/sampling.py is how it is called.

#pragma once

#include <cstdint>

#include "product.h"

namespace specinfer {

// ---- of one row of float32 ----

// The ids of the n >= 1 largest of `size` logits, largest first, ties lowest id first; returns how many.
int64_t most_likely(const float* logits, int64_t size, int64_t n, int64_t* ids);

// The sum of exp((logit - highest) / temperature).
double mass(const float* logits, int64_t size, double highest, double temperature);

// The entries of a support that may win the race argmin(E / w), w = exp((logit - logits[top]) / temperature),
// ascending; returns how many. ids: of the entries, or null where entry i is token i; room for all of them.
int64_t racers(const float* logits, int64_t size, const int64_t* ids, int64_t top, double temperature, uint64_t key,
               int64_t* indices);

// ---- of chosen rows of a block ----

// Logits as they lie: rows of `size` elements, `stride` elements apart.
struct LogitBlock {
  const void* data;
  int64_t rows, size, stride;
  Type type;
};

// Rows of a block, which may be named in any order, and more than once.
struct ChosenRows {
  const int64_t* ids;
  int64_t count;
};

// Of each row, for n >= 1: the ids of the n largest logits as most_likely has them, then -1; these logits, then -inf;
// how many they are; and the mass beside the largest one at the row's temperature. A row whose largest logit is not
// finite has none, and no mass that is a number. False, and nothing done, where the block lacks a row.
bool likeliest(const LogitBlock& block, const ChosenRows& rows, int64_t n, const double* temperatures, int64_t* ids,
               float* values, int64_t* found, double* masses);

// How a token is chosen in a row. As verify/scan.py has it.
struct Ask {
  double temperature;
  int64_t top_k;
  double top_p, min_p;
  uint64_t seed;
  int64_t position;
};

// What becomes of a logit, each step rounded to float32. As processors/changes.py has it.
struct Terms {
  float bias, repetition, frequency, presence;
};

// Changes of single logits of chosen rows: those of the n-th row, in order, end at ends[n], where those of the next one
// begin. Without `ends` there are none.
struct Changes {
  const int64_t* ids;
  const Terms* terms;
  const int64_t* ends;
};

// Of each row, with its changes, the token that verify/coupled.py chooses from verify/target_law.py's law: its id;
// kNone where the largest logit is not finite; kUndecided where rounding may decide, which is for the twin to say.
// Returns how many rows are undecided, or -1, and nothing done, where the block lacks a row or a logit to change.
constexpr int64_t kNone = -1, kUndecided = -2;
int64_t choices(const LogitBlock& block, const ChosenRows& rows, const Ask* asks, const Changes& changes, int64_t* ids);

// ---- for those that implement it ----

// f(row of the block, n) for the n-th chosen row, on the pool's threads; false where the block lacks one.
template <typename F>
bool for_rows(const LogitBlock& block, const ChosenRows& rows, const F& f) {
  constexpr int64_t kPieceElements = 1 << 14;  // worth being shared out
  for (int64_t n = 0; n < rows.count; ++n) {
    if (rows.ids[n] < 0 || rows.ids[n] >= block.rows) return false;
  }
  const auto read = [&](auto element) {
    using T = decltype(element);
    Pool::get().split(rows.count, kPieceElements / block.size + 1, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) f(static_cast<const T*>(block.data) + rows.ids[n] * block.stride, n);
    });
  };
  if (block.type == Type::kBFloat16) {
    read(BFloat16{});
  } else {
    read(float{});
  }
  return true;
}

}  // namespace specinfer
