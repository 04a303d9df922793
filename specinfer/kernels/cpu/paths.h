// The cache positions each row attends to, and the slots they lie in: attention/backend.py has the words.

#pragma once

#include <algorithm>
#include <cstdint>

namespace specinfer {

// Rows first..end - 1 of the pass are its last positions, one after another; `table` is where its blocks begin.
struct Request {
  int32_t first, end, table, positions;
};

// As kernels/structures.py has it.
struct Paths {
  const int32_t* tables;
  const Request* requests;
  const int32_t *shared, *tail_ends, *tails;
  int64_t num_blocks, num_requests, rows, num_tails, block_size;

  // The slots of `count` positions from `first` on, a run for each block.
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

  // The slot a row's K and V go to.
  int64_t own_slot(const Request& request, int64_t row) const {
    const int64_t position = request.positions - (request.end - row);
    return tables[request.table + position / block_size] * block_size + position % block_size;
  }
};

// What is wrong with paths over a cache of so many slots, by its number in attention/native.py; 0: nothing.
int32_t fault_of(const Paths& paths, int64_t num_slots);

}  // namespace specinfer
