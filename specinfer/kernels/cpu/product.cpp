#include "product.h"

#include "scratch.h"

namespace specinfer {

void multiply(const Product& product, const Rows& rows, void* out) {
  if (rows.count == 0 || product.channels == 0) return;
  const Scratch::Mark mark;
  if (product.exchange != nullptr && !rows.partial) return multiply_with_others(product, rows, out);
  const Output output(product, rows, out);
  switch (product.kind) {
    case Kind::kBlocks4:
    case Kind::kBlocks6:
    case Kind::kBlocks8: return multiply_blocks(product, rows, output);
#if defined(SPECINFER_TILED)
    case Kind::kInt4:
      if (product.loose != 0 && rows.count <= kFewRows) return multiply_int4(product, rows, output);
      return multiply_tiles(product, rows, output);
    case Kind::kBFloat16:
    case Kind::kInt8: return multiply_tiles(product, rows, output);
#else
    case Kind::kInt8: return multiply_int8(product, rows, output);
    case Kind::kInt4: return multiply_int4(product, rows, output);
#endif
    default: return multiply_floats(product, rows, output);
  }
}

}  // namespace specinfer
