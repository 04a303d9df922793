// What the library offers; kernels/library.py declares the same. Shapes are checked there.

#include "best_first.h"
#include "block_head.h"
#include "decoder.h"
#include "layers.h"
#include "layout.h"
#include "memory.h"
#include "sampling.h"
#include "step_guesses.h"
#include "stream.h"
#include "tiles.h"

using namespace specinfer;

#pragma GCC visibility push(default)
extern "C" {

// Whether this process may run these kernels; to be asked once, before all else.
int32_t specinfer_ready() {
#if defined(SPECINFER_TILES)
  return tiles_allowed() ? 1 : 0;
#else
  return 1;
#endif
}

// Whether its int4 products have the bits of the twins.
int32_t specinfer_int4_is_exact() {
#if defined(SPECINFER_TILED)
  return 0;
#else
  return 1;
#endif
}

void specinfer_set_threads(int32_t threads) { Pool::get().resize(threads); }

int32_t specinfer_threads() { return Pool::get().threads(); }

// Asks for large pages where nobody has written yet.
void specinfer_want_huge_pages(void* memory, int64_t bytes) { want_huge_pages(memory, bytes); }

void specinfer_lay_out(int32_t kind, const void* from, int64_t channels, int64_t inner, void* to) {
  const Claim claim;
  lay_out_weight(static_cast<Kind>(kind), from, channels, inner, to);
}

void specinfer_multiply(const Product* product, int32_t type, const void* x, int64_t rows, void* out) {
  const Claim claim;
  const Timed timed(Stage::kProduct);
  multiply(*product, {x, static_cast<Type>(type), rows}, out);
}

void specinfer_add_rms_norm(int32_t type, void* x, const void* y, const void* weight, void* out,
                            const int64_t* chosen, int64_t rows, int64_t size, float eps, int32_t in_place) {
  const Claim claim;
  const Timed timed(Stage::kNorm);
  add_rms_norm(static_cast<Type>(type), x, y, weight, out, chosen, rows, size, eps, in_place != 0);
}

void specinfer_gate(int32_t type, int32_t gelu, const void* gate_up, void* out, int64_t rows, int64_t size) {
  const Claim claim;
  const Timed timed(Stage::kGate);
  gate(static_cast<Type>(type), gelu != 0, gate_up, out, rows, size);
}

int32_t specinfer_embed(int32_t type, const void* table, int64_t entries, const int64_t* ids, float scale, void* out,
                        int64_t rows, int64_t size) {
  const Claim claim;
  const Timed timed(Stage::kEmbed);
  return embed(static_cast<Type>(type), table, entries, ids, scale, out, rows, size) ? 1 : 0;
}

int32_t specinfer_fault_of_paths(const Paths* paths, int64_t num_slots) { return fault_of(*paths, num_slots); }

void specinfer_rope_and_store(int32_t type, const Heads* heads, const Paths* paths, const void* qkv,
                              const float* cos, const float* sin, void* k_cache, void* v_cache, void* q) {
  const Claim claim;
  const Timed timed(Stage::kRope);
  rope_and_store(static_cast<Type>(type), *heads, *paths, qkv, cos, sin, k_cache, v_cache, q);
}

void specinfer_tree_attention(int32_t type, const Heads* heads, const Paths* paths, const void* q,
                              const void* k_cache, const void* v_cache, void* out) {
  const Claim claim;
  const Timed timed(Stage::kAttention);
  tree_attention(static_cast<Type>(type), *heads, *paths, q, k_cache, v_cache, out);
}

void specinfer_layers(const Layer* layers, int64_t first, int64_t last, int32_t type, int32_t gelu, float eps,
                      const Paths* paths, const Rope* rope, const void* const* keys, const void* const* values,
                      const Stream* stream, const Taps* taps) {
  const Claim claim;
  run_layers(layers, first, last, static_cast<Type>(type), gelu != 0, eps, *paths, rope, keys, values, *stream,
             *taps);
}

int32_t specinfer_decode(const Decoder* decoder, const DecoderRows* rows, const Paths* paths, const void* const* keys,
                         const void* const* values, const Taps* taps, void* read, void* logits) {
  const Claim claim;
  return static_cast<int32_t>(run_decoder(*decoder, *rows, *paths, keys, values, *taps, read, logits));
}

int64_t specinfer_most_likely(const float* logits, int64_t size, int64_t n, int64_t* ids) {
  return most_likely(logits, size, n, ids);
}

double specinfer_mass(const float* logits, int64_t size, double highest, double temperature) {
  return mass(logits, size, highest, temperature);
}

int64_t specinfer_racers(const float* logits, int64_t size, const int64_t* ids, int64_t top, double temperature,
                         uint64_t key, int64_t* indices) {
  return racers(logits, size, ids, top, temperature, key, indices);
}

int32_t specinfer_likeliest(int32_t type, const void* logits, int64_t block_rows, int64_t size, int64_t stride,
                            const int64_t* rows, int64_t count, int64_t n, const double* temperatures, int64_t* ids,
                            float* values, int64_t* found, double* masses) {
  const Claim claim;
  const LogitBlock block{logits, block_rows, size, stride, static_cast<Type>(type)};
  return likeliest(block, {rows, count}, n, temperatures, ids, values, found, masses) ? 1 : 0;
}

int64_t specinfer_choices(int32_t type, const void* logits, int64_t block_rows, int64_t size, int64_t stride,
                          const int64_t* rows, int64_t count, const Ask* asks, const int64_t* changed,
                          const Terms* terms, const int64_t* ends, int64_t* ids) {
  const Claim claim;
  const LogitBlock block{logits, block_rows, size, stride, static_cast<Type>(type)};
  return choices(block, {rows, count}, asks, {changed, terms, ends}, ids);
}

int32_t specinfer_step_blocks(const BlockHead* head, const BlockStep* step, const Caches* caches, void* last,
                              void* read, void* logits) {
  const Claim claim;
  return step_blocks(*head, *step, *caches, last, read, logits) ? 1 : 0;
}

int32_t specinfer_grow_trees(const Guesser* guesser, int32_t type, const void* logits, int64_t rows, int64_t size,
                             const void* read, const TreeAsk* asks, int64_t count, const GrownTrees* to) {
  const Claim claim;
  const LogitBlock block{logits, rows, size, size, static_cast<Type>(type)};
  return grow_trees(*guesser, block, read, asks, count, *to) ? 1 : 0;
}

// Memory for the guesses of one step after the other, of one policy.
void* specinfer_step_new() { return new StepGuesses(); }

void specinfer_step_free(void* step) { delete static_cast<StepGuesses*>(step); }

void specinfer_step_begin(void* step) { static_cast<StepGuesses*>(step)->begin(); }

int32_t specinfer_step_show(void* step, const double* told, int64_t numbers, int64_t count,
                            const Knowledge* knowledge) {
  return static_cast<StepGuesses*>(step)->show({told, numbers, count}, *knowledge) ? 1 : 0;
}

int32_t specinfer_step_expect(const void* step, int64_t count, const Knowledge* knowledge, const StepCosts* costs,
                              double part, double* out) {
  return static_cast<const StepGuesses*>(step)->expect(count, *costs, *knowledge, part, out) ? 1 : 0;
}

int32_t specinfer_step_deepen(void* step, const double* told, int64_t numbers, int64_t count,
                              const Knowledge* knowledge, const StepCosts* costs, const double* passes, double each,
                              int32_t* chosen) {
  const Told trees(told, numbers, count);
  return static_cast<StepGuesses*>(step)->deepen(trees, *knowledge, *costs, passes, each, chosen) ? 1 : 0;
}

int32_t specinfer_step_choose(void* step, const double* told, int64_t numbers, int64_t count,
                              const Knowledge* knowledge, const StepCosts* costs, int32_t* kept) {
  return static_cast<StepGuesses*>(step)->choose({told, numbers, count}, *knowledge, *costs, kept) ? 1 : 0;
}

int64_t specinfer_step_learn(const void* step, const int32_t* told, int64_t count, const Knowledge* knowledge,
                             double* const* tables) {
  return static_cast<const StepGuesses*>(step)->learn(told, count, *knowledge, tables);
}

int32_t specinfer_hopes(const double* told, int64_t numbers, int64_t count, const Knowledge* knowledge, double* out) {
  return hopes_of({told, numbers, count}, *knowledge, out) ? 1 : 0;
}

// Bytes per second at which `bytes` of memory are read once by all threads.
double specinfer_stream(const void* from, int64_t bytes) {
  const Claim claim;
  return stream(from, bytes);
}

// Starts or ends a profile; returns the nanoseconds of each stage so far, which start anew.
void specinfer_profile(int32_t on, int64_t* nanoseconds) {
  const Claim claim;
  Profile& profile = Profile::get();
  std::copy(std::begin(profile.nanoseconds), std::end(profile.nanoseconds), nanoseconds);
  std::fill(std::begin(profile.nanoseconds), std::end(profile.nanoseconds), 0);
  profile.on = on != 0;
}

}  // extern "C"
#pragma GCC visibility pop
