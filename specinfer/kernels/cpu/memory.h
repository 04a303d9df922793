#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace specinfer {

constexpr size_t kHugePage = 1 << 21;

// Request large pages for unwritten memory that covers whole ones. Weights are read once per pass, and with
// pages of 4 KB a core also waits for address translation.
inline void want_huge_pages(void* memory, size_t bytes) {
#if defined(MADV_HUGEPAGE)
  const auto from = (reinterpret_cast<uintptr_t>(memory) + kHugePage - 1) / kHugePage * kHugePage;
  const auto to = (reinterpret_cast<uintptr_t>(memory) + bytes) / kHugePage * kHugePage;
  if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#else
  static_cast<void>(memory);
  static_cast<void>(bytes);
#endif
}

}  // namespace specinfer
