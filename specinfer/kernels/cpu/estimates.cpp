#include "estimates.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace specinfer {
namespace {

// As in speculate/policy/: calibration.py, features.py, logistic.py and estimator.py. The same sums in the same order,
// so that a replay without this library decides as the engine does.
constexpr int kHighest = 6;       // level of a confidence
constexpr double kMemory = 0.995;  // of a count
constexpr double kUnsure = 0.002, kPace = 0.05, kHeaviest = 16.0;
constexpr double kMostLead = 5.0, kLeadMemory = 0.998;
constexpr double kMostVoters = 16.0, kHottest = 2.0;
const double kLeastLevel = 1 / (1 + std::exp(kHighest + 0.5));
const double kLeast = 1 / (1 + std::exp(8.0)), kMost = 1 - kLeast;
const double kLargestLead = std::exp(8.0);
constexpr double kOthers[] = {0.0, 0.5, 1.0};

int level_of(double confidence) {
  if (kLeastLevel < confidence && confidence < 1 - kLeastLevel) {
    return static_cast<int>(std::nearbyint(std::log(confidence / (1 - confidence))));
  }
  return confidence > 0.5 ? kHighest : -kHighest;
}

// What some guesses are among each other.
class Group {
 public:
  Group(const Draws& draws, int64_t first, int64_t last, double temperature)
      : draws_(draws), first_(first), heat_(temperature < kHottest ? 0.5 * temperature : 1.0) {
    int32_t most = 0;
    for (int64_t i = first; i < last; ++i) most = std::max({most, draws.nodes[i], draws.parents[i]});
    held_.assign(most + 1, 0);
    guessing_.assign(most + 1, 0);
    firsts_.resize(last - first);
    for (int64_t i = first; i < last; ++i) {
      ++held_[draws.nodes[i]];
      bool later = false;
      for (int64_t j = i - 1; j >= first && !later; --j) {
        later = draws.parents[j] == draws.parents[i] && draws.speculators[j] == draws.speculators[i];
      }
      firsts_[i - first] = !later;
      if (!later) ++guessing_[draws.parents[i]];
      if (draws.pieces[i] == 2) drafted_.push_back(i);
    }
  }

  // The count that a guess belongs to.
  int first(int64_t i) const { return firsts_[i - first_]; }

  void features(int64_t i, const double* evidence, double* of) const {
    const double confidence = draws_.confidences[i];
    double sureness = confidence > 0.5 ? 2.0 : -2.0;
    if (kLeast < confidence && confidence < kMost) sureness = 0.25 * std::log(confidence / (1 - confidence));
    double support = 0.0, spread = 0.0;
    if (draws_.pieces[i] == 3) {
      const double voters = evidence[1], share = evidence[2];
      if (voters >= 1 && 0 <= share && share <= 1) {
        support = voters < kMostVoters ? 0.25 * std::log2(voters) : 1.0;
        spread = 1.0 - share;
      }
    } else if (draws_.pieces[i] == 2) {
      const double best = evidence[0], second = evidence[1];
      if (0 <= second && second <= best && best <= 1 && best != 0) {
        const double lead = second * kLargestLead > best ? best / second : kLargestLead;
        support = 0.25 * std::log(lead);
        spread = std::max(0.0, 1.0 - best - second);
      }
    }
    const int same = held_[draws_.nodes[i]], others = guessing_[draws_.parents[i]] - same;
    const double agreed = same < 4 ? kOthers[same - 1] : 1.0;
    const double against = 0 <= others && others < 3 ? kOthers[others] : others > 0 ? 1.0 : 0.0;
    const double later = first(i) ? 0.0 : 1.0;
    const double all[] = {1.0, sureness, support, spread, later, agreed, against, denied(i), heat_};
    std::copy(std::begin(all), std::end(all), of);
  }

 private:
  // How likely the surest of the other drafts finds something else there.
  double denied(int64_t i) const {
    double most = 0.0;
    for (const int64_t j : drafted_) {
      if (draws_.parents[j] != draws_.parents[i] || draws_.nodes[j] == draws_.nodes[i]) continue;
      if (draws_.speculators[j] == draws_.speculators[i]) continue;
      const double confidence = draws_.confidences[j];
      if (most < confidence && confidence <= 1) most = confidence;
    }
    return most;
  }

  const Draws& draws_;
  const int64_t first_;
  const double heat_;
  std::vector<int> held_, guessing_;  // how many propose a node; how many speculators guess below one
  std::vector<int64_t> drafted_;      // guesses of drafts
  std::vector<char> firsts_;
};

double probability(const double* weights, const double* features) {
  double sum = weights[0] * features[0];
  for (int i = 1; i < kFeatures; ++i) sum += weights[i] * features[i];
  const double likely = 1 / (1 + std::exp(-sum));
  return likely < kUnsure ? kUnsure : likely > 1 - kUnsure ? 1 - kUnsure : likely;
}

// std::max and std::min of Python, which keep the first of equal ones, and a number beside what is none.
double within(double value, double least, double most) {
  const double below = value < most ? value : most;
  return below > least ? below : least;
}

}  // namespace

bool Draws::within(int64_t num_nodes) const {
  const auto is = [&](int32_t node) { return 0 <= node && node < num_nodes; };
  return std::all_of(parents, parents + count, is) && std::all_of(nodes, nodes + count, is);
}

Draws Columns::view() const {
  return {count(), confidences.data(), evidence.data(), parents.data(), nodes.data(), speculators.data(),
          pieces.data()};
}

void Columns::add(const Draws& draws, int64_t i, const double* of, int32_t parent, int32_t node) {
  confidences.push_back(draws.confidences[i]);
  evidence.insert(evidence.end(), of, of + draws.pieces[i]);
  parents.push_back(parent);
  nodes.push_back(node);
  speculators.push_back(draws.speculators[i]);
  pieces.push_back(draws.pieces[i]);
}

void estimate(const Draws& draws, double temperature, bool logistics, const Known* known, int64_t num_nodes,
              double* rates) {
  std::fill(rates, rates + num_nodes, 0.0);
  const Group group(draws, 0, draws.count, temperature);
  const double* evidence = draws.evidence;
  double features[kFeatures];
  for (int64_t i = 0; i < draws.count; evidence += draws.pieces[i++]) {
    const Known& of = known[draws.speculators[i]];
    double rate;
    if (logistics && of.lead >= 0) {
      group.features(i, evidence, features);
      rate = probability(of.weights, features);
    } else {
      const Count& count = of.counts[group.first(i)][level_of(draws.confidences[i]) + kHighest];
      rate = count.accepted / count.seen;
    }
    double& best = rates[draws.nodes[i]];
    if (rate > best) best = rate;
  }
}

void learn(const Draws& draws, double temperature, bool logistics, const std::vector<int32_t>& groups,
           const std::vector<int32_t>& accepted, Known* known) {
  const double* evidence = draws.evidence;
  int64_t first = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    const int64_t last = first + groups[g];
    const Group group(draws, first, last, temperature);
    std::vector<Count*> counts;
    for (int64_t i = first; i < last; ++i) {
      counts.push_back(
          &known[draws.speculators[i]].counts[group.first(i)][level_of(draws.confidences[i]) + kHighest]);
    }
    std::vector<double> counted;  // before any of them is learnt from
    for (const Count* count : counts) counted.push_back(count->accepted / count->seen);
    for (int64_t i = first; i < last; evidence += draws.pieces[i++]) {
      if (!logistics) continue;
      Known& of = known[draws.speculators[i]];
      double features[kFeatures];
      group.features(i, evidence, features);
      const bool became = draws.nodes[i] == accepted[g];
      const double likely = probability(of.weights, features);
      const double rate = within(counted[i - first], kUnsure, 1 - kUnsure);
      const double gain = became ? likely / rate : (1 - likely) / (1 - rate);
      of.lead = within(kLeadMemory * of.lead + std::log(gain), -kMostLead, kMostLead);
      of.outcomes += 1;
      const double step = kPace * ((became ? 1.0 : 0.0) - likely);
      for (int k = 0; k < kFeatures; ++k) {
        of.weights[k] = within(of.weights[k] + step * features[k], -kHeaviest, kHeaviest);
      }
    }
    for (int64_t i = first; i < last; ++i) {
      Count& count = *counts[i - first];
      count.accepted = kMemory * count.accepted + (draws.nodes[i] == accepted[g] ? 1.0 : 0.0);
      count.seen = kMemory * count.seen + 1;
    }
    first = last;
  }
}

}  // namespace specinfer
