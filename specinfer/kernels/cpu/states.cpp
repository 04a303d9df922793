#include <vector>

#include "recurrence.h"

namespace specinfer {

int32_t fault_of(const States& states, int64_t rows) {
  enum { kNone, kOrder, kSlot, kRow, kPlace, kParent, kSave };
  std::vector<char> seen(rows);
  int64_t end = 0, found = 0;
  for (int64_t r = 0; r < states.num_requests; ++r) {
    const StateRequest& its = states.requests[r];
    if (its.first != end || its.chain < 0 || its.visits < its.chain) return kOrder;
    end += its.visits;
    if (end > states.num_visits) return kOrder;
    if (its.source < -1 || its.source >= states.slots || its.slot < 0 || its.slot >= states.ring_slots) return kSlot;
    const Visit* const visits = states.visits + its.first;
    for (int64_t n = 0; n < its.visits; ++n) {
      const Visit& visit = visits[n];
      if (visit.row < -1 || visit.row >= rows || (visit.row >= 0 && seen[visit.row]++ != 0)) return kRow;
      found += visit.row >= 0 ? 1 : 0;
      if (visit.place < -1 || visit.place >= states.nodes || (visit.place < 0 && visit.row < 0)) return kPlace;
      if (n < its.chain ? visit.parent != n - 1 : visit.parent < its.chain - 1 || visit.parent >= n) return kParent;
      if (n < its.chain) continue;
      if (visit.inner != 0 && (n + 1 == its.visits || visits[n + 1].parent != n)) return kParent;
      const bool top = visit.parent == its.chain - 1;
      if (visit.depth != (top ? 1 : visits[visit.parent].depth + 1)) return kParent;
      if (!top && visits[visit.parent].inner == 0) return kParent;
    }
  }
  if (end != states.num_visits) return kOrder;
  if (found != rows) return kRow;
  for (int64_t s = 0; s < states.num_saves; ++s) {
    const StateSave& save = states.saves[s];
    if (save.request < 0 || save.request >= states.num_requests || save.slot < 0 || save.slot >= states.slots) return kSave;
    if (save.visits < 1 || save.visits > states.requests[save.request].chain) return kSave;
  }
  return kNone;
}

}  // namespace specinfer
