#include "lookups.h"

#include <algorithm>
#include <cmath>

namespace specinfer {
namespace {

constexpr int64_t kVoters = 16;        // maximum places of an index that vote: a bit each in a word, for two indices
constexpr int64_t kLongest = 1 << 20;  // maximum length of a match: all weights are exact in a double
constexpr int64_t kSurest = 1000;      // maximum of LookupRules::surest: 2^-1000 is a normal double

// The nodes of one request.
class Branches {
 public:
  Branches(const LookupRules& rules, const LookedUp& to, int64_t first, int64_t most)
      : rules_(rules), to_(to), first_(first), most_(std::min(most, to.room - first)) {}

  bool full() const { return count_ >= most_; }
  int64_t count() const { return count_; }

  // Adds a node for which some places vote with a share of all votes; returns its number.
  int32_t add(int32_t parent, int32_t token, int64_t matched, int voters, double share) {
    const int64_t at = first_ + count_++;
    double* const seen = to_.evidence + 3 * at;
    seen[0] = static_cast<double>(matched);
    seen[1] = voters;
    seen[2] = share;
    to_.confidences[at] = share * (1 - std::ldexp(1.0, -static_cast<int>(std::min(matched, rules_.surest))));
    to_.parents[at] = parent;
    to_.tokens[at] = token;
    return static_cast<int32_t>(count_);
  }

 private:
  const LookupRules& rules_;
  const LookedUp& to_;
  int64_t first_, most_, count_ = 0;
};

// The continuation at one place, as far as its match supports a guess.
struct Vote {
  const int32_t* text;
  int64_t period;  // tokens; at the end of the text, its predicted continuation repeats
  int64_t reach, matched, weight;

  int32_t token(int64_t i) const { return text[i % period]; }
};

// A candidate node; bit i of its voters is vote i.
struct Waiting {
  int64_t weight, made, depth, matched;
  int32_t parent, token;
  double share;
  uint64_t voters;

  // True if the other one comes first: likeliest first, then oldest.
  bool operator<(const Waiting& other) const {
    return weight != other.weight ? weight < other.weight : made > other.made;
  }
};

// The votes in a set, in order.
template <typename Do>
void each(uint64_t voters, Do what) {
  for (; voters != 0; voters &= voters - 1) what(__builtin_ctzll(voters));
}

// A place after which the text goes on, and the number of tokens before it that match the end of the tail.
struct Occurrence {
  int64_t place, matched;
};

// At most `limit` occurrences: longer n-grams first, then newer places.
std::vector<Occurrence> occurrences(const TextIndex& index, const int32_t* tail, int64_t size, int64_t limit) {
  std::vector<Occurrence> found;
  const std::vector<int64_t>& lengths = index.lengths();
  limit = std::clamp<int64_t>(limit, 0, index.num_tokens());
  for (auto which = static_cast<int64_t>(lengths.size()) - 1; which >= 0; --which) {
    if (lengths[which] > size) continue;
    Places places(index, which, tail + size - lengths[which]);
    for (int64_t seen = 0; seen < 2 * limit; ++seen) {  // shorter n-grams find the places of longer ones again
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

void add_votes(const LookupRules& rules, const LookupRequest& request, const TextIndex& index,
               const std::vector<int32_t>& tail, std::vector<Vote>* votes) {
  for (const auto& [place, matched] : occurrences(index, tail.data(), tail.size(), kVoters)) {
    const double deep = rules.depth_factor * static_cast<double>(matched);
    const int64_t wanted =
        deep >= 1 ? (deep < static_cast<double>(request.depth) ? static_cast<int64_t>(deep) : request.depth) : 1;
    const int64_t held = index.following(place, wanted);
    votes->push_back({index.at(place), held, &index == request.own ? wanted : held, matched, matched * matched});
  }
}

// Adds the nodes with the largest votes, best first; ties go to the earlier voter.
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
      const int32_t token = votes[__builtin_ctzll(left)].token(depth);
      uint64_t voters = 0;
      int64_t matched = 0;
      each(left, [&](int i) {
        if (votes[i].token(depth) != token) return;
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

void add_nodes(const LookupRules& rules, const LookupRequest& request, Branches* tree) {
  const TextIndex& own = *request.own;
  const int64_t known = std::min(rules.longest, own.end() - own.text_start());
  const std::vector<int32_t> tail(own.at(own.end() - known), own.at(own.end()));
  std::vector<Vote> votes;
  votes.reserve(2 * kVoters);
  add_votes(rules, request, own, tail, &votes);
  if (request.kept != nullptr) add_votes(rules, request, *request.kept, tail, &votes);
  grow(rules, votes, tree);
}

bool sound(const LookupRules& rules, const LookupRequest* requests, int64_t count, const int32_t* tokens,
           int64_t num_tokens, const LookedUp& to) {
  if (rules.longest < 1 || rules.longest > kLongest || rules.surest < 0 || rules.surest > kSurest) return false;
  if (to.room < 0 || std::any_of(tokens, tokens + num_tokens, [](int32_t token) { return token < 0; })) return false;
  for (int64_t i = 0; i < count; ++i) {
    const LookupRequest& request = requests[i];
    if (request.own == nullptr || request.read < 0 || request.read > num_tokens) return false;
    num_tokens -= request.read;
  }
  return num_tokens == 0;
}

}  // namespace

bool lookup_trees(const LookupRules& rules, const LookupRequest* requests, int64_t count, const int32_t* tokens,
                  int64_t num_tokens, const LookedUp& to) {
  if (!sound(rules, requests, count, tokens, num_tokens, to)) return false;
  int64_t first = 0;
  for (int64_t i = 0; i < count; ++i) {
    const LookupRequest& request = requests[i];
    if (!request.own->extend(tokens, request.read)) return false;
    tokens += request.read;
    Branches tree(rules, to, first, std::max<int64_t>(request.nodes, 1) - 1);
    if (request.depth > 0 && !tree.full()) add_nodes(rules, request, &tree);
    to.counts[i] = static_cast<int32_t>(tree.count());
    first += tree.count();
  }
  return true;
}

}  // namespace specinfer
