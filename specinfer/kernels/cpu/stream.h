#pragma once

#include <cstdint>

namespace specinfer {

// Bytes per second at which all threads read `bytes` of memory once, in whole cache lines: the lower bound of any
// pass that reads its weights.
double stream(const void* from, int64_t bytes);

}  // namespace specinfer
