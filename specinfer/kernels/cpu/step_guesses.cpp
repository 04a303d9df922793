#include "step_guesses.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

namespace specinfer {
namespace {

// As in speculate/plain_weighing.py, tokens_per_second.py and guesses.py: the same sums in the same order.
constexpr int64_t kMoreRows = 4;

enum Header { kNodes, kDraws, kEvidence, kFirm, kMost, kAllStay, kHeader };

// One tree out of what is told.
struct Record {
  const int32_t* header;
  double temperature;
  const int32_t *tokens, *parents, *firm;
  Draws draws;

  explicit Record(Told* told) : header(told->integers) {
    const int64_t nodes = header[kNodes], count = header[kDraws];
    temperature = told->numbers[0];
    tokens = header + kHeader;
    parents = tokens + nodes;
    const int32_t* const columns = parents + nodes;
    const double* const confidences = told->numbers + 1;
    draws = {count,           confidences,         confidences + count, columns,
             columns + count, columns + 2 * count, columns + 3 * count};
    firm = columns + 4 * count;
    told->numbers = draws.evidence + header[kEvidence];
    told->integers = firm + header[kFirm];
  }
};

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

// Whether all of these were told of.
bool all_known(const int32_t* speculators, int64_t count, const Knowledge& knowledge) {
  return std::all_of(speculators, speculators + count,
                     [&](int32_t number) { return 0 <= number && number < knowledge.speculators; });
}

}  // namespace

double StepCosts::price(double made, int64_t nodes) const {
  const double now = seconds(nodes);
  return made * (seconds(nodes + kMoreRows) - now) / (kMoreRows * now);
}

bool Guesses::show(Told* told, const Knowledge& knowledge) {
  const Record record(told);
  const int64_t nodes = record.header[kNodes];
  if (nodes < 1 || !record.draws.within(nodes)) return false;
  if (!all_known(record.draws.speculators, record.draws.count, knowledge)) return false;
  temperature_ = record.temperature;
  most_ = record.header[kMost];
  all_stay_ = record.header[kAllStay] != 0;
  samples_ = false;
  tokens_.assign(record.tokens, record.tokens + nodes);
  parents_.assign(record.parents, record.parents + nodes);
  for (int64_t node = 1; node < nodes; ++node) {
    if (parents_[node] < 0 || parents_[node] >= node) return false;
  }
  shown_ = nodes;
  firm_.assign(nodes, 0);
  for (int64_t i = 0; i < record.header[kFirm]; ++i) {
    if (record.firm[i] < 1 || record.firm[i] >= nodes) return false;
    firm_[record.firm[i]] = 1;
  }
  own_.assign(1, 0);
  const Draws& draws = record.draws;
  draws_.confidences.assign(draws.confidences, draws.confidences + draws.count);
  draws_.evidence.assign(draws.evidence, draws.evidence + record.header[kEvidence]);
  draws_.parents.assign(draws.parents, draws.parents + draws.count);
  draws_.nodes.assign(draws.nodes, draws.nodes + draws.count);
  draws_.speculators.assign(draws.speculators, draws.speculators + draws.count);
  draws_.pieces.assign(draws.pieces, draws.pieces + draws.count);
  rates_.resize(nodes);
  estimate(draws, temperature_, knowledge.logistics != 0, knowledge.known, nodes, rates_.data());
  doubt(draws_, knowledge, knowledge.beside, &rates_);
  rates_[0] = 1.0;
  hopes_ = along_paths(rates_);
  return true;
}

bool Guesses::grow(Told* told, const Knowledge& knowledge) {
  const Record record(told);
  const int64_t nodes = record.header[kNodes];
  for (int64_t i = 0; i < nodes; ++i) {
    if (!has_end(record.parents[i])) return false;
    const int32_t above = own_[record.parents[i]], token = record.tokens[i];
    int32_t node = above < shown_ ? child(above, token) : -1;
    if (node < 0) {
      node = static_cast<int32_t>(parents_.size());
      tokens_.push_back(token);
      parents_.push_back(above);
      firm_.push_back(0);
      rates_.push_back(0.0);
    }
    own_.push_back(node);
  }
  for (int64_t i = 0; i < record.header[kFirm]; ++i) {
    if (record.firm[i] < 1 || !has_end(record.firm[i])) return false;
    firm_[own_[record.firm[i]]] = 1;
    samples_ = true;
  }
  const Draws& draws = record.draws;
  if (!draws.within(static_cast<int64_t>(own_.size())) || !all_known(draws.speculators, draws.count, knowledge)) {
    return false;
  }
  // What others have guessed below the same nodes is less likely, or more, for what the draft has.
  Columns all;
  std::vector<char> shared(shown_, 0);
  for (int64_t i = 0; i < draws.count; ++i) {
    const int32_t parent = own_[draws.parents[i]];
    if (parent < shown_) shared[parent] = 1;
  }
  const Draws before = draws_.view();
  const double* evidence = before.evidence;
  for (int64_t i = 0; i < before.count; evidence += before.pieces[i++]) {
    if (shared[before.parents[i]]) all.add(before, i, evidence, before.parents[i], before.nodes[i]);
  }
  evidence = draws.evidence;
  for (int64_t i = 0; i < draws.count; evidence += draws.pieces[i++]) {
    all.add(draws, i, evidence, own_[draws.parents[i]], own_[draws.nodes[i]]);
  }
  std::vector<double> rates(parents_.size());
  estimate(all.view(), temperature_, knowledge.logistics != 0, knowledge.known, num_nodes(), rates.data());
  doubt(all, knowledge, knowledge.beside, &rates);
  for (const int32_t node : all.nodes) rates_[node] = rates[node];
  rates_[0] = 1.0;
  hopes_ = along_paths(rates_);
  return true;
}

void Guesses::doubt(const Columns& draws, const Knowledge& knowledge, double part, std::vector<double>* rates) const {
  if (part == 1.0) return;
  std::vector<char> drafted(rates->size(), 0);
  for (int64_t i = 0; i < draws.count(); ++i) {
    if (knowledge.priced[draws.speculators[i]] != 0) drafted[draws.nodes[i]] = 1;
  }
  for (size_t node = 0; node < rates->size(); ++node) {
    double& p = (*rates)[node];
    if (drafted[node] == 0) p = part * p / (1 - p + part * p);
  }
}

std::vector<double> Guesses::doubted(const Knowledge& knowledge, double part) const {
  std::vector<double> rates = rates_;
  doubt(draws_, knowledge, part, &rates);
  rates[0] = 1.0;
  return rates;
}

std::vector<double> Guesses::along_paths(const std::vector<double>& rates) const {
  std::vector<double> hopes(rates.size());
  hopes[0] = 1.0;
  for (size_t node = 1; node < rates.size(); ++node) hopes[node] = rates[node] * hopes[parents_[node]];
  return hopes;
}

Parts Guesses::parts(const std::vector<double>& hopes) const {
  Parts parts;
  for (int64_t node = 1; node < num_nodes(); ++node) {
    if (firm_[node]) {
      parts.tokens += hopes[node];
      ++parts.nodes;
    } else {
      parts.droppable.push_back(static_cast<int32_t>(node));
    }
  }
  std::vector<int32_t>& droppable = parts.droppable;
  std::stable_sort(droppable.begin(), droppable.end(), [&](int32_t a, int32_t b) { return hopes[a] > hopes[b]; });
  const int64_t room = std::max<int64_t>(0, most_ - 1 - parts.nodes);
  if (static_cast<int64_t>(droppable.size()) > room) droppable.resize(room);
  if (all_stay_) {
    double more = 0.0;
    for (const int32_t node : droppable) more += hopes[node];
    parts.tokens += more;
    parts.nodes += static_cast<int64_t>(droppable.size());
  }
  return parts;
}

double Guesses::left(const std::vector<double>& rates, int64_t node) const {
  if (node >= shown_) return 1.0;
  std::vector<char> held(shown_, 0);
  bool any = false;
  for (int64_t i = 0; i < draws_.count(); ++i) {
    if (draws_.parents[i] != node) continue;
    held[draws_.nodes[i]] = 1;
    any = true;
  }
  if (!any) return 1.0;
  double sum = 0.0;
  for (int64_t child = 0; child < shown_; ++child) {
    if (held[child]) sum += rates[child];
  }
  return std::max(0.0, 1.0 - sum);
}

double Guesses::gain(int64_t end, double first, double other, double price) const {
  const double arrives = hopes_[own_[end]] * left(rates_, own_[end]);
  return arrives * first + std::max(0.0, arrives * other - (samples_ ? 0.0 : price));
}

int32_t Guesses::child(int32_t parent, int32_t token) const {
  for (size_t node = 1; node < parents_.size(); ++node) {
    if (parents_[node] == parent && tokens_[node] == token) return static_cast<int32_t>(node);
  }
  return -1;
}

int64_t Guesses::learn(const int32_t* tokens, int64_t count, const Knowledge& knowledge, int32_t number,
                       std::vector<int32_t>* choices) const {
  Columns path;
  std::vector<int32_t> groups, accepted;
  const Draws draws = draws_.view();
  int32_t node = 0;
  for (int64_t level = 0; level < count && node >= 0; ++level) {
    const int32_t next = child(node, tokens[level]);
    const int64_t first = path.count();
    const double* evidence = draws.evidence;
    for (int64_t i = 0; i < draws.count; evidence += draws.pieces[i++]) {
      if (draws.parents[i] == node) path.add(draws, i, evidence, node, draws.nodes[i]);
    }
    groups.push_back(static_cast<int32_t>(path.count() - first));
    accepted.push_back(next);
    for (int64_t i = first; i < path.count(); ++i) {
      const int32_t speculator = path.speculators[i];
      if (speculator >= knowledge.speculators || knowledge.priced[speculator] == 0) continue;
      int32_t own = 0, choice = -1;  // the first of its guesses tells of all
      bool told = false;
      for (int64_t j = first; j < path.count(); ++j) {
        if (path.speculators[j] != speculator) continue;
        told = told || j < i;
        if (path.nodes[j] == next && choice < 0) choice = own;
        ++own;
      }
      if (!told) choices->insert(choices->end(), {number, static_cast<int32_t>(level), speculator, choice});
    }
    node = next;
  }
  if (!all_known(path.speculators.data(), path.count(), knowledge)) return -1;
  specinfer::learn(path.view(), temperature_, knowledge.logistics != 0, groups, accepted, knowledge.known);
  return path.count();
}

void StepGuesses::begin() { num_shown_ = num_chosen_ = 0; }

bool StepGuesses::show(Told told, const Knowledge& knowledge) {
  num_shown_ = 0;
  if (static_cast<int64_t>(shown_.size()) < told.count) shown_.resize(told.count);
  for (int64_t i = 0; i < told.count; ++i) {
    if (!shown_[i].show(&told, knowledge)) return false;
  }
  num_shown_ = told.count;
  return true;
}

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

bool StepGuesses::expect(int64_t count, const StepCosts& costs, const Knowledge& knowledge, double part,
                         double* out) const {
  if (count != num_shown_) return false;
  std::vector<std::vector<double>> rates, hopes;
  for (int64_t i = 0; i < count; ++i) {
    rates.push_back(shown_[i].doubted(knowledge, part));
    hopes.push_back(shown_[i].along_paths(rates.back()));
  }
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
    const int64_t number = told.integers[kMost];
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

int64_t StepGuesses::learn(const int32_t* told, int64_t count, const Knowledge& knowledge, int32_t* out,
                           int64_t* learnt) const {
  std::vector<int32_t> choices;
  *learnt = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t number = *told++, tokens = *told++;
    if (number < 0 || number >= num_chosen_) return -1;
    const int64_t guesses = chosen_[number].learn(told, tokens, knowledge, number, &choices);
    if (guesses < 0) return -1;
    *learnt += guesses;
    told += tokens;
  }
  std::copy(choices.begin(), choices.end(), out);
  return static_cast<int64_t>(choices.size()) / 4;
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
