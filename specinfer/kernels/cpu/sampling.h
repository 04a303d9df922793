#pragma once

#include <cstdint>

namespace specinfer {

// The ids of the n >= 1 largest of `size` logits, largest first, ties lowest id first; returns how many.
int64_t most_likely(const float* logits, int64_t size, int64_t n, int64_t* ids);

// The sum of exp((logit - highest) * inverse_temperature).
double mass(const float* logits, int64_t size, double highest, double inverse_temperature);

// The entries of a support that may win the race argmin(E / w), w = exp((logit - logits[top]) / temperature),
// ascending; returns how many. ids: of the entries, or null where entry i is token i; room for all of them.
int64_t racers(const float* logits, int64_t size, const int64_t* ids, int64_t top, double temperature,
               double inverse_temperature, uint64_t key, int64_t* indices);

}  // namespace specinfer
