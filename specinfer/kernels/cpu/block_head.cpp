#include "block_head.h"

#include <algorithm>
#include <cstring>

#include "scratch.h"

namespace specinfer {
namespace {

int64_t bytes_of(Type type) { return type == Type::kBFloat16 ? 2 : 4; }

bool within(const int64_t* numbers, int64_t count, int64_t end) {
  return std::all_of(numbers, numbers + count, [=](int64_t n) { return 0 <= n && n < end; });
}

// The rotations of these positions, side by side.
Rope rope_of(const BlockHead& head, const int64_t* positions, int64_t rows) {
  const int64_t half = head.layers[0].heads.head / 2;
  auto* const cos = Scratch::get().take<float>(rows * half);
  auto* const sin = Scratch::get().take<float>(rows * half);
  for (int64_t r = 0; r < rows; ++r) {
    std::copy_n(head.cos + positions[r] * half, half, cos + r * half);
    std::copy_n(head.sin + positions[r] * half, half, sin + r * half);
  }
  return {cos, sin};
}

void times(const BlockHead& head, const Product& by, const void* from, int64_t rows, void* to) {
  const Timed timed(Stage::kProduct);
  multiply(by, {from, head.type, rows}, to);
}

void norm(const BlockHead& head, void* x, const void* y, const void* weight, const int64_t* chosen, int64_t rows,
          int64_t size, void* to) {
  const Timed timed(Stage::kNorm);
  add_rms_norm(head.type, x, y, weight, to, chosen, rows, size, head.eps, false);
}

// What the rows of all blocks begin with, [T, D].
void* entered(const BlockHead& head, const Paths& paths, void* anchors, const void* const* last) {
  const int64_t blocks = paths.num_requests, size = head.fc.channels, bytes = size * bytes_of(head.type);
  const int64_t wide = head.entry.channels;
  char* const read = Scratch::get().take<char>(blocks * 2 * bytes);
  char* const normed = Scratch::get().take<char>(blocks * bytes);
  char* const made = Scratch::get().take<char>(blocks * wide * bytes_of(head.type));
  norm(head, anchors, nullptr, head.entry_norm, nullptr, blocks, size, normed);
  for (int64_t b = 0; b < blocks; ++b) {
    std::memcpy(read + 2 * b * bytes, last[b], bytes);
    std::memcpy(read + (2 * b + 1) * bytes, normed + b * bytes, bytes);
  }
  // Of the last rows of blocks none may be wanted, and their channels are the last ones.
  int64_t longest = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    longest = std::max<int64_t>(longest, paths.requests[b].end - paths.requests[b].first);
  }
  Product part = head.entry;
  part.channels = std::min(wide, longest * size);
  times(head, part, read, blocks, made);
  if (blocks == 1) return made;
  char* const rows = Scratch::get().take<char>(paths.rows * bytes);
  for (int64_t b = 0; b < blocks; ++b) {
    const Request& block = paths.requests[b];
    std::memcpy(rows + block.first * bytes, made + b * part.channels * bytes_of(head.type),
                (block.end - block.first) * bytes);
  }
  return rows;
}

}  // namespace

bool read_texts(const BlockHead& head, const void* const* taps, const int64_t* positions, const int64_t* slots,
                int64_t rows, const Caches& caches, void* fused) {
  if (!within(positions, rows, head.positions) || !within(slots, rows, caches.slots)) return false;
  const Scratch::Mark mark;
  const int64_t size = head.fc.channels, width = head.fc.inner * bytes_of(head.type);
  char* const given = Scratch::get().take<char>(rows * width);
  for (int64_t r = 0; r < rows; ++r) std::memcpy(given + r * width, taps[r], width);
  void* const made = Scratch::get().take<char>(rows * size * bytes_of(head.type));
  times(head, head.fc, given, rows, made);
  norm(head, made, nullptr, head.hidden_norm, nullptr, rows, size, fused);
  void* const both = Scratch::get().take<char>(rows * head.context.channels * bytes_of(head.type));
  times(head, head.context, fused, rows, both);
  const Rope rope = rope_of(head, positions, rows);
  const Timed timed(Stage::kRope);
  for (int64_t i = 0; i < head.num_layers; ++i) {
    store_keys_and_values(head.type, head.layers[i].heads, both, i, head.num_layers, slots, rows, rope.cos, rope.sin,
                          const_cast<void*>(caches.keys[i]), const_cast<void*>(caches.values[i]));
  }
  return true;
}

bool guess_blocks(const BlockHead& head, const Paths& paths, const int64_t* positions, void* begin,
                  const void* const* last, const int64_t* chosen, int64_t count, const Caches& caches, void* read,
                  void* logits) {
  if (!within(positions, paths.rows, head.positions) || !within(chosen, count, paths.rows)) return false;
  const int64_t size = head.fc.channels;
  for (int64_t b = 0; head.entry.weight != nullptr && b < paths.num_requests; ++b) {
    if ((paths.requests[b].end - paths.requests[b].first) * size > head.entry.channels) return false;
  }
  const Scratch::Mark mark;
  void* const x = head.entry.weight == nullptr ? begin : entered(head, paths, begin, last);
  void* const y = Scratch::get().take<char>(paths.rows * size * bytes_of(head.type));
  const Rope rope = rope_of(head, positions, paths.rows);
  const Rope both[2] = {rope, rope};
  run_layers(head.layers, 0, head.num_layers, head.type, head.gelu != 0, head.eps, paths, both, caches.keys,
             caches.values, {x, nullptr, y}, {nullptr, 0, nullptr});
  norm(head, x, y, head.norm, chosen, count, size, read);
  times(head, head.output, read, count, logits);
  return true;
}

}  // namespace specinfer
