// Grows trees best first from one pass of a head, for all requests of a step in one call. tests/oracles/best_first.py
// has the same in NumPy.

#pragma once

#include "product.h"
#include "sampling.h"

namespace specinfer {

// Post-processing of a head's logits, as in kernels/structures.py. Rows of tables are of `type`.
struct Guesser {
  Type type;
  const int64_t* ids;       // [U]: token of each logit; null: entry i is token i
  Product markov;           // [U, M]: embedding of the previous token -> term of the logits; no weight: no term
  const void* before;       // [V, M]: embedding of each token as the previous one
  const void* named;        // [U, M]: the matrix of `markov` before layout
  int64_t tokens;           // V
};

// One request's tree.
struct TreeRequest {
  int64_t first, levels;  // rows of the pass
  int64_t anchor;         // token of the root
  int64_t most;           // maximum nodes below the root
  double temperature;
  double least;           // minimum probability of a path
  uint64_t seed;          // of the target's sampling noise, for a race
  int64_t position;       // of the first level's tokens in the text
  int32_t races;          // children are drawn by the coupled rule; else the likeliest first
};

// Grown nodes in order of addition, `room` for each request. Parents count from the root, 0; evidence is the
// probability of the two likeliest tokens below a node's parent.
struct GrownTrees {
  int64_t room;
  int64_t* counts;      // [requests]: number of nodes
  int64_t* parents;     // [requests, room]
  int64_t* tokens;      // the same shape
  double* confidences;
  double* evidence;     // [requests, room, 2]
};

// Returns false and does nothing if a request has an invalid row or token, or exceeds the room.
bool grow_trees(const Guesser& guesser, const LogitBlock& logits, const TreeRequest* requests, int64_t count,
                const GrownTrees& to);

}  // namespace specinfer
