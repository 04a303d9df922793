#include "step_guesses.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

namespace specinfer {
namespace {

// As in speculate/policy/plain_weighing.py and tokens_per_second.py: the same sums in the same order.
constexpr int64_t kMoreRows = 4;

// How many of some candidates, likeliest first, make a step's tokens per second highest.
template <typename Seconds>
int64_t how_many(const std::vector<double>& bring, double tokens, Seconds seconds) {
  double sum = 0.0, best = (tokens + sum) / seconds(0);
  int64_t count = 0;
  for (size_t i = 0; i < bring.size(); ++i) {
    sum += bring[i];
    const double speed = (tokens + sum) / seconds(static_cast<int64_t>(i) + 1);
    if (speed > best) {
      best = speed;
      count = static_cast<int64_t>(i) + 1;
    }
  }
  return count;
}

}  // namespace

double StepCosts::price(double made, int64_t nodes) const {
  const double now = seconds(nodes);
  return made * (seconds(nodes + kMoreRows) - now) / (kMoreRows * now);
}

void StepGuesses::begin() { num_shown_ = num_chosen_ = 0; }

Expected StepGuesses::so_far(const std::vector<std::vector<double>>& hopes, const StepCosts& costs) const {
  double tokens = costs.tokens;
  int64_t nodes = 0;
  std::vector<double> bring;
  for (int64_t i = 0; i < num_shown_; ++i) {
    const Parts parts = shown_[i].parts(hopes[i]);
    tokens += parts.tokens;
    nodes += parts.nodes;
    for (const int32_t node : parts.droppable) {
      if (!shown_[i].stays(node)) bring.push_back(hopes[i][node]);
    }
  }
  std::sort(bring.begin(), bring.end(), std::greater<double>());
  const int64_t kept = how_many(bring, tokens, [&](int64_t more) { return costs.seconds(nodes + more); });
  tokens += std::accumulate(bring.begin(), bring.begin() + kept, 0.0);
  nodes += kept;
  return {tokens, costs.price(tokens, nodes), nodes};
}

bool StepGuesses::expect(Told told, const Knowledge& knowledge, const StepCosts& costs, double part, double* out) {
  const int64_t count = told.count;
  num_shown_ = 0;
  if (static_cast<int64_t>(shown_.size()) < count) shown_.resize(count);
  std::vector<std::vector<double>> rates, hopes;
  for (int64_t i = 0; i < count; ++i) {
    if (!shown_[i].show(&told, knowledge)) return false;
    rates.push_back(shown_[i].doubted(knowledge, part));
    hopes.push_back(shown_[i].along_paths(rates.back()));
  }
  num_shown_ = count;
  const Expected step = so_far(hopes, costs);
  *out++ = step.tokens;
  *out++ = static_cast<double>(step.nodes);
  *out++ = step.price;
  for (int64_t i = 0; i < count; ++i) {
    *out++ = shown_[i].left(rates[i], 0);
    double made = 0.0;
    for (size_t node = 1; node < hopes[i].size(); ++node) {
      if (step.price < hopes[i][node]) made += hopes[i][node];
    }
    *out++ = 1 + made;
  }
  return true;
}

bool StepGuesses::deepen(Told told, const Knowledge& knowledge, const StepCosts& costs, const double* passes,
                         double each, int32_t* chosen) {
  struct End {
    int64_t number, node;
    double first, other;
  };
  const int64_t shown = num_shown_;
  num_shown_ = 0;  // as long as not all of it has grown
  std::vector<End> ends;
  for (int64_t i = 0; i < told.count; ++i) {
    const int64_t number = told.number();
    if (number < 0 || number >= shown || !shown_[number].grow(&told, knowledge)) return false;
    const int64_t count = *told.integers++;
    for (int64_t e = 0; e < count; ++e) {
      const int64_t node = *told.integers++;
      if (!shown_[number].has_end(node)) return false;
      ends.push_back({number, node, told.numbers[e], told.numbers[count + e]});
    }
    told.numbers += 2 * count;
  }
  num_shown_ = shown;
  std::vector<std::vector<double>> hopes;
  for (int64_t i = 0; i < shown; ++i) hopes.push_back(shown_[i].hopes());
  const Expected step = so_far(hopes, costs);
  std::vector<double> gains;
  for (const End& end : ends) gains.push_back(shown_[end.number].gain(end.node, end.first, end.other, step.price));
  std::vector<int64_t> order(ends.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return gains[a] > gains[b]; });
  std::vector<double> sorted;
  for (const int64_t at : order) sorted.push_back(gains[at]);
  const int64_t count = how_many(sorted, step.tokens, [&](int64_t more) {
    const auto rows = static_cast<int64_t>(std::nearbyint(static_cast<double>(more) * each));
    return costs.seconds(step.nodes + rows) + passes[more];
  });
  std::fill(chosen, chosen + ends.size(), 0);
  for (int64_t i = 0; i < count; ++i) chosen[order[i]] = 1;
  return true;
}

bool StepGuesses::choose(Told told, const Knowledge& knowledge, const StepCosts& costs, int32_t* kept) {
  num_chosen_ = 0;
  if (static_cast<int64_t>(chosen_.size()) < told.count) chosen_.resize(told.count);
  double tokens = costs.tokens;
  int64_t nodes = 0;
  std::vector<double> hopes;  // of all nodes that may be dropped
  std::vector<std::vector<int32_t>> droppable;
  for (int64_t i = 0; i < told.count; ++i) {
    Guesses& one = chosen_[i];
    if (!one.show(&told, knowledge)) return false;
    Parts parts = one.parts(one.hopes());
    tokens += parts.tokens;
    nodes += parts.nodes;
    for (const int32_t node : parts.droppable) {
      if (!one.stays(node)) hopes.push_back(one.hopes()[node]);
    }
    droppable.push_back(std::move(parts.droppable));
  }
  num_chosen_ = told.count;
  std::sort(hopes.begin(), hopes.end(), std::greater<double>());
  const int64_t count = how_many(hopes, tokens, [&](int64_t more) { return costs.seconds(nodes + more); });
  const double least = count > 0 ? hopes[count - 1] : HUGE_VAL;
  // Of those as likely as the least likely one that is kept the first ones are.
  int64_t ties = count - std::count_if(hopes.begin(), hopes.end(), [&](double hope) { return hope > least; });
  for (int64_t i = 0; i < told.count; ++i) {
    const Guesses& one = chosen_[i];
    std::vector<int32_t> stay{0};
    for (const int32_t node : droppable[i]) {
      const double hope = one.hopes()[node];
      const bool tied = hope == least && !one.stays(node);
      if (one.stays(node) || hope > least || (tied && ties > 0)) stay.push_back(node);
      ties -= tied && ties > 0;
    }
    for (int64_t node = 1; node < one.num_nodes(); ++node) {
      if (one.firm(node)) stay.push_back(static_cast<int32_t>(node));
    }
    std::sort(stay.begin(), stay.end());
    *kept++ = static_cast<int32_t>(stay.size());
    kept = std::copy(stay.begin(), stay.end(), kept);
  }
  return true;
}

int64_t StepGuesses::learn(const int32_t* told, int64_t count, const Knowledge& knowledge,
                           double* const* tables) const {
  const int64_t priced = std::count_if(knowledge.levels, knowledge.levels + knowledge.speculators,
                                       [](int32_t levels) { return levels > 0; });
  int64_t learnt = 0;
  for (int64_t i = 0; i < count; ++i, tables += kTables * priced) {
    const int32_t number = *told++, tokens = *told++;
    if (number < 0 || number >= num_chosen_) return -1;
    const int64_t guesses = chosen_[number].learn(told, tokens, knowledge, tables);
    if (guesses < 0) return -1;
    learnt += guesses;
    told += tokens;
  }
  return learnt;
}

bool hopes_of(Told told, const Knowledge& knowledge, double* out) {
  Guesses one;
  for (int64_t i = 0; i < told.count; ++i) {
    if (!one.show(&told, knowledge)) return false;
    out = std::copy(one.hopes().begin(), one.hopes().end(), out);
  }
  return true;
}

}  // namespace specinfer
