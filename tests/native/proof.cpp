// Compares native kernels with plain loops: `proof LIBRARY` prints a line for each fault.
//
// check/kernel_faults.py compares products with PyTorch on the machine that uses them. This program needs no Python, so it
// runs under an emulator, and also tests the operations between products. int8 products, int4 ones without a matrix
// unit, sums and copies must be equal to the last bit, and others within a tolerance. No row may depend on other rows.
// tests/unit/kernels/test_native_proof.py compiles and runs it.

#include "attention.h"
#include "logits.h"
#include "products.h"
#include "small_ops.h"

namespace proof {

template <typename T>
void prove_rows(const Library& library, Chance& chance) {
  for (const auto& [channels, inner] : kShapes) {
    prove_product<T>(library, sizeof(T) == 4 ? Kind::kFloat32 : Kind::kBFloat16, channels, inner, chance);
    prove_product<T>(library, Kind::kInt8, channels, inner, chance);
    prove_product<T>(library, Kind::kInt4, channels, inner, chance);
  }
  for (const bool centred : {false, true}) prove_norms<T>(library, centred, chance);
  prove_activations<T>(library, chance);
  prove_embeddings<T>(library, chance);
  prove_rows_of_logits<T>(library, chance);
  for (const int64_t head : {40, 64}) {
    for (const bool plain : {true, false}) {
      prove_attention<T>(library, head, 0, head == 40 ? 1 : 16, plain, false, chance);
      prove_attention<T>(library, head, 50, head == 40 ? 7 : 100, plain, false, chance);
      prove_attention<T>(library, head, 50, 16, plain, true, chance);
    }
    prove_rope<T>(library, head, head == 40, false, chance);
  }
  prove_rope<T>(library, 64, true, true, chance);
}

}  // namespace proof

int main(int count, char** arguments) {
  if (count != 2) {
    std::printf("usage: proof LIBRARY\n");
    return 2;
  }
  const proof::Library library(arguments[1]);
  if (library.ready() == 0) {
    std::printf("the system does not let this process use the CPU's matrix unit\n");
    return 1;
  }
  library.set_threads(2);
  proof::Chance chance;
  proof::prove_rows<float>(library, chance);
  proof::prove_rows<specinfer::BFloat16>(library, chance);
  proof::prove_reads(library, chance);
  return proof::faults == 0 ? 0 : 1;
}
