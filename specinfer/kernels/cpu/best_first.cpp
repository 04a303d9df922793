#include "best_first.h"

#include <algorithm>
#include <cmath>
#include <queue>
#include <tuple>
#include <vector>

#include "logit_row.h"
#include "scratch.h"

namespace specinfer {
namespace {

// The same as in speculate/drafts/one_pass.py.
constexpr int64_t kCandidates = 16, kRacers = 32;  // per level: the likeliest, and the candidates of a race
constexpr int64_t kWidth = 8;                      // maximum children of a node

// A path in the queue, stored as the parent of its last node and the rank of that node.
struct QueuedPath {
  double likelihood;
  int64_t order, parent, level, before, rank;
  double above;  // acceptance probability of the path without that node

  // True if the other comes first.
  bool operator<(const QueuedPath& other) const {
    const auto key = [](const QueuedPath& w) {
      return std::tuple(-w.likelihood, w.order, w.parent, w.level, w.before, w.rank);
    };
    return key(other) < key(*this);
  }
};

// The children of a node after one previous token at a level, best first.
struct Children {
  int64_t count = -1;  // not ranked yet
  int64_t places[kWidth];
  double likelihoods[kWidth], evidence[2];
};

template <typename T>
float dot(const float* a, const T* b, int64_t size) {
  Floats sums = 0.0f;
  for (int64_t i = 0; i < size; i += kLanes) sums = fma(load(a + i, size - i), load(b + i, size - i), sums);
  return sum(sums);
}

// One request's tree and levels. A level is added when the first path reaches it: `needs_level`.
template <typename T>
class Tree {
 public:
  Tree(const Guesser& guesser, const TreeRequest& request, int64_t size, const GrownTrees& to, int64_t at)
      : guesser_(guesser),
        request_(request),
        size_(size),
        rank_(guesser.markov.weight == nullptr ? 0 : guesser.markov.inner),
        before_tokens_(static_cast<const T*>(guesser.before)),
        count_(to.counts[at]),
        parents_(to.parents + at * to.room),
        tokens_(to.tokens + at * to.room),
        confidences_(to.confidences + at * to.room),
        evidence_(to.evidence + at * to.room * 2) {
    count_ = 0;
    levels_.reserve(request.levels);
    mean_.resize(rank_);
    add_known(request.anchor, 1.0f, mean_.data());
    request_level(1.0, 0, 0);
  }

  bool needs_level() const { return needs_level_; }
  int64_t row() const { return request_.first + static_cast<int64_t>(levels_.size()); }

  // Store the mean embedding of the possible previous tokens of the next level.
  void store_mean(T* to) const {
    for (int64_t i = 0; i < rank_; i += kLanes) store(to + i, load(mean_.data() + i, rank_ - i), rank_ - i);
  }

  // Add a level from its row of logits and the term of the mean previous token, and continue growing.
  template <typename L>
  void add_level(const L* logits, const T* added) {
    thread_local std::vector<float> sums;
    if (added == nullptr) {
      add_level_of(logits);
    } else {
      if (static_cast<int64_t>(sums.size()) < size_) sums.resize(size_);
      for (int64_t i = 0; i < size_; i += kLanes) {
        store(sums.data() + i, load(logits + i, size_ - i) + load(added + i, size_ - i), size_ - i);
      }
      add_level_of(sums.data());
    }
    needs_level_ = false;
    if (levels_.back().scaled.empty()) {
      last_ = static_cast<int64_t>(levels_.size()) - 1;
    } else {
      queue_child(above_, parent_, last_level(), before_, 0);
    }
    grow();
  }

 private:
  struct Level {
    std::vector<int64_t> tokens;
    std::vector<double> scaled;  // logits over the temperature, relative to the largest
    double rest = 0.0;           // probability mass of all others
    std::vector<float> named;    // embeddings of the candidates as guesses, [C, M]
    std::vector<float> mean;     // mean embedding of the previous tokens used for `scaled`
    std::vector<int64_t> before;
    std::vector<double> noise;  // for a race
    std::vector<Children> children;
  };

  int64_t last_level() const { return static_cast<int64_t>(levels_.size()) - 1; }

  // Prefetch a row of a table.
  void fetch(const void* table, int64_t row) const {
    constexpr int64_t kLine = 64;
    const auto* const from = reinterpret_cast<const char*>(static_cast<const T*>(table) + row * rank_);
    const auto bytes = rank_ * static_cast<int64_t>(sizeof(T));
    for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(from + at);
  }

  void add_known(int64_t token, float weight, float* to) const {
    const T* const row = before_tokens_ + token * rank_;
    for (int64_t i = 0; i < rank_; i += kLanes) {
      store(to + i, load(to + i, rank_ - i) + load(row + i, rank_ - i) * weight, rank_ - i);
    }
  }

  template <typename L>
  void add_level_of(const L* row) {
    const int64_t place = static_cast<int64_t>(levels_.size());
    Level level;
    bool numbers = true;
    auto best = likeliest_of(row, size_, request_.races != 0 ? kRacers : kCandidates, &numbers);
    if (!numbers || (!best.empty() && best[0].value == kInfinity)) best.clear();
    if (!best.empty()) {
      const auto candidates = static_cast<int64_t>(best.size());
      double weights = 0.0;
      std::vector<double> probabilities;
      for (const Candidate& c : best) {
        level.tokens.push_back(guesser_.ids == nullptr ? c.id : guesser_.ids[c.id]);
        fetch(before_tokens_, level.tokens.back());  // all rows, before the first is needed
        fetch(guesser_.named, c.id);
      }
      for (const Candidate& c : best) {
        const double below_top = static_cast<double>(c.value) - static_cast<double>(best[0].value);
        level.scaled.push_back(below_top / request_.temperature);
        probabilities.push_back(std::exp(level.scaled.back()));
        weights += probabilities.back();
      }
      level.rest = std::max(0.0, mass_of(row, size_, best[0].value, request_.temperature) - weights);
      level.before = place == 0 ? std::vector<int64_t>{request_.anchor} : levels_.back().tokens;
      level.children.resize(level.before.size());
      if (request_.races != 0) {
        const auto noise = Noise::at(request_.seed, request_.position + place);
        for (const int64_t token : level.tokens) {
          level.noise.push_back(noise.log_exponential(static_cast<uint32_t>(token)));
        }
      }
      if (rank_ > 0) {
        level.mean = mean_;
        level.named.resize(candidates * rank_);
        std::fill(mean_.begin(), mean_.end(), 0.0f);
        for (int64_t c = 0; c < candidates; ++c) {
          const T* const from = static_cast<const T*>(guesser_.named) + best[c].id * rank_;
          float* const to = level.named.data() + c * rank_;
          for (int64_t i = 0; i < rank_; i += kLanes) store(to + i, load(from + i, rank_ - i), rank_ - i);
          add_known(level.tokens[c], static_cast<float>(probabilities[c] / weights), mean_.data());
        }
      }
    }
    levels_.push_back(std::move(level));
  }

  // Queue the first child of a path, or request its level.
  void request_level(double above, int64_t parent, int64_t before) {
    needs_level_ = true;
    above_ = above;
    parent_ = parent;
    before_ = before;
  }

  void queue_child(double above, int64_t parent, int64_t level, int64_t before, int64_t rank) {
    const Children& children = children_of(level, before);
    if (rank >= children.count) return;
    const double likelihood = above * children.likelihoods[rank];
    if (likelihood >= request_.least) queue_.push({likelihood, count_, parent, level, before, rank, above});
  }

  void grow() {
    while (!queue_.empty() && count_ < request_.most) {
      const QueuedPath next = queue_.top();
      queue_.pop();
      const Level& level = levels_[next.level];
      const Children& children = children_of(next.level, next.before);
      const int64_t place = children.places[next.rank];
      parents_[count_] = next.parent;
      tokens_[count_] = level.tokens[place];
      confidences_[count_] = children.likelihoods[next.rank];
      evidence_[2 * count_] = children.evidence[0];
      evidence_[2 * count_ + 1] = children.evidence[1];
      const int64_t node = ++count_;
      queue_child(next.above, next.parent, next.level, next.before, next.rank + 1);
      if (next.level + 1 >= last_ || next.likelihood < request_.least) continue;
      if (next.level < last_level()) {
        queue_child(next.likelihood, node, next.level + 1, place, 0);
      } else if (count_ < request_.most) {
        request_level(next.likelihood, node, place);
        return;
      }
    }
  }

  const Children& children_of(int64_t number, int64_t before) {
    Level& level = levels_[number];
    Children& children = level.children[before];
    if (children.count >= 0) return children;
    const auto candidates = static_cast<int64_t>(level.scaled.size());
    double logits[kRacers], keys[kRacers], probabilities[kRacers];
    int64_t places[kRacers];
    std::copy(level.scaled.begin(), level.scaled.end(), logits);
    if (rank_ > 0) {
      apart_.assign(rank_, 0.0f);
      add_known(level.before[before], 1.0f, apart_.data());
      for (int64_t i = 0; i < rank_; ++i) apart_[i] -= level.mean[i];
      for (int64_t c = 0; c < candidates; ++c) {
        const float term = dot(apart_.data(), level.named.data() + c * rank_, rank_);
        logits[c] += static_cast<double>(term) / request_.temperature;
      }
    }
    const double top = *std::max_element(logits, logits + candidates);
    double mass = level.rest * std::exp(-top);
    for (int64_t c = 0; c < candidates; ++c) mass += probabilities[c] = std::exp(logits[c] - top);
    for (int64_t c = 0; c < candidates; ++c) {
      probabilities[c] /= mass;
      keys[c] = (request_.races != 0 ? level.noise[c] : 0.0) - logits[c];
      places[c] = c;
    }
    children.count = std::min(candidates, kWidth);
    std::sort(places, places + candidates,
              [&](int64_t a, int64_t b) { return std::tie(keys[a], a) < std::tie(keys[b], b); });
    std::copy(places, places + children.count, children.places);
    std::sort(probabilities, probabilities + candidates, std::greater<double>());
    std::copy(probabilities, probabilities + children.count, children.likelihoods);
    children.evidence[0] = probabilities[0];
    children.evidence[1] = candidates > 1 ? probabilities[1] : 0.0;
    return children;
  }

  const Guesser& guesser_;
  const TreeRequest& request_;
  const int64_t size_, rank_;
  const T* const before_tokens_;
  int64_t& count_;
  int64_t *const parents_, *const tokens_;
  double *const confidences_, *const evidence_;
  std::vector<Level> levels_;
  std::vector<float> mean_, apart_;
  std::priority_queue<QueuedPath> queue_;
  bool needs_level_ = false;
  double above_ = 1.0;  // of the path that requires a level
  int64_t parent_ = 0, before_ = 0;
  int64_t last_ = request_.levels;  // number of levels
};

template <typename T>
void grow_all(const Guesser& guesser, const LogitBlock& logits, const TreeRequest* requests, int64_t count,
              const GrownTrees& to) {
  std::vector<Tree<T>> trees;
  trees.reserve(count);
  for (int64_t i = 0; i < count; ++i) trees.emplace_back(guesser, requests[i], logits.size, to, i);
  const bool markov = guesser.markov.weight != nullptr;
  std::vector<Tree<T>*> growing;
  for (;;) {
    growing.clear();
    for (Tree<T>& tree : trees) {
      if (tree.needs_level()) growing.push_back(&tree);
    }
    if (growing.empty()) return;
    const Scratch::Mark mark;
    const auto rows = static_cast<int64_t>(growing.size());
    T* added = nullptr;
    if (markov) {
      const int64_t rank = guesser.markov.inner;
      T* const means = Scratch::get().take<T>(rows * rank);
      added = Scratch::get().take<T>(rows * logits.size);
      for (int64_t i = 0; i < rows; ++i) growing[i]->store_mean(means + i * rank);
      multiply(guesser.markov, {means, guesser.type, rows}, added);
    }
    Pool::get().run(rows, [&](int64_t i) {
      const T* const own = markov ? added + i * logits.size : nullptr;
      const int64_t at = growing[i]->row() * logits.stride;
      if (logits.type == Type::kBFloat16) {
        growing[i]->add_level(static_cast<const BFloat16*>(logits.data) + at, own);
      } else {
        growing[i]->add_level(static_cast<const float*>(logits.data) + at, own);
      }
    });
  }
}

}  // namespace

bool grow_trees(const Guesser& guesser, const LogitBlock& logits, const TreeRequest* requests, int64_t count,
                const GrownTrees& to) {
  const bool markov = guesser.markov.weight != nullptr;
  for (int64_t i = 0; i < count; ++i) {
    const TreeRequest& request = requests[i];
    const bool outside = request.first < 0 || request.levels < 1 || request.first + request.levels > logits.rows;
    if (outside || request.most > to.room) return false;
    if (markov && (request.anchor < 0 || request.anchor >= guesser.tokens)) return false;
  }
  if (guesser.type == Type::kBFloat16) {
    grow_all<BFloat16>(guesser, logits, requests, count, to);
  } else {
    grow_all<float>(guesser, logits, requests, count, to);
  }
  return true;
}

}  // namespace specinfer
