// Where the n-grams of some texts end, newest first (speculate/lookups/text_index.py).

#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

namespace specinfer {

constexpr int32_t kSeparator = -1;  // ends a text that is closed; no token is below 0

// The n-grams that end at `size` neighbouring positions, those after `start`. Ends are counted from `start`, so they
// begin at 1, and 0 is none. Its memory is zero at first, and the system brings it when it is written to.
class Stretch {
 public:
  Stretch(int64_t start, int64_t size, int64_t lengths)
      : start(start), size(size), ends_(static_cast<int32_t*>(calloc(3 * size * lengths, sizeof(int32_t)))) {}

  // Of the length of that number: an open hash table of the newest ends, 2 * size places.
  int32_t* heads(int64_t which) const { return ends_.get() + 3 * size * which; }
  // The end before an end, by end - 1.
  int32_t* older(int64_t which) const { return heads(which) + 2 * size; }
  int64_t stop() const { return start + size; }
  // Whether there is memory for it, and ends can be counted in it.
  bool there() const { return ends_ != nullptr && size <= INT32_MAX; }

  int64_t start, size;

 private:
  struct Free {
    void operator()(int32_t* memory) const { free(memory); }
  };
  std::unique_ptr<int32_t[], Free> ends_;
};

// Some texts, oldest first, the newest one still growing. Places count the tokens ever added, separators included.
class TextIndex {
 public:
  // lengths: of the n-grams that can be looked up, ascending, 1 or more. A stretch has at most so many positions
  // unless more are added at once, below 0: any number. `secret` keeps texts from being written so that their n-grams
  // collide. Null where there is no such length.
  static TextIndex* make(const int64_t* lengths, int64_t count, int64_t longest_stretch, const uint64_t secret[2]);

  // Adds tokens to the newest text. False, and nothing done, where one is below 0 or there is no memory.
  bool extend(const int32_t* tokens, int64_t count);
  // The next token begins another text. False, and nothing done, where there is no memory.
  bool close_text();
  // Forgets the oldest closed text; returns the tokens that were freed, its separator included, -1 where there is none.
  int64_t drop_oldest_text();

  int64_t num_tokens() const { return end() - base_; }
  int64_t num_texts() const { return static_cast<int64_t>(text_ends_.size()) - gone_; }
  int64_t base() const { return base_; }
  int64_t end() const { return origin_ + static_cast<int64_t>(tokens_.size()); }
  int64_t text_start() const { return text_start_; }
  const std::vector<int64_t>& lengths() const { return lengths_; }
  // The tokens from this position on, which is base() to end().
  const int32_t* at(int64_t position) const { return tokens_.data() + (position - origin_); }
  // The memory of all of it, and that at most with one more text of `count` tokens.
  int64_t num_bytes() const;
  int64_t bytes_with(int64_t count) const;
  // How many tokens follow in the same text, at most `most`, from a position on, which is base() to end().
  int64_t following(int64_t position, int64_t most) const;
  // How many tokens before a position equal the last of `tail`, which ends at `stop`.
  int64_t matched(int64_t position, const int32_t* tail, const int32_t* stop) const;
  // Whether texts, separators and stretches agree.
  bool sound() const;

 private:
  friend class Places;

  int64_t room() const { return stretches_.empty() ? 0 : stretches_.back().stop() - end(); }
  int64_t next_size(int64_t needed, int64_t held) const;
  int64_t stretch_bytes(int64_t size) const;
  int64_t bytes_of(int64_t tokens, int64_t texts) const;
  // A stretch for `needed` tokens, behind `more` that are still to come into the newest one.
  Stretch stretch_behind(int64_t more, int64_t needed) const;
  void fill(const int32_t* part, int64_t count);
  uint64_t hash(const int32_t* gram, int64_t length) const;
  // Where a stretch's table has the newest end of an n-gram, or would have it.
  int64_t place_of(const Stretch& stretch, int64_t which, const int32_t* gram, uint64_t hash) const;

  std::vector<int64_t> lengths_;
  int64_t longest_ = -1;
  uint64_t secret_[2] = {0, 0};
  std::vector<int32_t> tokens_;  // position p lies at p - origin_
  int64_t origin_ = 0;
  int64_t base_ = 0;                // the first position that is still alive
  int64_t text_start_ = 0;          // of the newest text
  std::vector<int64_t> text_ends_;  // positions after the separators of closed texts
  int64_t gone_ = 0;                // of these, texts that have left
  std::vector<Stretch> stretches_;  // oldest first; all together they reach from base to end
};

// Walks along the places where an n-gram of the length of that number ends, newest first. A place is the position of
// what follows, also where nothing does. The n-gram's tokens stay where they are meanwhile, and so do the texts.
class Places {
 public:
  Places(const TextIndex& index, int64_t which, const int32_t* gram);
  // The next place; -1: there is none.
  int64_t next();

 private:
  const TextIndex& index_;
  int64_t which_;
  const int32_t* gram_;
  uint64_t hash_;
  int64_t stretch_;  // of which the chain is walked along
  int32_t stop_ = 0;
};

}  // namespace specinfer
