// Scans of logits for sampling and verification; called by kernels/sampling.py.

#pragma once

#include <cstdint>

#include "product.h"

namespace specinfer {

// ---- one row of float32 ----

// The ids of the n >= 1 largest of `size` logits, descending, ties lowest id first; returns their number.
int64_t most_likely(const float* logits, int64_t size, int64_t n, int64_t* ids);

// The sum of exp((logit - highest) / temperature).
double mass(const float* logits, int64_t size, double highest, double temperature);

// The entries of a support that may win the race argmin(E / w), w = exp((logit - logits[top]) / temperature),
// ascending; returns their number. ids: of the entries, or null if entry i is token i; `indices` has room for all.
int64_t racers(const float* logits, int64_t size, const int64_t* ids, int64_t top, double temperature, uint64_t key,
               int64_t* indices);

// ---- chosen rows of a block ----

// Logits in place: rows of `size` elements, `stride` elements apart.
struct LogitBlock {
  const void* data;
  int64_t rows, size, stride;
  Type type;
};

// Rows of a block, in any order, possibly repeated.
struct ChosenRows {
  const int64_t* ids;
  int64_t count;
};

// For each row and n >= 1: the ids of the n largest logits as in most_likely, then -1; these logits, then -inf; their
// number; and the mass relative to the largest one at the row's temperature. A row whose largest logit is not finite
// has none, and a NaN mass. Returns false and does nothing if a row is outside the block.
bool likeliest(const LogitBlock& block, const ChosenRows& rows, int64_t n, const double* temperatures, int64_t* ids,
               float* values, int64_t* found, double* masses);

// The sampling parameters of a row, as in verify/scan.py.
struct RowSampling {
  double temperature;
  int64_t top_k;
  double top_p, min_p;
  uint64_t seed;
  int64_t position;
};

// The changes of a logit, each step rounded to float32, as in processors/changes.py.
struct Terms {
  float bias, repetition, frequency, presence;
};

// Changes of single logits of chosen rows: those of the n-th row end at ends[n], where those of the next one start.
// Without `ends` there are none.
struct LogitChanges {
  const int64_t* ids;
  const Terms* terms;
  const int64_t* ends;
};

// For each row, with its changes, the token that verify/coupled.py chooses from verify/target_law.py's distribution:
// its id; kNone if the largest logit is not finite; kUndecided if rounding may decide; then the caller uses coupled.py.
// Returns the number of undecided rows, or -1 without doing anything if a row or a logit to change is outside the
// block.
constexpr int64_t kNone = -1, kUndecided = -2;
int64_t choices(const LogitBlock& block, const ChosenRows& rows, const RowSampling* sampling,
                const LogitChanges& changes, int64_t* ids);

// ---- for implementations ----

// Calls f(row of the block, n) for the n-th chosen row, on the pool's threads; false if a row is outside the block.
template <typename F>
bool for_rows(const LogitBlock& block, const ChosenRows& rows, const F& f) {
  constexpr int64_t kPieceElements = 1 << 14;  // minimum work of a job
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
