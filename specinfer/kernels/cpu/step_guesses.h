// What is hoped of a step's guesses, for all its requests, in a call a question: what its twin and oracle works out,
// speculate/policy/plain_weighing.py.

#pragma once

#include <cstdint>
#include <vector>

#include "guesses.h"

namespace specinfer {

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

// What a step is expected to make, with those guesses so far that pay; `price` is that of a row more.
struct Expected {
  double tokens, price;
  int64_t nodes;
};

// The guesses of one step after the other. Where something is no tree it is refused, and so is what is asked of it.
class StepGuesses {
 public:
  // A step begins: nothing is shown, and nothing was chosen from.
  void begin();
  // The step as it is expected to be with what others have guessed so far, of each request, if their odds count as so
  // much: out[0..2] are its tokens, nodes and the price of a row; then of each request how likely others leave the
  // token behind its root to a draft, and the tokens they make.
  bool expect(Told told, const Knowledge& knowledge, const StepCosts& costs, double part, double* out);
  // A draft has grown some of these trees: of all their ends, in order, whether they are worth another
  // pass, of which the draft's takes `passes` seconds, by its rows; `each` rows of the target's come of every end.
  bool deepen(Told told, const Knowledge& knowledge, const StepCosts& costs, const double* passes, double each,
              int32_t* chosen);
  // The nodes that make the step faster out of these trees: of each their count and the nodes, ascending.
  bool choose(Told told, const Knowledge& knowledge, const StepCosts& costs, int32_t* kept);
  // Learns what became of trees that were chosen from; of each `told` holds its number, how many tokens were
  // committed, and these, and `tables` where the levels of drafts that have a price are counted (Guesses::learn).
  // Returns how many guesses were learnt from, or -1.
  int64_t learn(const int32_t* told, int64_t count, const Knowledge& knowledge, double* const* tables) const;

 private:
  Expected so_far(const std::vector<std::vector<double>>& hopes, const StepCosts& costs) const;

  // Their memory is kept from step to step; so many of them are of this one.
  std::vector<Guesses> shown_, chosen_;
  int64_t num_shown_ = 0, num_chosen_ = 0;
};

// How likely the nodes of these trees are to become text, one tree behind the other. False where one is none.
bool hopes_of(Told told, const Knowledge& knowledge, double* out);

}  // namespace specinfer
