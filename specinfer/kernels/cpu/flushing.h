// Treatment of subnormal numbers while tiles and vectors compute the same values.

#pragma once

#if defined(SPECINFER_TILES)
#include <immintrin.h>
#endif

namespace specinfer {

#if defined(SPECINFER_TILES)
// Vectors flush subnormals to zero, as tiles do.
class Flushing {
 public:
  Flushing() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~Flushing() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
};
#else
struct Flushing {
  Flushing() {}
};
#endif

}  // namespace specinfer
