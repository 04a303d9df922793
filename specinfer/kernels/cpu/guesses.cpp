#include "guesses.h"

#include <algorithm>

namespace specinfer {
namespace {

// As in speculate/policy/plain_weighing.py and guesses.py: the same sums in the same order.

// One tree out of what is told.
struct Record {
  const int32_t* header;
  double temperature;
  const int32_t *tokens, *parents, *above, *nodes, *firm;
  const double *confidences, *evidence;
  const Run* runs;

  explicit Record(Told* told) : header(told->integers), temperature(told->numbers[0]) {
    const int64_t nodes_told = header[kNodes], count = header[kDraws];
    tokens = header + kHeader;
    parents = tokens + nodes_told;
    above = parents + nodes_told;
    nodes = above + count;
    runs = reinterpret_cast<const Run*>(nodes + count);
    firm = reinterpret_cast<const int32_t*>(runs + header[kRuns]);
    confidences = told->numbers + 1;
    evidence = confidences + count;
    told->numbers = evidence + header[kEvidence];
    told->integers = firm + header[kFirm];
  }

  // Its draws. False where runs do not hold them, or are of somebody unknown.
  bool draws(const Knowledge& knowledge, Columns* to) const {
    int64_t count = 0, pieces = 0;
    for (const Run* run = runs; run != runs + header[kRuns]; ++run) {
      if (run->speculator < 0 || run->speculator >= knowledge.speculators) return false;
      if (run->draws < 0 || run->pieces < 0) return false;
      count += run->draws;
      pieces += static_cast<int64_t>(run->draws) * run->pieces;
    }
    if (count != header[kDraws] || pieces != header[kEvidence]) return false;
    to->confidences.assign(confidences, confidences + count);
    to->evidence.assign(evidence, evidence + pieces);
    to->parents.assign(above, above + count);
    to->nodes.assign(nodes, nodes + count);
    to->speculators.clear();
    to->pieces.clear();
    for (const Run* run = runs; run != runs + header[kRuns]; ++run) {
      to->speculators.insert(to->speculators.end(), run->draws, run->speculator);
      to->pieces.insert(to->pieces.end(), run->draws, run->pieces);
    }
    return true;
  }
};

// Counts what became of guesses at one level, as speculate/policy/level_counts.py does; -1: none held the next token.
void count_choice(double* table, int64_t depth, int64_t level, int32_t choice) {
  constexpr double kMemory = 0.97;
  if (level == 0) {
    for (int64_t i = 0; i < 3 * depth; ++i) table[i] *= kMemory;
  }
  if (level >= depth) return;
  table[level] += choice == 0 ? 1.0 : 0.0;
  table[depth + level] += choice > 0 ? 1.0 : 0.0;
  table[2 * depth + level] += 1.0;
}

// Whether all of these were told of.
bool all_known(const int32_t* speculators, int64_t count, const Knowledge& knowledge) {
  return std::all_of(speculators, speculators + count,
                     [&](int32_t number) { return 0 <= number && number < knowledge.speculators; });
}

}  // namespace

bool Guesses::show(Told* told, const Knowledge& knowledge) {
  const Record record(told);
  const int64_t nodes = record.header[kNodes];
  if (nodes < 1 || !record.draws(knowledge, &draws_) || !draws_.view().within(nodes)) return false;
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
  rates_.resize(nodes);
  estimate(draws_.view(), temperature_, knowledge.logistics != 0, knowledge.known, nodes, rates_.data());
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
  Columns told_draws;
  if (!record.draws(knowledge, &told_draws)) return false;
  const Draws draws = told_draws.view();
  if (!draws.within(static_cast<int64_t>(own_.size()))) return false;
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
    if (knowledge.levels[draws.speculators[i]] != 0) drafted[draws.nodes[i]] = 1;
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

int64_t Guesses::learn(const int32_t* tokens, int64_t count, const Knowledge& knowledge,
                       double* const* tables) const {
  if (!all_known(draws_.speculators.data(), draws_.count(), knowledge)) return -1;
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
      if (knowledge.levels[speculator] == 0) continue;
      int32_t own = 0, choice = -1;  // the first of its guesses tells of all
      bool told = false;
      for (int64_t j = first; j < path.count(); ++j) {
        if (path.speculators[j] != speculator) continue;
        told = told || j < i;
        if (path.nodes[j] == next && choice < 0) choice = own;
        ++own;
      }
      if (told) continue;
      const auto priced = [](int32_t levels) { return levels > 0; };
      const int64_t before = std::count_if(knowledge.levels, knowledge.levels + speculator, priced);
      for (int64_t t = kTables * before; t < kTables * (before + 1); ++t) {
        count_choice(tables[t], knowledge.levels[speculator], level, choice);
      }
    }
    node = next;
  }
  specinfer::learn(path.view(), temperature_, knowledge.logistics != 0, groups, accepted, knowledge.known);
  return path.count();
}

}  // namespace specinfer
