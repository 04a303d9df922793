// A token reads m = S'k and r = S'q in one sweep over S, [K, 16], which also applies the visit before it, if that is its
// parent. A leaf of a tree writes nothing. Threads divide heads and blocks of values.

#include "state_walk.h"

#include <atomic>

#include "scratch.h"

namespace specinfer {
namespace {

constexpr int64_t kRow = kLanes;      // floats of a key element's values
constexpr int kSums = 4;              // partial sums: of key elements 0, 4, ...; 1, 5, ...
constexpr int64_t kPieceFloats = 1 << 14;  // of a state and its visits, minimum work of a job
constexpr int64_t kPieces = 8;  // of a thread

// A token, for one head and block.
struct Token {
  const float *k, *q, *v;
  float decay, beta_dt, kq, skip;
  float* out;  // null: not wanted
};

// The change of S by a token: S = decay S + k d.
struct Change {
  const float* k;
  float decay;
  Floats d;
};

Floats::Part part_of(float x) { return Floats(x).part[0]; }

// Applies `change` to S on the way from `from` to `to`, if it is wanted, and returns the token's own d. Also writes the
// token's output, if `Out`. Every sum has the same order, whatever else is done.
template <bool Delta, bool Out, bool Applies>
Floats sweep(int64_t keys, const float* from, float* to, const Change& change, const Token& token) {
  Floats m = 0.0f, r = 0.0f;
  if constexpr (Delta || Out || Applies) {
    const float *const k = token.k, *const q = token.q, *const before = change.k;
    for (int p = 0; p < kParts; ++p) {  // few enough registers for all sums
      Floats::Part ms[kSums] = {}, rs[kSums] = {};
      const Floats::Part decay = part_of(change.decay), d = change.d.part[p];
      const auto row = [&](int64_t i, auto n) __attribute__((always_inline)) {
        const int64_t at = i * kRow + p * kPartLanes;
        Floats::Part s;
        std::memcpy(&s, from + at, sizeof s);
        if constexpr (Applies) {
          s = fma_part(part_of(before[i]), d, s * decay);
          std::memcpy(to + at, &s, sizeof s);
        }
        if constexpr (Delta) ms[n] = fma_part(s, part_of(k[i]), ms[n]);
        if constexpr (Out) rs[n] = fma_part(s, part_of(q[i]), rs[n]);
      };
      int64_t i = 0;
      for (; i + kSums <= keys; i += kSums) each<kSums>([&](auto n) { row(i + n, n); });
      each<kSums - 1>([&](auto n) {
        if (i + n < keys) row(i + n, n);
      });
      m.part[p] = (ms[0] + ms[1]) + (ms[2] + ms[3]);
      r.part[p] = (rs[0] + rs[1]) + (rs[2] + rs[3]);
    }
  }
  const Floats v = load(token.v), d = Delta ? (v - m * token.decay) * token.beta_dt : v * token.beta_dt;
  if constexpr (Out) {
    store(token.out, fma(v, token.skip, fma(d, token.kq, r * token.decay)));
  }
  return d;
}

template <bool Applies>
Floats sweep(bool delta, int64_t keys, const float* from, float* to, const Change& change, const Token& token) {
  if (token.out != nullptr) {
    return delta ? sweep<true, true, Applies>(keys, from, to, change, token)
                 : sweep<false, true, Applies>(keys, from, to, change, token);
  }
  return delta ? sweep<true, false, Applies>(keys, from, to, change, token)
               : sweep<false, false, Applies>(keys, from, to, change, token);
}

void apply(int64_t keys, const float* from, float* to, const Change& change) {
  const Floats decay = change.decay;
  for (int64_t i = 0; i < keys; ++i) {
    store(to + i * kRow, fma(change.k[i], change.d, load(from + i * kRow) * decay));
  }
}

// The walk of one head's blocks.
class Walk {
 public:
  // stack: a block for each level of the deepest walk, and one.
  Walk(const Recurrence& block, const States& states, const Tokens& tokens, const float* zeros, float* stack)
      : block_(block), states_(states), tokens_(tokens), zeros_(zeros), stack_(stack), size_(block.key_size * kRow) {}

  // 16 values of a request's head; `number` counts these blocks.
  void run(int64_t request, int64_t number) const {
    const StateRequest& its = states_.requests[request];
    const bool delta = block_.delta();
    float* const own = of_slot(its.slot, number);
    const float* now = its.source < 0 ? zeros_ : of_slot(its.source, number);
    if (its.chain == 0 && its.source != its.slot) std::copy_n(now, size_, own);
    Change change{};  // of the visit before, if `to` says where it is still to be written
    float* to = nullptr;
    const auto written = [&](int64_t visits) {
      if (visits <= its.chain) save(request, visits, number, to);
      now = to;
      to = nullptr;
    };
    for (int64_t n = 0; n < its.visits; ++n) {
      const Visit& visit = states_.visits[its.first + n];
      const Token token = of_visit(its.first + n, number);
      Floats d;
      if (to != nullptr) {  // which this visit follows
        d = sweep<true>(delta, block_.key_size, now, to, change, token);
        written(n);
      } else {
        if (n >= its.chain) now = visit.depth == 1 ? own : stack_ + (visit.depth - 1) * size_;
        d = sweep<false>(delta, block_.key_size, now, nullptr, {}, token);
      }
      if (n >= its.chain && visit.inner == 0) continue;
      change = {token.k, token.decay, d};
      to = n == its.chain - 1 ? own : stack_ + visit.depth * size_;
    }
    if (to == nullptr) return;
    apply(block_.key_size, now, to, change);
    written(its.visits);
  }

 private:
  float* of_slot(int64_t slot, int64_t number) const {
    return states_.states + (block_.layer * states_.slots + slot) * states_.state_floats + number * size_;
  }

  Token of_visit(int64_t visit, int64_t number) const {
    const int64_t keys = block_.key_size, groups = block_.groups, first = number * kLanes;  // value
    const int64_t head = first / block_.value_size, group = block_.group_of(head);
    const float* const mixed = tokens_.mixed + visit * block_.channels;
    const float *const one = mixed + group * keys, *const other = one + groups * keys;
    const int64_t row = states_.visits[visit].row, at = visit * block_.heads + head;
    const float kq = tokens_.kq[visit * groups + group];
    Token token = {one, other, mixed + first, tokens_.decays[at], tokens_.beta_dt[at], kq};
    if (block_.delta()) {
      std::swap(token.k, token.q);
      token.v += 2 * groups * keys;
    } else {
      token.k += block_.values();
      token.q += block_.values();
    }
    token.skip = block_.skip == nullptr ? 0.0f : block_.skip[head];
    token.out = row < 0 ? nullptr : tokens_.values + row * block_.values() + first;
    return token;
  }

  // Copies a block to the slots that keep the state after that many visits.
  void save(int64_t request, int64_t visits, int64_t number, const float* from) const {
    for (int64_t s = 0; s < states_.num_saves; ++s) {
      const StateSave& save = states_.saves[s];
      if (save.request == request && save.visits == visits) std::copy_n(from, size_, of_slot(save.slot, number));
    }
  }

  const Recurrence& block_;
  const States& states_;
  const Tokens& tokens_;
  const float* zeros_;
  float* stack_;
  int64_t size_;
};

}  // namespace

void walk_states(const Recurrence& block, const States& states, const Tokens& tokens) {
  const Scratch::Mark mark;
  Pool& pool = Pool::get();
  const int64_t size = block.key_size * kRow, blocks = block.values() / kLanes, all = blocks * states.num_requests;
  int64_t deepest = 0;
  for (int64_t n = 0; n < states.num_visits; ++n) {
    if (states.visits[n].inner != 0) deepest = std::max<int64_t>(deepest, states.visits[n].depth);
  }
  const int64_t work = size * (1 + states.num_visits / states.num_requests);  // of a block
  const int64_t pieces = std::min<int64_t>(pool.threads(), pool.ranges(all, kPieceFloats / work + 1));
  // Blocks that a piece takes at once; the last ones even out the threads' speeds.
  const int64_t step = std::max<int64_t>(1, std::min(blocks / kPieces, all / (kPieces * pieces)));
  float* const zeros = Scratch::get().take<float>(size);
  std::fill_n(zeros, size, 0.0f);
  float* const stacks = Scratch::get().take<float>(pieces * (deepest + 1) * size);
  std::atomic<int64_t> next{0};
  pool.run(pieces, [&](int64_t piece) {
    const Walk walk(block, states, tokens, zeros, stacks + piece * (deepest + 1) * size);
    for (int64_t first; (first = next.fetch_add(step)) < all;) {
      for (int64_t n = first; n < std::min(all, first + step); ++n) walk.run(n / blocks, n % blocks);
    }
  });
}

}  // namespace specinfer
