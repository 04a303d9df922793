#include "block_head.h"

#include <algorithm>
#include <cstring>

#include "scratch.h"

namespace specinfer {
namespace {

int64_t bytes_of(Type type) { return type == Type::kBFloat16 ? 2 : 4; }

// The rotations of these positions, in order.
Rope rope_of(const BlockHead& head, const int64_t* positions, int64_t rows) {
  return head.rotations.of(positions, rows, head.layers[0].heads.head / 2);
}

void times(const BlockHead& head, const Product& by, const void* from, int64_t rows, void* to) {
  const Timed timed(Stage::kProduct);
  multiply(by, {from, head.type, rows}, to);
}

void normed(const BlockHead& head, void* x, const void* y, const Norm& norm, const int64_t* chosen, int64_t rows,
            int64_t size, void* to) {
  const Timed timed(Stage::kNorm);
  add_norm(head.type, x, y, norm, to, chosen, rows, size, false);
}

char* room(const BlockHead& head, int64_t elements) {
  return Scratch::get().take<char>(elements * bytes_of(head.type));
}

// True if all slots, positions and tokens of the texts are valid.
bool there(const BlockHead& head, const BlockStep& step, const Caches& caches) {
  const int64_t slots = caches.slots / step.block_size;
  for (int64_t i = 0; i < step.num_blocks; ++i) {
    if (step.tables[i] < 0 || step.tables[i] >= slots) return false;
  }
  for (int64_t n = 0; n < step.count; ++n) {
    const BlockText& text = step.texts[n];
    const int64_t first = text.begin + text.count, end = first + text.rows;
    if (text.begin < 0 || text.count < 0 || text.rows < 0 || text.shift < 0) return false;
    if (end + text.shift > head.rotations.positions) return false;
    if (text.first_block < 0 || text.first_block + text.blocks > step.num_blocks) return false;
    if (text.blocks * step.block_size < end) return false;
    if (text.rows == 0) continue;
    if (text.rows <= head.skipped || text.anchor < 0 || text.anchor >= head.tokens) return false;
    if (head.entry.weight == nullptr) continue;
    if (text.rows * head.fc.channels > head.entry.channels) return false;
    if (text.count == 0 && text.last == nullptr) return false;
  }
  return true;
}

// Read all texts; writes the state of each text's last read row to `last`.
void read_texts(const BlockHead& head, const BlockStep& step, const Caches& caches, void* last) {
  int64_t rows = 0;
  for (int64_t n = 0; n < step.count; ++n) rows += step.texts[n].count;
  if (rows == 0) return;
  const Scratch::Mark mark;
  const int64_t size = head.fc.channels, bytes = size * bytes_of(head.type);
  const int64_t width = head.fc.inner * bytes_of(head.type);
  auto* const positions = Scratch::get().take<int64_t>(rows);
  auto* const slots = Scratch::get().take<int64_t>(rows);
  char* const given = room(head, rows * head.fc.inner);
  for (int64_t r = 0; r < rows; ++r) std::memcpy(given + r * width, step.taps[r], width);
  int64_t row = 0;
  for (int64_t n = 0; n < step.count; ++n) {
    const BlockText& text = step.texts[n];
    for (int64_t p = text.begin; p < text.begin + text.count; ++p, ++row) {
      positions[row] = p + text.shift;
      const int64_t block = step.tables[text.first_block + p / step.block_size];
      slots[row] = block * step.block_size + p % step.block_size;
    }
  }
  void* const made = room(head, rows * size);
  char* const fused = room(head, rows * size);
  times(head, head.fc, given, rows, made);
  normed(head, made, nullptr, head.hidden_norm, nullptr, rows, size, fused);
  void* const both = room(head, rows * head.context.channels);
  times(head, head.context, fused, rows, both);
  const Rope rope = rope_of(head, positions, rows);
  {
    const Timed timed(Stage::kRope);
    for (int64_t i = 0; i < head.num_layers; ++i) {
      store_keys_and_values(head.type, head.layers[i].heads, both, i, head.num_layers, slots, rows, rope.cos,
                            rope.sin, caches.layers[i].keys, caches.layers[i].values);
    }
  }
  row = 0;
  for (int64_t n = 0; n < step.count; ++n) {
    row += step.texts[n].count;
    if (step.texts[n].count == 0) continue;
    std::memcpy(static_cast<char*>(last) + n * bytes, fused + (row - 1) * bytes, bytes);
  }
}

// The blocks of a step, as rows of a pass.
struct Blocks {
  Paths paths{};
  int64_t* positions;        // position of each row in its text
  int64_t* chosen;           // rows that guess
  int64_t num_chosen = 0;
  int64_t longest = 0;       // rows of the longest block
  const BlockText** texts;   // text of each block

  Blocks(const BlockHead& head, const BlockStep& step) {
    Scratch& scratch = Scratch::get();
    int64_t rows = 0, count = 0;
    for (int64_t n = 0; n < step.count; ++n) {
      rows += step.texts[n].rows;
      count += step.texts[n].rows > 0 ? 1 : 0;
    }
    auto* const tables = scratch.take<int32_t>(step.num_blocks);
    auto* const requests = scratch.take<Request>(count);
    auto* const shared = scratch.take<int32_t>(rows);
    auto* const tail_ends = scratch.take<int32_t>(rows + 1);
    positions = scratch.take<int64_t>(rows);
    chosen = scratch.take<int64_t>(rows);
    texts = scratch.take<const BlockText*>(count);
    std::copy_n(step.tables, step.num_blocks, tables);
    std::fill_n(tail_ends, rows + 1, 0);
    int64_t block = 0;
    int32_t row = 0;
    for (int64_t n = 0; n < step.count; ++n) {
      const BlockText& text = step.texts[n];
      if (text.rows == 0) continue;
      longest = std::max(longest, text.rows);
      const auto begin = static_cast<int32_t>(text.begin + text.count), length = static_cast<int32_t>(text.rows);
      texts[block] = &text;
      requests[block++] = {row, row + length, static_cast<int32_t>(text.first_block), begin + length};
      for (int32_t r = 0; r < length; ++r, ++row) {
        positions[row] = begin + r + text.shift;
        shared[row] = begin + (head.causal != 0 ? r + 1 : length);
        if (r >= head.skipped) chosen[num_chosen++] = row;
      }
    }
    paths = {tables, requests, shared, tail_ends, nullptr, step.num_blocks, count, rows, 0, step.block_size};
  }
};

// Inputs of the first layer for the rows of all blocks, [T, D].
void* begun(const BlockHead& head, const BlockStep& step, const Blocks& blocks, const void* read_now) {
  const int64_t size = head.fc.channels, bytes = size * bytes_of(head.type), count = blocks.paths.num_requests;
  const bool entered = head.entry.weight != nullptr;
  const int64_t rows = blocks.paths.rows, embedded = entered ? count : rows;
  auto* const ids = Scratch::get().take<int64_t>(embedded);
  for (int64_t b = 0; b < count; ++b) {
    const Request& block = blocks.paths.requests[b];
    if (!entered) std::fill_n(ids + block.first, block.end - block.first, head.mask);
    ids[entered ? b : block.first] = blocks.texts[b]->anchor;
  }
  char* const anchors = room(head, embedded * size);
  {
    const Timed timed(Stage::kEmbed);
    embed(head.type, head.embedding, head.tokens, ids, head.scale, anchors, embedded, size);
  }
  if (!entered) return anchors;
  char* const anchors_normed = room(head, count * size);
  char* const both = room(head, 2 * count * size);
  normed(head, anchors, nullptr, head.entry_norm, nullptr, count, size, anchors_normed);
  for (int64_t b = 0; b < count; ++b) {
    const BlockText& text = *blocks.texts[b];
    const void* const last = text.count > 0 ? static_cast<const char*>(read_now) + (&text - step.texts) * bytes
                                            : text.last;
    std::memcpy(both + 2 * b * bytes, last, bytes);
    std::memcpy(both + (2 * b + 1) * bytes, anchors_normed + b * bytes, bytes);
  }
  // Rows that no block needs have the last channels, which are skipped.
  Product part = head.entry;
  part.channels = blocks.longest * size;
  char* const made = room(head, count * part.channels);
  times(head, part, both, count, made);
  if (rows == count * blocks.longest) return made;
  char* const all = room(head, rows * size);
  for (int64_t b = 0; b < count; ++b) {
    const int64_t first = blocks.paths.requests[b].first * bytes;
    std::memcpy(all + first, made + b * blocks.longest * bytes, blocks.texts[b]->rows * bytes);
  }
  return all;
}

}  // namespace

bool step_blocks(const BlockHead& head, const BlockStep& step, const Caches& caches, void* last, void* read,
                 void* logits) {
  if (!there(head, step, caches)) return false;
  read_texts(head, step, caches, last);
  const Scratch::Mark mark;
  const Blocks blocks(head, step);
  const int64_t rows = blocks.paths.rows, size = head.fc.channels;
  if (rows == 0) return true;
  void* const x = begun(head, step, blocks, last);
  void* const y = room(head, rows * size);
  const Rope rope = rope_of(head, blocks.positions, rows);
  const Rope ropes[3] = {rope, rope, {}};
  const Left left = run_layers(head.layers, head.num_layers, head.type, blocks.paths, ropes, caches.layers, x, y,
                               {nullptr, 0, nullptr});
  normed(head, x, left.added, head.norm, blocks.chosen, blocks.num_chosen, size, read);
  times(head, head.output, read, blocks.num_chosen, logits);
  return true;
}

}  // namespace specinfer
