#include "scratch.h"

#include <cstdlib>

#include "memory.h"

namespace specinfer {

Scratch& Scratch::get() {
  static Scratch scratch;
  return scratch;
}

void* Scratch::take_bytes(size_t bytes) {
  constexpr size_t kLine = 64;
  bytes = (bytes + kLine - 1) / kLine * kLine;
  while (chunk_ < count_ && used_ + bytes > chunks_[chunk_].size) {
    ++chunk_;
    used_ = 0;
  }
  if (chunk_ == count_) {
    size_t size = count_ == 0 ? kHugePage : 2 * chunks_[count_ - 1].size;
    while (size < bytes) size *= 2;
    auto* const data = count_ == kMostChunks ? nullptr : static_cast<char*>(std::aligned_alloc(kHugePage, size));
    if (data == nullptr) std::abort();
    want_huge_pages(data, size);
    chunks_[count_++] = {data, size};
    used_ = 0;
  }
  char* const at = chunks_[chunk_].data + used_;
  used_ += bytes;
  return at;
}

}  // namespace specinfer
