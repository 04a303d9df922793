#include "text_index.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace specinfer {
namespace {

// Memory is counted by upper bounds.
constexpr int64_t kShortest = 32;
constexpr int64_t kIndexBytes = 640, kSegmentBytes = 320, kArrayBytes = 96;
constexpr int64_t kMost = int64_t{1} << 40;  // maximum number of tokens

int64_t grown(int64_t item, int64_t size) { return kArrayBytes + item * (size + size / 16 + 8); }

// Appends, with the growth of memory that `grown` computes.
template <typename T>
void append(std::vector<T>* all, const T* part, int64_t count) {
  const size_t size = all->size() + count;
  if (size > all->capacity()) all->reserve(size + size / 16 + 8);
  all->insert(all->end(), part, part + count);
}

// Erases the first elements and frees their memory.
template <typename T>
void forget(std::vector<T>* all, int64_t count) {
  std::vector<T> kept;
  append(&kept, all->data() + count, static_cast<int64_t>(all->size()) - count);
  all->swap(kept);
}

// A round of SipHash, which Python uses to hash strings: collisions cannot be found without the secret.
struct Sip {
  uint64_t a, b, c, d;

  void round() {
    a += b;
    c += d;
    b = std::rotl(b, 13) ^ a;
    d = std::rotl(d, 16) ^ c;
    a = std::rotl(a, 32);
    c += b;
    a += d;
    b = std::rotl(b, 17) ^ c;
    d = std::rotl(d, 21) ^ a;
    c = std::rotl(c, 32);
  }

  void add(uint64_t word) {
    d ^= word;
    round();
    a ^= word;
  }
};

}  // namespace

TextIndex* TextIndex::make(const int64_t* lengths, int64_t count, int64_t longest_segment, const uint64_t secret[2]) {
  if (count < 1 || lengths[0] < 1) return nullptr;
  for (int64_t i = 1; i < count; ++i) {
    if (lengths[i] < lengths[i - 1]) return nullptr;
  }
  auto* const index = new TextIndex();
  index->lengths_.assign(lengths, lengths + count);
  index->longest_ = longest_segment;
  index->secret_[0] = secret[0];
  index->secret_[1] = secret[1];
  return index;
}

bool TextIndex::extend(const int32_t* tokens, int64_t count) {
  if (count < 0 || std::any_of(tokens, tokens + count, [](int32_t token) { return token < 0; })) return false;
  const int64_t fitting = std::min(count, room()), left = count - fitting;
  if (left == 0) {
    if (count > 0) fill(tokens, count);
    return true;
  }
  Segment next = segment_after(fitting, left + 1);  // reserves room for a separator
  if (!next.allocated()) return false;
  if (fitting > 0) fill(tokens, fitting);
  segments_.push_back(std::move(next));
  fill(tokens + fitting, left);
  return true;
}

bool TextIndex::close_text() {
  if (room() == 0) {
    Segment next = segment_after(0, 1);
    if (!next.allocated()) return false;
    segments_.push_back(std::move(next));
  }
  append(&tokens_, &kSeparator, 1);
  text_start_ = end();
  append(&text_ends_, &text_start_, 1);
  return true;
}

int64_t TextIndex::drop_oldest_text() {
  if (num_texts() == 0) return -1;
  const int64_t start = base_;
  base_ = text_ends_[gone_++];
  if (2 * gone_ > static_cast<int64_t>(text_ends_.size())) {
    forget(&text_ends_, gone_);
    gone_ = 0;
  }
  const auto live = [this](const Segment& segment) { return segment.stop() > base_; };
  segments_.erase(segments_.begin(), std::find_if(segments_.begin(), segments_.end(), live));
  const int64_t dead = base_ - origin_;
  if (2 * dead > static_cast<int64_t>(tokens_.size())) {  // moves as many tokens as were dropped since the last time
    forget(&tokens_, dead);
    origin_ = base_;
  }
  return base_ - start;
}

int64_t TextIndex::num_bytes() const { return bytes_of(tokens_.size(), text_ends_.size()); }

int64_t TextIndex::bytes_with(int64_t count) const {
  const int64_t size = std::clamp<int64_t>(count, 0, kMost) + 1, missing = size - room();
  const int64_t more = missing > 0 ? segment_bytes(next_size(missing, num_tokens() + room())) : 0;
  return bytes_of(tokens_.size() + size, text_ends_.size() + 1) + more;
}

int64_t TextIndex::following(int64_t position, int64_t most) const {
  const int32_t *const first = at(position), *const last = first + std::min(most, end() - position);
  return std::find(first, last, kSeparator) - first;
}

int64_t TextIndex::matched(int64_t position, const int32_t* tail, const int32_t* stop) const {
  const int64_t most = std::min<int64_t>(stop - tail, position - base_);
  const int32_t* const before = at(position);
  int64_t count = 0;
  while (count < most && before[-1 - count] == stop[-1 - count]) ++count;
  return count;
}

int64_t TextIndex::next_size(int64_t needed, int64_t held) const {
  return std::max({kShortest, needed, longest_ < 0 ? held : std::min(held, longest_)});
}

int64_t TextIndex::segment_bytes(int64_t size) const {
  const auto lengths = static_cast<int64_t>(lengths_.size());
  return kSegmentBytes + lengths * (2 * kArrayBytes + 3 * static_cast<int64_t>(sizeof(int32_t)) * size);
}

int64_t TextIndex::bytes_of(int64_t tokens, int64_t texts) const {
  int64_t bytes = kIndexBytes + grown(sizeof(int32_t), tokens) + grown(sizeof(int64_t), texts);
  for (const Segment& segment : segments_) bytes += segment_bytes(segment.size);
  return bytes;
}

Segment TextIndex::segment_after(int64_t more, int64_t needed) const {
  return {end() + more, next_size(needed, num_tokens() + more), static_cast<int64_t>(lengths_.size())};
}

void TextIndex::fill(const int32_t* part, int64_t count) {
  const Segment& segment = segments_.back();
  const int64_t start = end();
  append(&tokens_, part, count);
  for (size_t which = 0; which < lengths_.size(); ++which) {
    const int64_t length = lengths_[which];
    int32_t *const heads = segment.heads(which), *const older = segment.older(which);
    for (int64_t stop = std::max(start + 1, text_start_ + length); stop <= end(); ++stop) {
      const int32_t* const gram = at(stop) - length;
      int32_t& head = heads[place_of(segment, which, gram, hash(gram, length))];
      older[stop - segment.start - 1] = head;
      head = static_cast<int32_t>(stop - segment.start);
    }
  }
}

uint64_t TextIndex::hash(const int32_t* gram, int64_t length) const {
  Sip sip{secret_[0] ^ 0x736f6d6570736575, secret_[1] ^ 0x646f72616e646f6d, secret_[0] ^ 0x6c7967656e657261,
          secret_[1] ^ 0x7465646279746573};
  int64_t i = 0;
  for (; i + 1 < length; i += 2) {
    sip.add(static_cast<uint32_t>(gram[i]) | static_cast<uint64_t>(static_cast<uint32_t>(gram[i + 1])) << 32);
  }
  const uint64_t last = static_cast<uint64_t>(length) << 56;
  sip.add(i < length ? last | static_cast<uint32_t>(gram[i]) : last);
  sip.c ^= 0xff;
  sip.round();
  sip.round();
  sip.round();
  return sip.a ^ sip.b ^ sip.c ^ sip.d;
}

int64_t TextIndex::place_of(const Segment& segment, int64_t which, const int32_t* gram, uint64_t hash) const {
  const int64_t length = lengths_[which], size = 2 * segment.size;
  const int32_t* const heads = segment.heads(which);
  auto at = static_cast<int64_t>(hash % static_cast<uint64_t>(size));
  while (heads[at] != 0) {
    const int64_t begin = segment.start + heads[at] - length - origin_;  // below 0: in a text that was dropped
    if (begin >= 0 && std::equal(gram, gram + length, tokens_.data() + begin)) break;
    at = at + 1 < size ? at + 1 : 0;
  }
  return at;
}

Places::Places(const TextIndex& index, int64_t which, const int32_t* gram)
    : index_(index),
      which_(which),
      gram_(gram),
      hash_(index.hash(gram, index.lengths_[which])),
      segment_(static_cast<int64_t>(index.segments_.size())) {}

int64_t Places::next() {
  while (stop_ == 0) {
    if (segment_ == 0) return -1;
    const Segment& segment = index_.segments_[--segment_];
    stop_ = segment.heads(which_)[index_.place_of(segment, which_, gram_, hash_)];
  }
  const Segment& segment = index_.segments_[segment_];
  const int64_t place = segment.start + stop_;
  if (place <= index_.base_) {  // dropped, as are all older ones
    segment_ = stop_ = 0;
    return -1;
  }
  stop_ = segment.older(which_)[stop_ - 1];
  return place;
}

}  // namespace specinfer
