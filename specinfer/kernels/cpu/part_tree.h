// The order in which parts of a sum of floats are added, independent of the number of processes.
//
// Parts are numbered over all processes. Two adjacent branches of equal size are added if the first starts at a multiple
// of their total size; the remaining ones are added from right to left. Six parts:
//
//   ((0 + 1) + (2 + 3)) + (4 + 5)
//
// A process with some of the parts leaves subtotals, each a complete branch of that tree: for parts 1 .. 5 these are 1,
// 2 + 3 and 4 + 5. Pushing the subtotals of all processes in order adds up the same tree.

#pragma once

#include "product.h"

namespace specinfer {

class PartTree {
 public:
  static constexpr int kMost = 20;  // maximum branches at a time, for up to 256 parts

  explicit PartTree(int64_t first) : end_(first) {}

  // Appends a branch of `parts` parts; returns how often the last two must then be added.
  int push(int64_t parts) {
    parts_[size_++] = parts;
    end_ += parts;
    int times = 0;
    // Branches have a power of two of parts, so these are the low bits of a multiple.
    for (; size_ > 1 && parts_[size_ - 1] == parts_[size_ - 2] && (end_ & (2 * parts_[size_ - 1] - 1)) == 0; ++times) {
      parts_[--size_ - 1] *= 2;
    }
    return times;
  }

  int size() const { return size_; }
  int64_t parts(int branch) const { return parts_[branch]; }

 private:
  int64_t parts_[kMost];
  int size_ = 0;
  int64_t end_;
};

// The branches of a product's own parts.
inline PartTree branches_of(int64_t first, int64_t parts) {
  PartTree tree(first);
  for (int64_t p = 0; p < parts; ++p) tree.push(1);
  return tree;
}

// A product's parts in its weights' memory; a single one if it has none.
class Division {
 public:
  Division(const Product& product, const Rows& rows)
      : count(product.parts.ends == nullptr ? 1 : product.parts.count),
        inner(padded_inner(product.kind, product.inner)),
        partial_(rows.partial),
        ends_(product.parts.ends) {
    if (!divided()) return;
    PartTree tree(product.parts.first);
    for (int64_t p = 0; p < count; ++p) merges_[p] = static_cast<uint8_t>(tree.push(1));
    if (!partial_) merges_[count - 1] += static_cast<uint8_t>(tree.size() - 1);
  }

  bool divided() const { return count > 1 || partial_; }
  int64_t end(int64_t part) const { return part + 1 == count ? inner : ends_[part]; }
  // How often the sum of that part is added to the branch before it.
  int merges(int64_t part) const { return merges_[part]; }

  const int64_t count, inner;

 private:
  bool partial_;  // remaining branches are not added up
  const int64_t* ends_;
  uint8_t merges_[256];  // kernels/parts.py allows at most this many
};

// Adds up sum(destination, first inner element, end) for all parts of a product, then calls store(branch, sum) for
// the remaining branches. Sums of type T have +=.
template <typename T, typename Sum, typename Store>
[[gnu::noinline]] void add_parts(const Division& division, const Sum& sum, const Store& store) {
  T branches[PartTree::kMost];
  int size = 0;
  for (int64_t p = 0, begin = 0; p < division.count; ++p) {
    const int64_t end = division.end(p);
    sum(branches[size++], begin, end);
    for (int n = division.merges(p); n > 0; --n, --size) branches[size - 2] += branches[size - 1];
    begin = end;
  }
  for (int n = 0; n < size; ++n) store(n, branches[n]);
}

}  // namespace specinfer
