// The functions of the library; kernels/library.py declares the same and checks shapes.

#include <algorithm>
#include <iterator>

#include "best_first.h"
#include "block_head.h"
#include "decoder.h"
#include "exchange.h"
#include "file_blocks.h"
#include "lookups.h"
#include "low_rank.h"
#include "memory.h"
#include "recurrence.h"
#include "sampling.h"
#include "stream.h"
#include "tiles.h"

using namespace specinfer;

#pragma GCC visibility push(default)
extern "C" {

// True if this process may run these kernels; call it once, before all else.
int32_t specinfer_ready() {
#if defined(SPECINFER_TILES)
  return tiles_allowed() ? 1 : 0;
#else
  return 1;
#endif
}

// True if int4 products have the bits of the twins.
int32_t specinfer_int4_is_exact() {
#if defined(SPECINFER_TILED)
  return 0;
#else
  return 1;
#endif
}

void specinfer_set_threads(int32_t threads) { Pool::get().resize(threads); }

int32_t specinfer_threads() { return Pool::get().threads(); }

// Requests large pages for memory that has not been written.
void specinfer_want_huge_pages(void* memory, int64_t bytes) { want_huge_pages(memory, bytes); }

// Reads rows of a file into the arrays of a product, quantized to int8 or int4; 0 if all is well (Stored).
int32_t specinfer_lay_out_rows(const FileRows* rows, int64_t channel, const Product* to) {
  const Claim claim;
  const bool quantized = to->kind == Kind::kInt8 || to->kind == Kind::kInt4;
  return static_cast<int32_t>(quantized ? quantize(*rows, channel, *to) : lay_out(*rows, channel, *to));
}

void specinfer_to_elements(int32_t kind, const uint8_t* blocks, int64_t elements, int32_t type, void* out) {
  to_elements(static_cast<FileKind>(kind), blocks, elements, static_cast<Type>(type), out);
}

void specinfer_multiply(const Product* product, int32_t type, const void* x, int64_t rows, void* out) {
  const Claim claim;
  const Timed timed(Stage::kProduct);
  multiply(*product, {x, static_cast<Type>(type), rows}, out);
}

// The same, plus the adapters' terms for product `number`.
void specinfer_multiply_adapted(const Product* product, int32_t type, const void* x, int64_t rows,
                                const AdaptedRows* adapted, int64_t number, void* out) {
  const Claim claim;
  const Timed timed(Stage::kProduct);
  multiply_adapted(*product, {x, static_cast<Type>(type), rows}, adapted, number, out);
}

void specinfer_find_maxima(const Product* product, int32_t type, const void* x, int64_t rows, float* maxima) {
  const Claim claim;
  const Timed timed(Stage::kProduct);
  find_maxima(*product, {x, static_cast<Type>(type), rows}, maxima);
}

void specinfer_add_up(const Product* product, int32_t type, const void* x, int64_t rows, const float* maxima,
                      int32_t* sums) {
  const Claim claim;
  const Timed timed(Stage::kProduct);
  multiply(*product, {x, static_cast<Type>(type), rows, true, maxima}, sums);
}

void specinfer_finish(const Product* product, int32_t type, const int32_t* sums, int64_t rows, const float* maxima,
                      void* out) {
  const Claim claim;
  const Timed timed(Stage::kProduct);
  finish(*product, {nullptr, static_cast<Type>(type), rows, true, maxima}, sums, out);
}

// Sums over parts of rows, with float or int4 weights, in branches.
void specinfer_add_branches(const Product* product, int32_t type, const void* x, int64_t rows, float* branches) {
  const Claim claim;
  const Timed timed(Stage::kProduct);
  multiply(*product, {x, static_cast<Type>(type), rows, true}, branches);
}

void specinfer_finish_branches(const Product* product, int32_t type, const float* branches, int64_t rows, void* out) {
  const Claim claim;
  const Timed timed(Stage::kProduct);
  finish(*product, {nullptr, static_cast<Type>(type), rows}, branches, out);
}

void specinfer_add_norm(int32_t type, void* x, const void* y, const Norm* norm, void* out, const int64_t* chosen,
                        int64_t rows, int64_t size, int32_t in_place) {
  const Claim claim;
  const Timed timed(Stage::kNorm);
  add_norm(static_cast<Type>(type), x, y, *norm, out, chosen, rows, size, in_place != 0);
}

void specinfer_gate(int32_t type, int32_t activation, const void* gate_up, void* out, int64_t rows, int64_t size) {
  const Claim claim;
  const Timed timed(Stage::kGate);
  gate(static_cast<Type>(type), static_cast<Activation>(activation), gate_up, out, rows, size);
}

void specinfer_predict_streams(int32_t type, const Streams* streams, const void* x, const float* routed,
                               const float* coefficients, void* out, void* active, int64_t rows) {
  const Claim claim;
  const Timed timed(Stage::kNorm);
  predict_streams(static_cast<Type>(type), *streams, x, routed, coefficients, out, active, rows);
}

void specinfer_correct_streams(int32_t type, const Streams* streams, void* x, const float* routed,
                               const float* coefficients, const void* before, const void* behind, int64_t rows) {
  const Claim claim;
  const Timed timed(Stage::kNorm);
  correct_streams(static_cast<Type>(type), *streams, x, routed, coefficients, before, behind, rows);
}

void specinfer_cut_off(int32_t type, void* gates, int64_t stride, float deviations, int64_t rows, int64_t size) {
  const Claim claim;
  const Timed timed(Stage::kGate);
  cut_off(static_cast<Type>(type), gates, stride, deviations, rows, size);
}

void specinfer_choose_experts(const float* logits, int64_t stride, int64_t rows, int64_t count, int64_t each,
                              int32_t normalized, const Scores* scores, int64_t* chosen, float* weights) {
  const Claim claim;
  const Timed timed(Stage::kGate);
  choose_experts(logits, stride, rows, count, each, normalized != 0, *scores, chosen, weights);
}

void specinfer_open_gates(const float* logits, int64_t stride, int64_t rows, float* open) {
  const Claim claim;
  const Timed timed(Stage::kGate);
  open_gates(logits, stride, rows, open);
}

void specinfer_add_weighted(int32_t type, float* total, const void* made, const int64_t* rows, const float* weights,
                            int64_t count, int64_t size) {
  const Claim claim;
  const Timed timed(Stage::kGate);
  add_weighted(static_cast<Type>(type), total, made, rows, weights, count, size);
}

void specinfer_activate(int32_t type, int32_t activation, const void* x, void* out, int64_t rows, int64_t size) {
  const Claim claim;
  const Timed timed(Stage::kGate);
  activate(static_cast<Type>(type), static_cast<Activation>(activation), x, out, rows, size);
}

int32_t specinfer_embed(int32_t type, const void* table, int64_t entries, const int64_t* ids, float scale, void* out,
                        int64_t rows, int64_t size) {
  const Claim claim;
  const Timed timed(Stage::kEmbed);
  return embed(static_cast<Type>(type), table, entries, ids, scale, out, rows, size) ? 1 : 0;
}

int32_t specinfer_fault_of_paths(const Paths* paths, int64_t num_slots) { return fault_of(*paths, num_slots); }

void specinfer_rope_and_store(int32_t type, const Heads* heads, const Paths* paths, const void* qkv,
                              const float* cos, const float* sin, const LayerCache* cache, void* q) {
  const Claim claim;
  const Timed timed(Stage::kRope);
  rope_and_store(static_cast<Type>(type), *heads, *paths, qkv, cos, sin, *cache, q);
}

void specinfer_tree_attention(int32_t type, const Heads* heads, const Paths* paths, const void* q,
                              const LayerCache* cache, void* out) {
  const Claim claim;
  const Timed timed(Stage::kAttention);
  tree_attention(static_cast<Type>(type), *heads, *paths, q, *cache, out);
}

int32_t specinfer_fault_of_states(const States* states, int64_t rows) { return fault_of(*states, rows); }

void specinfer_recur(const Recurrence* block, int32_t type, const void* made, const float* gates, const States* states,
                     int64_t rows, void* out) {
  const Claim claim;
  const Timed timed(Stage::kRecurrence);
  recur(*block, static_cast<Type>(type), made, gates, *states, rows, out);
}

// Its two steps.
void specinfer_recur_alone(const Recurrence* block, int32_t type, const void* made, const float* gates,
                           const States* states, int64_t rows, float* values, float* squares, void* out) {
  const Claim claim;
  const Timed timed(Stage::kRecurrence);
  recur_alone(*block, static_cast<Type>(type), made, gates, *states, rows, values, squares, out);
}

void specinfer_norm_values(const Recurrence* block, int32_t type, const void* made, const float* values,
                           const float* squares, int64_t rows, void* out) {
  const Claim claim;
  const Timed timed(Stage::kRecurrence);
  norm_values(*block, static_cast<Type>(type), made, values, squares, rows, out);
}

// Multiplies values by the sigmoids of their gates.
void specinfer_open_values(int32_t type, const void* gates, int64_t stride, void* values, int64_t rows, int64_t size) {
  const Claim claim;
  const Timed timed(Stage::kGate);
  open_values(static_cast<Type>(type), gates, stride, values, rows, size);
}

int32_t specinfer_decode(const Decoder* decoder, const DecoderRows* rows, const Paths* paths, const LayerCache* caches,
                         const Taps* taps, void* read, void* logits) {
  const Claim claim;
  return static_cast<int32_t>(run_decoder(*decoder, *rows, *paths, caches, *taps, read, logits));
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
                          const int64_t* rows, int64_t count, const RowSampling* sampling, const int64_t* changed,
                          const Terms* terms, const int64_t* ends, int64_t* ids) {
  const Claim claim;
  const LogitBlock block{logits, block_rows, size, stride, static_cast<Type>(type)};
  return choices(block, {rows, count}, sampling, {changed, terms, ends}, ids);
}

int32_t specinfer_step_blocks(const BlockHead* head, const BlockStep* step, const Caches* caches, void* last,
                              void* read, void* logits) {
  const Claim claim;
  return step_blocks(*head, *step, *caches, last, read, logits) ? 1 : 0;
}

int32_t specinfer_grow_trees(const Guesser* guesser, int32_t type, const void* logits, int64_t rows, int64_t size,
                             const TreeRequest* requests, int64_t count, const GrownTrees* to) {
  const Claim claim;
  const LogitBlock block{logits, rows, size, size, static_cast<Type>(type)};
  return grow_trees(*guesser, block, requests, count, *to) ? 1 : 0;
}

// An index of texts, see text_index.h; null if no length is valid.
void* specinfer_index_new(const int64_t* lengths, int64_t count, int64_t longest_segment, const uint64_t* secret) {
  return TextIndex::make(lengths, count, longest_segment, secret);
}

void specinfer_index_free(void* index) { delete static_cast<TextIndex*>(index); }

int32_t specinfer_index_extend(void* index, const int32_t* tokens, int64_t count) {
  return static_cast<TextIndex*>(index)->extend(tokens, count) ? 1 : 0;
}

int32_t specinfer_index_close(void* index) { return static_cast<TextIndex*>(index)->close_text() ? 1 : 0; }

int64_t specinfer_index_drop_oldest(void* index) { return static_cast<TextIndex*>(index)->drop_oldest_text(); }

// Its first live position, the start of the newest text, its end; closed texts, bytes.
void specinfer_index_figures(const void* index, int64_t* out) {
  const auto& texts = *static_cast<const TextIndex*>(index);
  const int64_t figures[] = {texts.base(), texts.text_start(), texts.end(), texts.num_texts(), texts.num_bytes()};
  std::copy(std::begin(figures), std::end(figures), out);
}

int64_t specinfer_index_bytes_with(const void* index, int64_t count) {
  return static_cast<const TextIndex*>(index)->bytes_with(count);
}

// The tokens from a position on, at most `count`; returns the number of tokens.
int64_t specinfer_index_tokens(const void* index, int64_t position, int64_t count, int32_t* out) {
  const auto& texts = *static_cast<const TextIndex*>(index);
  if (position < texts.base() || position > texts.end() || count < 0) return 0;
  const int64_t there = std::min(count, texts.end() - position);
  std::copy_n(texts.at(position), there, out);
  return there;
}

int32_t specinfer_lookup_trees(const LookupRules* rules, const LookupRequest* requests, int64_t count,
                               const int32_t* tokens, int64_t num_tokens, const LookedUp* to) {
  return lookup_trees(*rules, requests, count, tokens, num_tokens, *to) ? 1 : 0;
}

// A rank's end of the shared memory, see exchange.h.
int64_t specinfer_exchange_bytes(int32_t ranks, int64_t slot) { return Exchange::bytes(ranks, slot); }

void* specinfer_exchange_new(void* memory, int32_t ranks, int32_t rank, int64_t slot) {
  return new Exchange(memory, ranks, rank, slot);
}

void specinfer_exchange_free(void* exchange) { delete static_cast<Exchange*>(exchange); }

void specinfer_exchange_set_limit(void* exchange, double seconds) {
  static_cast<Exchange*>(exchange)->set_limit(seconds);
}

int32_t specinfer_exchange_largest(void* exchange, float* numbers, int64_t count) {
  return static_cast<Exchange*>(exchange)->largest(numbers, count) ? 1 : 0;
}

int32_t specinfer_exchange_add(void* exchange, int32_t* numbers, int64_t count) {
  return static_cast<Exchange*>(exchange)->add(numbers, count) ? 1 : 0;
}

int32_t specinfer_exchange_gather(void* exchange, const void* own, const int64_t* bytes, void* into) {
  return static_cast<Exchange*>(exchange)->gather(own, bytes, into) ? 1 : 0;
}

// Why a rank is lost, 0 if none is, and which one.
int32_t specinfer_exchange_loss(const void* exchange, int32_t* rank) {
  const auto& one = *static_cast<const Exchange*>(exchange);
  *rank = one.lost();
  return static_cast<int32_t>(one.loss());
}

void specinfer_exchange_figures(const void* exchange, Exchange::Figures* out) {
  *out = static_cast<const Exchange*>(exchange)->figures;
}

// Bytes per second at which all threads read `bytes` of memory once.
double specinfer_stream(const void* from, int64_t bytes) {
  const Claim claim;
  return stream(from, bytes);
}

// Starts or ends a profile; returns and resets the nanoseconds of each stage.
void specinfer_profile(int32_t on, int64_t* nanoseconds) {
  const Claim claim;
  Profile& profile = Profile::get();
  std::copy(std::begin(profile.nanoseconds), std::end(profile.nanoseconds), nanoseconds);
  std::fill(std::begin(profile.nanoseconds), std::end(profile.nanoseconds), 0);
  profile.on = on != 0;
}

}  // extern "C"
#pragma GCC visibility pop
