// The matrices of a linear recurrence: all visits of a request, for one head and 16 of its values.

#pragma once

#include "recurrence.h"

namespace specinfer {

// What a visit brings to the matrices of all heads.
struct Tokens {
  const float* mixed;    // [visits, C], q and k normalized
  const float* decays;   // [visits, N]
  const float* beta_dt;  // [visits, N], the one of a gated delta rule, the other of Mamba-2
  const float* kq;       // [visits, groups], k.q
  float* values;         // [rows, N V], written for each visit with a row
};

// All requests' states of one layer.
void walk_states(const Recurrence& block, const States& states, const Tokens& tokens);

}  // namespace specinfer
