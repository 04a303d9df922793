#include "paths.h"

namespace specinfer {
namespace {

enum Fault : int32_t { kNone, kBlock, kRows, kTable, kPath };

// True if a row's path ascends, from its request's first positions, within the request's positions.
bool leads_inside(const Paths& paths, const Request& request, int64_t row) {
  const int64_t begin = paths.tail_ends[row], end = paths.tail_ends[row + 1];
  int64_t last = paths.shared[row] - 1;
  if (last < 0 || begin > end || end > paths.num_tails) return false;
  for (int64_t i = begin; i < end; ++i) {
    if (paths.tails[i] <= last) return false;
    last = paths.tails[i];
  }
  return last < request.positions;
}

}  // namespace

int32_t fault_of(const Paths& paths, int64_t num_slots) {
  if (paths.block_size < 1) return kBlock;
  const int64_t last_block = num_slots / paths.block_size - 1;
  for (int64_t i = 0; i < paths.num_blocks; ++i) {
    if (paths.tables[i] < 0 || paths.tables[i] > last_block) return kBlock;
  }
  if (paths.tail_ends[0] != 0) return kPath;
  int64_t row = 0;
  for (int64_t n = 0; n < paths.num_requests; ++n) {
    const Request& request = paths.requests[n];
    if (request.first != row || request.end <= row || request.end > paths.rows) return kRows;
    if (request.end - request.first > request.positions) return kRows;
    const int64_t blocks = (request.positions + paths.block_size - 1) / paths.block_size;
    const int64_t behind = n + 1 < paths.num_requests ? paths.requests[n + 1].table : paths.num_blocks;
    if (request.table < 0 || request.table + blocks > std::min(behind, paths.num_blocks)) return kTable;
    for (; row < request.end; ++row) {
      if (!leads_inside(paths, request, row)) return kPath;
    }
  }
  return row == paths.rows ? kNone : kRows;
}

}  // namespace specinfer
