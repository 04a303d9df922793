// Memory for what a call computes on its way, kept for the next call; used under Pool::turn, by the caller.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "memory.h"

namespace specinfer {

class Scratch {
 public:
  static Scratch& get() {
    static Scratch scratch;
    return scratch;
  }

  // Gives back, at its end, what was taken while it lived.
  class Mark {
   public:
    Mark() : chunk_(get().chunk_), used_(get().used_) {}
    ~Mark() {
      get().chunk_ = chunk_;
      get().used_ = used_;
    }
    Mark(const Mark&) = delete;
    Mark& operator=(const Mark&) = delete;

   private:
    const size_t chunk_, used_;
  };

  // Uninitialised and aligned to cache lines.
  template <typename T>
  T* take(int64_t count) {
    const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + kLine - 1) / kLine * kLine;
    while (chunk_ < chunks_.size() && used_ + bytes > chunks_[chunk_].size) next();
    if (chunk_ == chunks_.size()) add(bytes);
    char* const at = chunks_[chunk_].data.get() + used_;
    used_ += bytes;
    return reinterpret_cast<T*>(at);
  }

 private:
  static constexpr size_t kLine = 64;

  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  struct Chunk {
    std::unique_ptr<char, Free> data;
    size_t size;
  };

  void next() {
    ++chunk_;
    used_ = 0;
  }

  void add(size_t bytes) {
    const size_t size = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    auto* const data = static_cast<char*>(std::aligned_alloc(kHugePage, size));
    if (data == nullptr) std::abort();
    want_huge_pages(data, size);
    chunks_.push_back({std::unique_ptr<char, Free>(data), size});
    used_ = 0;
  }

  std::vector<Chunk> chunks_;
  size_t chunk_ = 0, used_ = 0;
};

}  // namespace specinfer
