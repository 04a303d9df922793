// Index of the positions where n-grams of some texts end, newest first (speculate/lookups/text_index.py).

#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

namespace specinfer {

constexpr int32_t kSeparator = -1;  // ends a closed text; tokens are >= 0

// The n-grams that end at the `size` positions after `start`. Ends are counted from `start`, so they begin at 1, and
// 0 means none. Its memory is zero at first, and pages are allocated when they are written.
class Segment {
 public:
  Segment(int64_t start, int64_t size, int64_t lengths)
      : start(start), size(size), ends_(static_cast<int32_t*>(calloc(3 * size * lengths, sizeof(int32_t)))) {}

  // For the n-gram length with that index: an open hash table of the newest ends, 2 * size places.
  int32_t* heads(int64_t which) const { return ends_.get() + 3 * size * which; }
  // The end before an end, at index end - 1.
  int32_t* older(int64_t which) const { return heads(which) + 2 * size; }
  int64_t stop() const { return start + size; }
  // True if its memory was allocated, and ends fit their type.
  bool allocated() const { return ends_ != nullptr && size <= INT32_MAX; }

  int64_t start, size;

 private:
  struct Free {
    void operator()(int32_t* memory) const { free(memory); }
  };
  std::unique_ptr<int32_t[], Free> ends_;
};

// Some texts, oldest first; the newest one is still growing. Positions count all tokens ever added, with separators.
class TextIndex {
 public:
  // lengths: of the indexed n-grams, ascending, 1 or more. A segment has at most `longest_segment` positions unless
  // more are added at once; below 0: unlimited. `secret` prevents texts made to collide in the table. Null if
  // there is no valid length.
  static TextIndex* make(const int64_t* lengths, int64_t count, int64_t longest_segment, const uint64_t secret[2]);

  // Adds tokens to the newest text. Returns false and does nothing if one is below 0 or memory is exhausted.
  bool extend(const int32_t* tokens, int64_t count);
  // Closes the newest text. Returns false and does nothing if memory is exhausted.
  bool close_text();
  // Drops the oldest closed text; returns the freed tokens, including its separator, or -1 if there is none.
  int64_t drop_oldest_text();

  int64_t num_tokens() const { return end() - base_; }
  int64_t num_texts() const { return static_cast<int64_t>(text_ends_.size()) - gone_; }
  int64_t base() const { return base_; }
  int64_t end() const { return origin_ + static_cast<int64_t>(tokens_.size()); }
  int64_t text_start() const { return text_start_; }
  const std::vector<int64_t>& lengths() const { return lengths_; }
  // The tokens from this position on, base() to end().
  const int32_t* at(int64_t position) const { return tokens_.data() + (position - origin_); }
  // The memory of the index, and its upper bound with one more text of `count` tokens.
  int64_t num_bytes() const;
  int64_t bytes_with(int64_t count) const;
  // The number of tokens that follow in the same text, at most `most`, from a position base() to end().
  int64_t following(int64_t position, int64_t most) const;
  // The number of tokens before a position that equal the last of `tail`, which ends at `stop`.
  int64_t matched(int64_t position, const int32_t* tail, const int32_t* stop) const;

 private:
  friend class Places;

  int64_t room() const { return segments_.empty() ? 0 : segments_.back().stop() - end(); }
  int64_t next_size(int64_t needed, int64_t held) const;
  int64_t segment_bytes(int64_t size) const;
  int64_t bytes_of(int64_t tokens, int64_t texts) const;
  // A segment for `needed` tokens, after `more` tokens to come in the newest one.
  Segment segment_after(int64_t more, int64_t needed) const;
  void fill(const int32_t* part, int64_t count);
  uint64_t hash(const int32_t* gram, int64_t length) const;
  // The place of an n-gram's newest end in a segment's table, existing or not.
  int64_t place_of(const Segment& segment, int64_t which, const int32_t* gram, uint64_t hash) const;

  std::vector<int64_t> lengths_;
  int64_t longest_ = -1;
  uint64_t secret_[2] = {0, 0};
  std::vector<int32_t> tokens_;  // position p is at p - origin_
  int64_t origin_ = 0;
  int64_t base_ = 0;                // the first live position
  int64_t text_start_ = 0;          // start of the newest text
  std::vector<int64_t> text_ends_;  // positions after the separators of closed texts
  int64_t gone_ = 0;                // number of text_ends_ that belong to dropped texts
  std::vector<Segment> segments_;  // oldest first; together they cover base to end
};

// Iterates over the places where an n-gram of the length with that index ends, newest first. A place is the position
// after it, even at the end of the texts. The n-gram's tokens and the texts must not change meanwhile.
class Places {
 public:
  Places(const TextIndex& index, int64_t which, const int32_t* gram);
  // The next place; -1: none.
  int64_t next();

 private:
  const TextIndex& index_;
  int64_t which_;
  const int32_t* gram_;
  uint64_t hash_;
  int64_t segment_;  // the segment whose chain is followed
  int32_t stop_ = 0;
};

}  // namespace specinfer
