// One request's guesses, what they are told as, and what is hoped of them: as speculate/policy/guesses.py has them.

#pragma once

#include <cstdint>
#include <vector>

#include "estimates.h"

namespace specinfer {

// What is known of speculators, by number.
struct Knowledge {
  Known* known;
  const int32_t* levels;  // that are counted of a draft whose passes have a price; 0: it is none
  int64_t speculators;    // that there are
  int32_t logistics;      // 0: counts alone
  double beside;          // beside drafts the odds of what none has guessed count as so much; 1 without drafts
};

// Tables that count what became of a draft's levels: of all requests, of those that are as hot, of the request. In
// each lie of every level how often its first guess held the next token, how often another one, and the tries.
constexpr int kTables = 3;

// What the integers of a tree begin with.
enum Header { kNodes, kDraws, kEvidence, kFirm, kRuns, kMost, kAllStay, kHeader };

struct Run {
  int32_t speculator, draws, pieces;
};

// Trees in one piece, one behind the other: the numbers of all, and then their integers.
//   double temperature, confidences[draws], evidence[evidence]
//   int32_t nodes, draws, evidence, firm, runs, most, all_stay,
//           tokens[nodes], node_parents[nodes], parents[draws], draw_nodes[draws], Run run[runs], firm_nodes[firm]
// Draws of one run, which stand one behind another, are of one speculator and have as much evidence each. A tree may
// have `most` nodes, the root included; firm nodes stay in any case, and all do where the request says how large its
// trees are. What grows is told likewise, nodes and draws being new ones, firm nodes samples, and `most` the number of
// its tree. Behind it lie the ends that it may grow below, and how likely first guesses there and others are right:
//   double firsts[ends], others[ends]
//   int32_t ends, end_nodes[ends]
struct Told {
  const double* numbers;
  const int32_t* integers;
  int64_t count;

  Told(const double* told, int64_t numbers, int64_t count)
      : numbers(told), integers(reinterpret_cast<const int32_t*>(told + numbers)), count(count) {}

  // Of what has grown: the number of the tree that is told next.
  int64_t number() const { return integers[kMost]; }
};

// What a tree can hold: what stays in any case, and what may be dropped, likeliest first.
struct Parts {
  double tokens = 0.0;  // that what stays brings
  int64_t nodes = 0;
  std::vector<int32_t> droppable;
};

// One request's guesses.
class Guesses {
 public:
  // Takes the tree that is told next, and works out how likely its nodes are. False where it is no tree.
  bool show(Told* told, const Knowledge& knowledge);
  // Adds what a draft has grown. False where its nodes are not there.
  bool grow(Told* told, const Knowledge& knowledge);
  // The rates of its nodes, if the odds of what no draft has guessed count as so much.
  std::vector<double> doubted(const Knowledge& knowledge, double part) const;
  // The rates multiplied from below the root down to each node.
  std::vector<double> along_paths(const std::vector<double>& rates) const;
  // Its nodes, if they are as likely as that.
  Parts parts(const std::vector<double>& hopes) const;
  // How likely nobody else holds the token behind a node, by these rates.
  double left(const std::vector<double>& rates, int64_t node) const;
  // The tokens that children of a node of the draft's tree bring that nobody else holds.
  double gain(int64_t end, double first, double other, double price) const;
  // Learns what became of guesses when the text went on with these tokens, and counts what became of those of drafts
  // that have a price: each counts in `kTables` tables, those of all such drafts lying one behind another, by number.
  // How many guesses that were; -1 where they are of nobody known.
  int64_t learn(const int32_t* tokens, int64_t count, const Knowledge& knowledge, double* const* tables) const;

  const std::vector<double>& hopes() const { return hopes_; }
  int64_t num_nodes() const { return static_cast<int64_t>(parents_.size()); }
  bool has_end(int64_t node) const { return 0 <= node && node < static_cast<int64_t>(own_.size()); }
  bool firm(int64_t node) const { return firm_[node] != 0; }
  bool stays(int64_t node) const { return all_stay_ || firm(node); }  // if there is room for it

 private:
  int32_t child(int32_t parent, int32_t token) const;  // the node below it that holds the token, or -1
  void doubt(const Columns& draws, const Knowledge& knowledge, double part, std::vector<double>* rates) const;

  double temperature_ = 0.0;
  int64_t most_ = 0, shown_ = 0;  // shown: nodes that others have guessed, the root included
  bool all_stay_ = false, samples_ = false;
  std::vector<int32_t> tokens_, parents_;
  std::vector<double> rates_, hopes_;
  std::vector<char> firm_;
  std::vector<int32_t> own_;  // where nodes of the draft's tree are
  Columns draws_;             // of others
};

}  // namespace specinfer
