// How likely guesses are: what speculate/policy/estimator.py does for a tree's guesses; its twin and oracle.

#pragma once

#include <cstdint>
#include <vector>

namespace specinfer {

constexpr int kFeatures = 9;
constexpr int kLevels = 13;  // of confidences: log-odds from -6 to 6

// What became of a speculator's guesses of one kind, fading.
struct Count {
  double accepted, seen;
};

// What is known of one speculator's guesses.
struct Known {
  double weights[kFeatures];
  double lead;                // of the logistic over the counts
  double outcomes;            // it has learnt from
  Count counts[2][kLevels];  // of others than first choices, of first choices
};

// Guesses in the order in which they were made, with all there are below their parents; `pieces` of evidence each has.
struct Draws {
  int64_t count;
  const double *confidences, *evidence;
  const int32_t *parents, *nodes, *speculators, *pieces;

  // Whether all are below and at nodes that there are.
  bool within(int64_t num_nodes) const;
};

// Guesses with memory of their own.
struct Columns {
  std::vector<double> confidences, evidence;
  std::vector<int32_t> parents, nodes, speculators, pieces;

  Draws view() const;
  int64_t count() const { return static_cast<int64_t>(parents.size()); }
  // Adds the i-th of some guesses, whose evidence lies there, below and at these nodes.
  void add(const Draws& draws, int64_t i, const double* evidence, int32_t parent, int32_t node);
};

// The probability of each node to become text where its parent did, of nodes without a guess 0: of several guesses of
// a node the likeliest. Counts alone, unless there are `logistics`.
void estimate(const Draws& draws, double temperature, bool logistics, const Known* known, int64_t num_nodes,
              double* rates);

// Learns what became of guesses: of groups[g] ones below one node each, of which those at node accepted[g] became text.
void learn(const Draws& draws, double temperature, bool logistics, const std::vector<int32_t>& groups,
           const std::vector<int32_t>& accepted, Known* known);

}  // namespace specinfer
