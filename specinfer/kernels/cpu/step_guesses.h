// What is hoped of a step's guesses, for all its requests: what speculate/plain_weighing.py works out, in a call a
// question; its twin and oracle.

#pragma once

#include <cstdint>
#include <vector>

#include "estimates.h"

namespace specinfer {

// What is known of speculators, by number.
struct Knowledge {
  Known* known;
  const uint8_t* priced;  // whether it is a draft whose passes have a price
  int32_t logistics;      // 0: counts alone
  double beside;          // beside drafts the odds of what none has guessed count as so much; 1 without drafts
};

// What a step takes, by the nodes below its roots, and what it makes in any case.
struct StepCosts {
  const double* passes;  // seconds of the target's pass by its rows
  int64_t rows, last;    // of it without such nodes, and with all that there may be
  double spent;          // seconds of drafts' passes
  double tokens;         // one for each request

  double seconds(int64_t nodes) const { return spent + passes[rows + nodes < last ? rows + nodes : last]; }
  // The tokens that another row costs, if a step makes so many with so many nodes.
  double price(double made, int64_t nodes) const;
};

// Trees in one piece, one behind the other: the numbers of all, and then their integers.
//   double temperature, confidences[draws], evidence[evidence]
//   int32_t nodes, draws, evidence, firm, most, all_stay,
//           tokens[nodes], node_parents[nodes], parents[draws], draw_nodes[draws], speculators[draws], pieces[draws],
//           firm_nodes[firm]
// A tree may have `most` nodes, the root included; firm nodes stay in any case, and all do where the request says how
// large its trees are. What grows is told likewise, nodes and draws being new ones, firm nodes samples, and `most` the
// number of its tree. Behind it lie the ends that it may grow below, and how likely first guesses there and others
// are right:
//   double firsts[ends], others[ends]
//   int32_t ends, end_nodes[ends]
struct Told {
  const double* numbers;
  const int32_t* integers;
  int64_t count;

  Told(const double* told, int64_t numbers, int64_t count)
      : numbers(told), integers(reinterpret_cast<const int32_t*>(told + numbers)), count(count) {}
};

// What others make of a step, for a draft that may start.
struct Expected {
  double tokens, price;
  int64_t nodes;
};

// One request's guesses.
class Guesses {
 public:
  // Takes a tree and how likely its nodes are; moves `told` behind it. False where it is no tree.
  bool show(Told* told, const Knowledge& knowledge);
  // The same of what a draft adds.
  bool grow(Told* told, const Knowledge& knowledge);
  // The rates of its nodes, if the odds of what no draft has guessed count as so much.
  std::vector<double> doubted(const Knowledge& knowledge, double part) const;
  // What the tree can hold: adds to tokens and nodes that stay, and to what each other would bring.
  void add_parts(const std::vector<double>& hopes, double* tokens, int64_t* nodes, std::vector<double>* others) const;
  // How likely nobody else holds the token behind a node, by these rates.
  double left(const std::vector<double>& rates, int64_t node) const;
  // The tokens that children of a node of the draft's tree bring that nobody else holds.
  double gain(int64_t end, double first, double other, double price) const;
  // The rates multiplied from below the root down to each node.
  std::vector<double> along_paths(const std::vector<double>& rates) const;
  // The nodes that may be dropped, likeliest first, as many as there is room for; `tokens` those that stay bring.
  std::vector<int32_t> droppable(double* tokens, int64_t* stay) const;
  // Learns what became of guesses when the text went on with these tokens; tells what became of drafts' choices.
  int64_t learn(const int32_t* tokens, int64_t count, const Knowledge& knowledge, int32_t number,
                std::vector<int32_t>* choices) const;

  const std::vector<double>& rates() const { return rates_; }
  const std::vector<double>& hopes() const { return hopes_; }
  int64_t num_nodes() const { return static_cast<int64_t>(parents_.size()); }
  bool has_end(int64_t node) const { return 0 <= node && node < static_cast<int64_t>(own_.size()); }
  bool all_stay() const { return all_stay_; }
  bool stays(int64_t node) const { return firm_[node] != 0; }

 private:
  int32_t child(int32_t parent, int32_t token) const;  // the node below it that holds the token, or -1
  bool estimate_all(const Columns& draws, const Knowledge& knowledge);
  void doubt(const Columns& draws, const Knowledge& knowledge, double part, std::vector<double>* rates) const;

  double temperature_ = 0.0;
  int64_t most_ = 0, shown_ = 0, num_firm_ = 0;  // shown: nodes that others have guessed, the root included
  int64_t shown_draws_ = 0;
  bool all_stay_ = false, samples_ = false;
  std::vector<int32_t> tokens_, parents_;
  std::vector<double> rates_, hopes_;
  std::vector<char> firm_;
  std::vector<int32_t> own_;  // where nodes of the draft's tree are
  Columns draws_;
};

class StepGuesses {
 public:
  // What has been guessed so far, of each request. False where a tree is none.
  bool show(Told told, const Knowledge& knowledge);
  // The step as it is expected to be without a draft that may start, if others' odds count as so much: out[0..2] are
  // its tokens, nodes and the price of a row; then of each request how likely others leave the root's child to the
  // draft, and the tokens they make.
  void expect(const StepCosts& costs, const Knowledge& knowledge, double part, double* out) const;
  // A draft has grown some trees: of all their ends, in order, those worth another pass, of which the draft's take
  // `passes` seconds, by their rows; `each` rows of the target's come of every end. The count of chosen ones; -1 where
  // something is no tree.
  int64_t deepen(Told told, const Knowledge& knowledge, const StepCosts& costs, const double* passes, double each,
                 int32_t* chosen);
  // The nodes that make the step faster out of these trees: of each their count and the nodes, ascending. False
  // where one is no tree.
  bool choose(Told told, const Knowledge& knowledge, const StepCosts& costs, int32_t* kept);
  // Learns what became of trees that were chosen from; of each `told` holds its number, tokens that were committed and
  // these. Of drafts' choices `out` gets tree, level, speculator and choice each, -1 for none; returns how many, and
  // how many guesses were learnt from.
  int64_t learn(const int32_t* told, int64_t count, const Knowledge& knowledge, int32_t* out, int64_t* learnt) const;

 private:
  Expected so_far(const std::vector<std::vector<double>>& hopes, const StepCosts& costs) const;

  std::vector<Guesses> shown_, chosen_;
};

// How likely the nodes of these trees are to become text, one tree behind the other. False where one is none.
bool hopes_of(Told told, const Knowledge& knowledge, double* out);

}  // namespace specinfer
