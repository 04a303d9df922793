// Temporary memory of a call, kept for the next call; used within the caller's Claim.

#pragma once

#include <cstddef>
#include <cstdint>

namespace specinfer {

class Scratch {
 public:
  static Scratch& get();

  // On destruction frees the memory taken during its lifetime.
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
    return static_cast<T*>(take_bytes(static_cast<size_t>(count) * sizeof(T)));
  }

 private:
  struct Chunk {
    char* data;
    size_t size;
  };

  void* take_bytes(size_t bytes);

  static constexpr size_t kMostChunks = 64;  // each at least twice as large as the one before
  Chunk chunks_[kMostChunks] = {};
  size_t count_ = 0, chunk_ = 0, used_ = 0;
};

}  // namespace specinfer
