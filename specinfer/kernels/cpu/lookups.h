// Guesses that are looked up in texts, for all requests of a step in one call (speculate/lookups/lookup.py).

#pragma once

#include "text_index.h"

namespace specinfer {

// How it is looked up, whatever the text; as kernels/structures.py has it.
struct LookupRules {
  int64_t longest;         // tokens that a match is counted up to
  int64_t surest;          // tokens; more make a guess no surer
  double depth_factor;     // a match of n tokens is guessed so many times n deep
  double min_probability;  // of a node
};

// One request's question.
struct LookupAsk {
  TextIndex* own;         // of its text
  const TextIndex* kept;  // of earlier answers; null: there are none
  int64_t read;           // tokens that its text has grown by: they are read first
  int64_t depth;          // of its tree at most
  int64_t nodes;          // the same, the root included
};

// Where trees go, one request's behind the other's. Node i + 1 of a tree is drawn by draw i.
struct LookedUp {
  int64_t room;         // nodes below roots, of all requests
  int32_t* counts;      // [requests]: nodes below the root
  int32_t* parents;     // [room]: the root is 0
  int32_t* tokens;      // [room]
  double* confidences;  // [room]
  double* evidence;     // [room, 3]: tokens matched, places that vote, their share
};

// `tokens` are those that each ask reads, in order. Trees that do not fit into the room are cut. False, and nothing
// read, where an ask leads out of the tokens; false also where memory is full, when the texts of earlier asks have
// been read.
bool lookup_trees(const LookupRules& rules, const LookupAsk* asks, int64_t count, const int32_t* tokens,
                  int64_t num_tokens, const LookedUp& to);

}  // namespace specinfer
