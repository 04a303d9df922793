// Guesses looked up in texts, for all requests of a step in one call (speculate/lookups/lookup.py).

#pragma once

#include "text_index.h"

namespace specinfer {

// Settings that do not depend on the text; as in kernels/structures.py.
struct LookupRules {
  int64_t longest;         // maximum counted length of a match, in tokens
  int64_t surest;          // match length in tokens beyond which a guess becomes no more certain
  double depth_factor;     // a match of n tokens supports guesses to depth n times this
  double min_probability;  // of a node
};

// One request.
struct LookupRequest {
  TextIndex* own;         // index of its text
  const TextIndex* kept;  // index of earlier answers; null: none
  int64_t read;           // new tokens of its text, which are read first
  int64_t depth;          // maximum depth of its tree
  int64_t nodes;          // maximum nodes, including the root
};

// Output trees, one request's after another. Node i + 1 of a tree is drawn by draw i.
struct LookedUp {
  int64_t room;         // nodes below roots, over all requests
  int32_t* counts;      // [requests]: nodes below the root
  int32_t* parents;     // [room]: the root is 0
  int32_t* tokens;      // [room]
  double* confidences;  // [room]
  double* evidence;     // [room, 3]: tokens matched, places that vote, their share
};

// `tokens` are the new tokens of all requests, in order. Trees that do not fit are cut. Returns false and reads
// nothing if a request exceeds the tokens; returns false also if memory is exhausted, after the texts of earlier
// requests were read.
bool lookup_trees(const LookupRules& rules, const LookupRequest* requests, int64_t count, const int32_t* tokens,
                  int64_t num_tokens, const LookedUp& to);

}  // namespace specinfer
