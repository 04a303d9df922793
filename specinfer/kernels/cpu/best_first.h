// Trees grown best first from one pass of a head, for all requests of a step in one call.
// tests/oracles/best_first.py has the same in NumPy.

#pragma once

#include "product.h"
#include "sampling.h"

namespace specinfer {

// What becomes of a head's logits; as kernels/structures.py has it. Rows of tables are of `type`.
struct Guesser {
  Type type;
  const int64_t* ids;       // [U]: the tokens that logits are of; null: entry i is token i
  Product markov;           // [U, M]: what is known of the token before -> logits to add; no weight: nothing
  const void* before;       // [V, M]: what is known of each token
  const void* named;        // [U, M]: the same matrix as `markov`, as it was
  int64_t tokens;           // V
};

// One request's tree.
struct TreeAsk {
  int64_t first, levels;  // rows of the pass
  int64_t anchor;         // the root's token
  int64_t most;           // nodes below the root
  double temperature;
  double least;           // probability of a path that is added
  uint64_t seed;          // of the noise that the target will use, for a race
  int64_t position;       // where the first level's tokens will stand
  int32_t races;          // children come as the coupled rule draws them; else the likeliest first
};

// What has grown, in the order in which it was added: `room` nodes for each request. Parents count from the root, 0,
// and evidence is how likely the two likeliest tokens below a node's parent are.
struct GrownTrees {
  int64_t room;
  int64_t* counts;      // [requests]: nodes
  int64_t* parents;     // [requests, room]
  int64_t* tokens;      // the same, and so on
  double* confidences;
  double* evidence;     // [requests, room, 2]
};

// False, and nothing done, where an ask leads out of the rows, the tokens or the room.
bool grow_trees(const Guesser& guesser, const LogitBlock& logits, const TreeAsk* asks, int64_t count,
                const GrownTrees& to);

}  // namespace specinfer
