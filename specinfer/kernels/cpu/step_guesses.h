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
  int64_t speculators;    // that there are
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

// What a step is expected to make, with those guesses so far that pay; `price` is that of a row more.
struct Expected {
  double tokens, price;
  int64_t nodes;
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
  // Learns what became of guesses when the text went on with these tokens, and adds what became of drafts' choices:
  // `number`, level, speculator and choice each. How many guesses that were; -1 where they are of nobody known.
  int64_t learn(const int32_t* tokens, int64_t count, const Knowledge& knowledge, int32_t number,
                std::vector<int32_t>* choices) const;

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

// The guesses of one step after the other. Where something is no tree it is refused, and so is what is asked of it.
class StepGuesses {
 public:
  // A step begins: nothing is shown, and nothing was chosen from.
  void begin();
  // What has been guessed so far, of each request.
  bool show(Told told, const Knowledge& knowledge);
  // The step as it is expected to be with what `count` requests were shown, if others' odds count as so much:
  // out[0..2] are its tokens, nodes and the price of a row; then of each request how likely others leave the token
  // behind its root to a draft, and the tokens they make.
  bool expect(int64_t count, const StepCosts& costs, const Knowledge& knowledge, double part, double* out) const;
  // A draft has grown some of the trees that were shown: of all their ends, in order, whether they are worth another
  // pass, of which the draft's takes `passes` seconds, by its rows; `each` rows of the target's come of every end.
  bool deepen(Told told, const Knowledge& knowledge, const StepCosts& costs, const double* passes, double each,
              int32_t* chosen);
  // The nodes that make the step faster out of these trees: of each their count and the nodes, ascending.
  bool choose(Told told, const Knowledge& knowledge, const StepCosts& costs, int32_t* kept);
  // Learns what became of trees that were chosen from; of each `told` holds its number, how many tokens were
  // committed, and these. `out` gets drafts' choices, -1 for none; returns how many, or -1, and how many guesses were
  // learnt from.
  int64_t learn(const int32_t* told, int64_t count, const Knowledge& knowledge, int32_t* out, int64_t* learnt) const;

 private:
  Expected so_far(const std::vector<std::vector<double>>& hopes, const StepCosts& costs) const;

  // Their memory is kept from step to step; so many of them are of this one.
  std::vector<Guesses> shown_, chosen_;
  int64_t num_shown_ = 0, num_chosen_ = 0;
};

// How likely the nodes of these trees are to become text, one tree behind the other. False where one is none.
bool hopes_of(Told told, const Knowledge& knowledge, double* out);

}  // namespace specinfer
