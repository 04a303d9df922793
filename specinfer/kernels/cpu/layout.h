#pragma once

#include "product.h"

namespace specinfer {

// A matrix [channels, inner] as products read it (product.h), padded with zeros. Elements: float32, bfloat16,
// or signed int8, which becomes unsigned. `to` has room for all blocks.
void lay_out_weight(Kind kind, const void* from, int64_t channels, int64_t inner, void* to);

}  // namespace specinfer
