// The cache positions each row attends to, and their slots; attention/backend.py defines the terms.

#pragma once

#include <algorithm>
#include <cstdint>

namespace specinfer {

// Rows first..end - 1 of the pass are its last positions, in order; `table` is the start of its block table.
struct Request {
  int32_t first, end, table, positions;
};

// As in kernels/structures.py.
struct Paths {
  const int32_t* tables;
  const Request* requests;
  const int32_t *shared, *tail_ends, *tails;
  int64_t num_blocks, num_requests, rows, num_tails, block_size;

  // The slots of `count` positions from `first` on; contiguous within each block.
  void slots(int64_t table, int64_t first, int64_t count, int32_t* to) const {
    if (count <= 0) return;
    const int32_t* block = tables + table + first / block_size;
    for (int64_t inside = first % block_size; count > 0; inside = 0, ++block) {
      const int64_t run = std::min(block_size - inside, count);
      const auto slot = static_cast<int32_t>(*block * block_size + inside);
      for (int64_t i = 0; i < run; ++i) to[i] = slot + static_cast<int32_t>(i);
      to += run;
      count -= run;
    }
  }

  // The slot for a row's K and V.
  int64_t own_slot(const Request& request, int64_t row) const {
    const int64_t position = request.positions - (request.end - row);
    return tables[request.table + position / block_size] * block_size + position % block_size;
  }
};

// The fault in paths over a cache of `num_slots` slots, numbered as in kernels/attention.py; 0: none.
int32_t fault_of(const Paths& paths, int64_t num_slots);

}  // namespace specinfer
