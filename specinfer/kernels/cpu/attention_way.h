// The rows' paths, as attention walks them.

#pragma once

#include "paths.h"

namespace specinfer {

struct Way {
  const Paths& paths;

  int64_t tail(int64_t row) const { return paths.tail_ends[row + 1] - paths.tail_ends[row]; }
  int64_t shared(int64_t row) const { return paths.shared[row]; }
  int64_t length(int64_t row) const { return shared(row) + tail(row); }

  bool alike(int64_t a, int64_t b) const {
    return tail(a) == 0 ? tail(b) == 0 : tail(b) > 0 && shared(a) == shared(b);
  }

  // The positions of the row's request that are keys first..last of its path.
  void read(int64_t row, int64_t first, int64_t last, int32_t* to) const {
    const int32_t* const own = paths.tails + paths.tail_ends[row] - shared(row);
    for (int64_t i = first; i < last; ++i) *to++ = i < shared(row) ? static_cast<int32_t>(i) : own[i];
  }

  // End of the positions on these rows' paths, which ascend.
  int64_t end(int64_t first, int64_t last) const {
    int64_t end = 0;
    for (int64_t row = first; row < last; ++row) {
      end = std::max<int64_t>(end, tail(row) == 0 ? shared(row) : paths.tails[paths.tail_ends[row + 1] - 1] + 1);
    }
    return end;
  }
};

}  // namespace specinfer
