// How likely guesses are: what speculate/estimator.py does for a tree's guesses, in one call; its twin and oracle.

#pragma once

#include <cstdint>

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

// Guesses in the order in which they were made, with all there are below their parents.
//
// They lie in one piece, `evidence` numbers of evidence being all there are:
//   double confidences[count], evidence[evidence]
//   int32_t parents[count], nodes[count], speculators[count], pieces[count]      pieces: of evidence, of each
struct Draws {
  int64_t count;
  const double *confidences, *evidence;
  const int32_t *parents, *nodes, *speculators, *pieces;

  Draws(const void* packed, int64_t count, int64_t evidence)
      : count(count),
        confidences(static_cast<const double*>(packed)),
        evidence(confidences + count),
        parents(reinterpret_cast<const int32_t*>(this->evidence + evidence)),
        nodes(parents + count),
        speculators(nodes + count),
        pieces(speculators + count) {}

  // Whether all are below and at nodes that there are.
  bool within(int64_t num_nodes) const;
};

// The probability of each node to become text where its parent did, of nodes without a guess 0: of several guesses of
// a node the likeliest. Counts alone, unless there are `logistics`. Returns whether the nodes are there.
bool estimate(const Draws& draws, double temperature, bool logistics, const Known* known, int64_t num_nodes,
              double* rates);

// Learns what became of guesses: of the groups below one node each, of which those at node accepted[i] became text.
// Behind the draws lie int32_t sizes[groups], accepted[groups]. Returns whether the nodes are there.
bool learn(const Draws& draws, double temperature, bool logistics, int64_t groups, int64_t num_nodes, Known* known);

}  // namespace specinfer
