#include "lookups.h"

#include <algorithm>
#include <cmath>

namespace specinfer {
namespace {

// As in speculate/lookups/plain_lookups.py: the same places in the same order, the same sums.
constexpr int64_t kMostVoters = 32;  // of an index: those of two have a bit each
constexpr int64_t kLongest = 1 << 20;  // of a match: all weights are whole numbers, also in a double
constexpr int64_t kSurest = 1000;      // of a match: a power of two that is a double

// Where one request's nodes go.
class Branches {
 public:
  Branches(const LookupRules& rules, const LookedUp& to, int64_t first, int64_t most)
      : rules_(rules), to_(to), first_(first), most_(std::min(most, to.room - first)) {}

  bool full() const { return count_ >= most_; }
  int64_t count() const { return count_; }

  // Adds a node of n-grams; returns its number.
  int32_t add(int32_t parent, int32_t token, int64_t matched) {
    to_.evidence[first_ + count_] = static_cast<double>(matched);
    return add(parent, token, sure(matched));
  }

  // Adds a node of suffixes, for which some places vote with a share of all votes.
  int32_t add(int32_t parent, int32_t token, int64_t matched, int voters, double share) {
    double* const seen = to_.evidence + 3 * (first_ + count_);
    seen[0] = static_cast<double>(matched);
    seen[1] = voters;
    seen[2] = share;
    return add(parent, token, share * sure(matched));
  }

 private:
  double sure(int64_t matched) const {
    return 1 - std::ldexp(1.0, -static_cast<int>(std::min(matched, rules_.surest)));
  }

  int32_t add(int32_t parent, int32_t token, double confidence) {
    const int64_t at = first_ + count_++;
    to_.confidences[at] = confidence;
    to_.parents[at] = parent;
    to_.tokens[at] = token;
    return static_cast<int32_t>(count_);
  }

  const LookupRules& rules_;
  const LookedUp& to_;
  int64_t first_, most_, count_ = 0;
};

// What follows at a place: tokens there, then those behind the text, and then itself again and again.
struct Guess {
  const int32_t* text;
  int64_t held;  // tokens of the text
  const int32_t* behind;
  int64_t period;  // tokens, those behind the text included

  int32_t token(int64_t i) const {
    i = i < period ? i : i % period;
    return i < held ? text[i] : behind[i - held];
  }
};

// What followed at one place, as far as its match supports a guess.
struct Vote {
  Guess guess;
  int64_t reach, matched, weight;
};

// A node that may be added, and who votes for it: bit i is vote i.
struct Waiting {
  int64_t weight, made, depth, matched;
  int32_t parent, token;
  double share;
  uint64_t voters;

  // Whether the other one comes first: likeliest first, then oldest.
  bool operator<(const Waiting& other) const {
    return weight != other.weight ? weight < other.weight : made > other.made;
  }
};

// The votes out of a set, first ones first.
template <typename Do>
void each(uint64_t voters, Do what) {
  for (; voters != 0; voters &= voters - 1) what(__builtin_ctzll(voters));
}

// The last tokens of a text that goes on with some more, at most `most`.
std::vector<int32_t> tail_of(const TextIndex& text, const int32_t* behind, int64_t count, int64_t most) {
  const int64_t added = std::min(count, most);
  const int64_t own = std::min(most - added, text.end() - text.text_start());
  std::vector<int32_t> tail(text.at(text.end() - own), text.at(text.end()));
  tail.insert(tail.end(), behind + count - added, behind + count);
  return tail;
}

void add_votes(const LookupRules& rules, const LookupAsk& ask, const TextIndex& index, const int32_t* behind,
               const std::vector<int32_t>& tail, std::vector<Vote>* votes) {
  for (const auto& [place, matched] : occurrences(index, tail.data(), tail.size(), std::min(ask.most, kMostVoters))) {
    const double deep = rules.depth_factor * static_cast<double>(matched);
    int64_t reach = deep >= 1 ? (deep < static_cast<double>(ask.depth) ? static_cast<int64_t>(deep) : ask.depth) : 1;
    Guess guess{index.at(place), index.following(place, reach), behind, 0};
    guess.period = guess.held;
    if (&index == ask.own) {
      guess.period += std::min(reach - guess.held, ask.behind);
    } else {
      reach = guess.held;
    }
    votes->push_back({guess, reach, matched, matched * matched});
  }
}

// Adds the nodes most votes go through, best first; the earlier voter is better when votes are equal.
void grow(const LookupRules& rules, const std::vector<Vote>& votes, Branches* tree) {
  if (votes.empty()) return;
  const auto weigh = [&](uint64_t voters) {
    int64_t sum = 0;
    each(voters, [&](int i) { sum += votes[i].weight; });
    return sum;
  };
  uint64_t through = ~uint64_t{0} >> (64 - votes.size());
  const double least = rules.min_probability * static_cast<double>(weigh(through));
  std::vector<Waiting> waiting;
  int64_t made = 0, depth = 0;
  int32_t node = 0;
  while (!tree->full()) {
    const auto total = static_cast<double>(weigh(through));
    uint64_t left = 0;
    each(through, [&](int i) { left |= uint64_t{depth < votes[i].reach} << i; });
    while (left != 0) {
      const int32_t token = votes[__builtin_ctzll(left)].guess.token(depth);
      uint64_t voters = 0;
      int64_t matched = 0;
      each(left, [&](int i) {
        if (votes[i].guess.token(depth) != token) return;
        voters |= uint64_t{1} << i;
        matched = std::max(matched, votes[i].matched);
      });
      left &= ~voters;
      const int64_t weight = weigh(voters);
      if (static_cast<double>(weight) < least) continue;
      const double share = static_cast<double>(weight) / total;
      waiting.push_back({weight, ++made, depth + 1, matched + depth, node, token, share, voters});
      std::push_heap(waiting.begin(), waiting.end());
    }
    if (waiting.empty()) return;
    std::pop_heap(waiting.begin(), waiting.end());
    const Waiting next = waiting.back();
    waiting.pop_back();
    depth = next.depth;
    through = next.voters;
    node = tree->add(next.parent, next.token, next.matched, __builtin_popcountll(through), next.share);
  }
}

void add_suffixes(const LookupRules& rules, const LookupAsk& ask, const int32_t* behind, Branches* tree) {
  const std::vector<int32_t> tail = tail_of(*ask.own, behind, ask.behind, rules.longest);
  std::vector<Vote> votes;
  votes.reserve(2 * kMostVoters);
  for (const TextIndex* index : {static_cast<const TextIndex*>(ask.own), ask.kept}) {
    if (index != nullptr) add_votes(rules, ask, *index, behind, tail, &votes);
  }
  grow(rules, votes, tree);
}

// The places of the best earlier occurrences of the last tokens, no next token twice.
std::vector<int64_t> starts_of(const LookupRules& rules, const LookupAsk& ask, const int32_t* behind,
                               const std::vector<int32_t>& tail) {
  const TextIndex& text = *ask.own;
  std::vector<int64_t> starts;
  std::vector<int32_t> nexts;
  const std::vector<int64_t>& lengths = text.lengths();
  for (auto which = static_cast<int64_t>(lengths.size()) - 1; which >= 0; --which) {
    if (lengths[which] > static_cast<int64_t>(tail.size())) continue;
    Places places(text, which, tail.data() + tail.size() - lengths[which]);
    for (int64_t seen = 0; seen < rules.places; ++seen) {
      const int64_t place = places.next();
      if (place < 0) break;
      const int32_t next = place < text.end() ? *text.at(place) : *behind;
      if (std::find(nexts.begin(), nexts.end(), next) == nexts.end()) {
        nexts.push_back(next);
        starts.push_back(place);
      }
      if (static_cast<int64_t>(starts.size()) == ask.most) return starts;
    }
  }
  return starts;
}

void add_ngrams(const LookupRules& rules, const LookupAsk& ask, const int32_t* behind, Branches* tree) {
  const TextIndex& text = *ask.own;
  const int64_t longest = std::max(rules.longest, text.lengths().back());
  const std::vector<int32_t> tail = tail_of(text, behind, ask.behind, longest);
  const int32_t* const stop = tail.data() + tail.size();
  const int32_t* const first = stop - std::min<int64_t>(tail.size(), rules.longest);
  for (const int64_t start : starts_of(rules, ask, behind, tail)) {
    const int64_t matched = text.matched(start, first, stop), held = std::min(ask.depth, text.end() - start);
    const Guess guess{text.at(start), held, behind, held + std::min(ask.depth - held, ask.behind)};
    int32_t node = 0;
    for (int64_t i = 0; i < ask.depth && !tree->full(); ++i) node = tree->add(node, guess.token(i), matched + i);
  }
}

bool sound(const LookupRules& rules, const LookupAsk* asks, int64_t count, const int32_t* tokens, int64_t num_tokens,
           const LookedUp& to) {
  if (rules.longest < 1 || rules.longest > kLongest || rules.surest < 0 || rules.surest > kSurest) return false;
  if (to.room < 0 || std::any_of(tokens, tokens + num_tokens, [](int32_t token) { return token < 0; })) return false;
  for (int64_t i = 0; i < count; ++i) {
    const LookupAsk& ask = asks[i];
    if (ask.own == nullptr || ask.read < 0 || ask.behind < 0) return false;
    if (ask.read > num_tokens || ask.behind > num_tokens - ask.read) return false;
    num_tokens -= ask.read + ask.behind;
  }
  return num_tokens == 0;
}

template <typename Add>
bool trees_of(const LookupRules& rules, const LookupAsk* asks, int64_t count, const int32_t* tokens,
              int64_t num_tokens, const LookedUp& to, Add add) {
  if (!sound(rules, asks, count, tokens, num_tokens, to)) return false;
  int64_t first = 0;
  for (int64_t i = 0; i < count; ++i) {
    const LookupAsk& ask = asks[i];
    if (!ask.own->extend(tokens, ask.read)) return false;
    tokens += ask.read;
    Branches tree(rules, to, first, std::max<int64_t>(ask.nodes, 1) - 1);
    if (ask.depth > 0 && !tree.full()) add(ask, tokens, &tree);
    tokens += ask.behind;
    to.counts[i] = static_cast<int32_t>(tree.count());
    first += tree.count();
  }
  return true;
}

}  // namespace

bool suffix_trees(const LookupRules& rules, const LookupAsk* asks, int64_t count, const int32_t* tokens,
                  int64_t num_tokens, const LookedUp& to) {
  return trees_of(rules, asks, count, tokens, num_tokens, to,
                  [&](const LookupAsk& ask, const int32_t* behind, Branches* tree) {
                    add_suffixes(rules, ask, behind, tree);
                  });
}

bool ngram_trees(const LookupRules& rules, const LookupAsk* asks, int64_t count, const int32_t* tokens,
                 int64_t num_tokens, const LookedUp& to) {
  return trees_of(rules, asks, count, tokens, num_tokens, to,
                  [&](const LookupAsk& ask, const int32_t* behind, Branches* tree) {
                    if (ask.behind > 0) add_ngrams(rules, ask, behind, tree);
                  });
}

std::vector<Occurrence> occurrences(const TextIndex& index, const int32_t* tail, int64_t size, int64_t limit) {
  std::vector<Occurrence> found;
  const std::vector<int64_t>& lengths = index.lengths();
  limit = std::clamp<int64_t>(limit, 0, index.num_tokens());
  for (auto which = static_cast<int64_t>(lengths.size()) - 1; which >= 0; --which) {
    if (lengths[which] > size) continue;
    Places places(index, which, tail + size - lengths[which]);
    for (int64_t seen = 0; seen < 2 * limit; ++seen) {  // those of longer n-grams are met again
      const int64_t place = places.next();
      if (place < 0) break;
      if (index.following(place, 1) == 0) continue;
      if (std::any_of(found.begin(), found.end(), [&](const Occurrence& one) { return one.place == place; })) continue;
      found.push_back({place, index.matched(place, tail, tail + size)});
      if (static_cast<int64_t>(found.size()) == limit) return found;
    }
  }
  return found;
}

}  // namespace specinfer
