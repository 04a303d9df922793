#pragma once

#include <cstdint>

namespace specinfer {

// Bytes per second at which `bytes` of memory, in whole cache lines, are read once by all threads: the floor
// of whatever has to read its weights.
double stream(const void* from, int64_t bytes);

}  // namespace specinfer
