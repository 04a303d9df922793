#include "recurrence.h"

#include <algorithm>
#include <cmath>

#include "exchange.h"
#include "scratch.h"
#include "state_walk.h"

namespace specinfer {
namespace {

constexpr int64_t kPieceElements = 1 << 11;  // minimum work of a job
constexpr int64_t kPart = 512;               // channels of a short convolution that are computed together
constexpr float kSmallest = 1e-6f;           // added to the squares of a query or key
constexpr float kLinear = 20.0f;             // from there on softplus(x) is x

Floats sigmoid(Floats x) { return Floats(1.0f) / (exp(Floats(0.0f) - x) + 1.0f); }
Floats silu(Floats x) { return x / (exp(Floats(0.0f) - x) + 1.0f); }

using Whole = std::integral_constant<int64_t, kLanes>;

// The first n lanes.
template <typename T, typename Count>
[[gnu::always_inline]] inline Floats take(const T* from, Count n) {
  if constexpr (std::is_same_v<Count, Whole>) return load(from);
  return load(from, n);
}

// Compilers would otherwise call these loops' loads and powers, through memory, in functions as large as a pass.
#define SPECINFER_LOOP [[gnu::flatten, gnu::noinline]]

SPECINFER_LOOP void scale_all(float* x, float factor, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store(x + i, load(x + i, n - i) * factor, n - i);
}

SPECINFER_LOOP float dot(const float* x, const float* y, int64_t n) {
  Floats products = 0.0f;
  for (int64_t i = 0; i < n; i += kLanes) products = fma(load(x + i, n - i), load(y + i, n - i), products);
  return sum(products);
}

float inverse_root(float x) { return 1.0f / std::sqrt(x); }

// Applies a gate that is before the norm to a row's values, and gives the squares of each head's.
template <typename T>
SPECINFER_LOOP void square(const Recurrence& block, float* values, const T* row, float* squares) {
  const int64_t size = block.value_size;
  if (block.norm == GateNorm::kNone) return;
  if (block.norm == GateNorm::kBehind) {
    for (int64_t i = 0; i < block.values(); i += kLanes) store(values + i, load(values + i) * silu(load(row + i)));
  }
  for (int64_t h = 0; h < block.heads; ++h) squares[h] = dot(values + h * size, values + h * size, size);
}

// A row's values with their norm, of the squares of all heads, and a gate behind it.
template <typename T>
SPECINFER_LOOP void finish(const Recurrence& block, const float* values, const float* squares, const T* row, T* out) {
  const int64_t size = block.value_size, each = block.normed_heads() / block.norm_groups;
  Floats scale = 1.0f;
  for (int64_t h = 0; h < block.heads; ++h) {
    const int64_t first = h * size, at = block.first_head + h;
    const float* const weight =
        block.norm == GateNorm::kNone ? nullptr : block.norm_weight + first % block.norm_weights - first;
    if (weight != nullptr && (h == 0 || at % each == 0)) {
      float sum = 0.0f;
      for (int64_t n = at / each * each; n < at / each * each + each; ++n) sum += squares[n];
      scale = inverse_root(sum / static_cast<float>(each * size) + block.norm_eps);
    }
    for (int64_t i = first; i < first + size; i += kLanes) {
      Floats y = load(values + i);
      if (weight != nullptr) y = y * scale * load(weight + i);
      if (block.norm != GateNorm::kBehind) y = y * silu(load(row + i));
      store(out + i, y);
    }
  }
}

template <typename T>
class Pass {
 public:
  // Values and squares: as of recur_alone.
  Pass(const Recurrence& block, const T* made, const float* gates, const States& states, int64_t rows, float* values,
       float* squares, T* out)
      : block_(block), made_(made), gates_(gates), states_(states), rows_(rows), results_(values),
        squares_(squares), out_(out), width_(block.width()), channels_(block.channels), values_(block.values()),
        taps_(block.taps) {
    requests_ = Scratch::get().take<int32_t>(states.num_visits);
    for (int64_t r = 0; r < states.num_requests; ++r) {
      const StateRequest& its = states.requests[r];
      std::fill_n(requests_ + its.first, its.visits, static_cast<int32_t>(r));
    }
  }

  void run() {
    block_.short_conv() ? run_short_conv() : run_recurrence();
    // Every ring row and input of the state has been read, also for tails.
    const auto kept = [](const Visit& visit) { return visit.row >= 0 && visit.place >= 0; };
    if (std::none_of(states_.visits, states_.visits + states_.num_visits, kept)) return;
    const int64_t least = kPieceElements / (channels_ + block_.num_gates()) + 1;
    Pool::get().split(states_.num_visits, least, [&](int64_t first, int64_t end) {
      for (int64_t n = first; n < end; ++n) {
        if (kept(states_.visits[n])) keep_inputs(n);
      }
    });
  }

 private:
  // ---- inputs ----

  const T* row_of(const Visit& visit) const { return made_ + visit.row * width_; }

  float* ring_row(int64_t visit) const {
    const int64_t slot = states_.requests[requests_[visit]].slot, place = states_.visits[visit].place;
    const int64_t row = (block_.layer * states_.ring_slots + slot) * states_.nodes + place;
    return states_.rings + row * states_.input_floats;
  }

  float* tail_of(int64_t slot) const {
    return states_.states + (block_.layer * states_.slots + slot) * states_.state_floats + block_.matrix_floats();
  }

  // A token's inputs of the convolution: those of a row, what is kept of them, or zeros.
  struct Input {
    const T *row, *factor;
    const float* kept;

    // Calls f(i, x) with channels c + 16 i on, i = 0 .. N - 1, each the first n of 16.
    template <int N, typename Count, typename F>
    [[gnu::always_inline]] void each_of(int64_t c, Count n, const F& f) const {
      const auto numbered = [&](const auto& input) { each<N>([&](auto i) { f(i, input(c + i * kLanes)); }); };
      if (row == nullptr) {
        kept == nullptr ? numbered([](int64_t) { return Floats(0.0f); })
                        : numbered([&](int64_t at) { return take(kept + at, n); });
      } else if (factor != nullptr) {
        numbered([&](int64_t at) { return take(factor + at, n) * take(row + at, n); });
      } else {
        numbered([&](int64_t at) { return take(row + at, n); });
      }
    }
  };

  Input input_of(const Visit& visit) const {
    const T* const row = row_of(visit);
    if (block_.short_conv()) return {row + 2 * channels_, row, nullptr};
    return {row + values_, nullptr, nullptr};
  }

  // Of a request's visit, or below 0 of its state: -1 is the newest one.
  Input input_of(const StateRequest& request, int64_t visit) const {
    const float* kept = nullptr;
    if (visit < 0 && request.source >= 0) kept = tail_of(request.source) + (taps_ - 1 + visit) * channels_;
    if (visit >= 0) {
      const Visit& its = states_.visits[request.first + visit];
      if (its.row >= 0) return input_of(its);
      kept = ring_row(request.first + visit);
    }
    return {nullptr, nullptr, kept};
  }

  // A visit's gates, as they come.
  float gate(int64_t visit, int64_t n) const {
    const Visit& its = states_.visits[visit];
    if (its.row < 0) return ring_row(visit)[channels_ + n];
    if (block_.delta()) return gates_[its.row * block_.num_gates() + n];
    return load(row_of(its) + values_ + channels_ + n, 1)[0];
  }

  // Calls f(c, n, x) with the convolution of the first n of 16 channels from c on, over first .. end - 1, at a visit.
  template <typename F>
  SPECINFER_LOOP void convolve(int64_t visit, int64_t first, int64_t end, const F& f) const {
    const StateRequest& request = states_.requests[requests_[visit]];
    Input inputs[kMostTaps];
    int64_t at = visit - request.first;
    for (int64_t tap = taps_ - 1; tap >= 0; --tap) {
      inputs[tap] = input_of(request, at);
      at = at < 0 ? at - 1 : states_.visits[request.first + at].parent;
    }
    constexpr int kMany = 4;
    int64_t c = first;
    for (; c + kMany * kLanes <= end; c += kMany * kLanes) {
      convolve_some<kMany>(inputs, c, Whole{}, f);
    }
    for (; c < end; c += kLanes) convolve_some<1>(inputs, c, end - c, f);
  }

  template <int N, typename Count, typename F>
  [[gnu::always_inline]] void convolve_some(const Input* inputs, int64_t c, Count n, const F& f) const {
    Floats sums[N];
    const float* const bias = block_.conv_bias;
    each<N>([&](auto i) { sums[i] = bias == nullptr ? Floats(0.0f) : take(bias + c + i * kLanes, n); });
    for (int64_t tap = 0; tap < taps_; ++tap) {
      const float* const weights = block_.conv + tap * channels_ + c;
      inputs[tap].template each_of<N>(
          c, n, [&](auto i, Floats x) { sums[i] = fma(x, take(weights + i * kLanes, n), sums[i]); });
    }
    each<N>([&](auto i) { f(c + i * kLanes, n, sums[i]); });
  }

  // ---- short convolutions ----

  void run_short_conv() {
    const int64_t parts = (channels_ + kPart - 1) / kPart, all = states_.num_visits * parts;
    Pool::get().split(all, kPieceElements / std::min(channels_, kPart) + 1, [&](int64_t begin, int64_t last) {
      for (int64_t n = begin; n < last; ++n) {
        const int64_t visit = n / parts, first = n % parts * kPart, end = std::min(channels_, first + kPart);
        const Visit& its = states_.visits[visit];
        if (its.row < 0) continue;
        const T* const gates = row_of(its) + channels_;
        T* const to = out_ + its.row * channels_;
        convolve(visit, first, end, [=](int64_t c, auto n, Floats x) { store(to + c, x * take(gates + c, n), n); });
      }
    });
    Pool::get().split(states_.num_requests, kPieceElements / channels_ + 1, [&](int64_t first, int64_t end) {
      for (int64_t r = first; r < end; ++r) keep_tails(r);
    });
  }

  // ---- linear recurrences ----

  void run_recurrence() {
    Scratch& scratch = Scratch::get();
    const int64_t visits = states_.num_visits, groups = block_.groups;
    auto* const mixed = scratch.take<float>(visits * channels_ + kLanes);
    auto* const decays = scratch.take<float>(visits * block_.heads);
    auto* const beta_dt = scratch.take<float>(visits * block_.heads);
    auto* const kq = scratch.take<float>(visits * groups);
    Pool::get().split(visits * groups, kPieceElements * groups / channels_ + 1, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const int64_t visit = n / groups, group = n % groups;
        kq[n] = mix(visit, group, mixed + visit * channels_);
        open(visit, group, decays + visit * block_.heads, beta_dt + visit * block_.heads);
      }
    });
    walk_states(block_, states_, {mixed, decays, beta_dt, kq, results_});
    const int64_t heads = block_.normed_heads();
    const bool alone = block_.whole_heads == 0;
    if (!alone) std::fill_n(squares_, rows_ * heads, 0.0f);
    Pool::get().split(rows_ + states_.num_requests, kPieceElements / values_ + 1, [&](int64_t first, int64_t end) {
      for (int64_t n = first; n < end; ++n) {
        if (n >= rows_) {
          keep_tails(n - rows_);
          continue;
        }
        float *const values = results_ + n * values_, *const squares = squares_ + n * heads;
        square(block_, values, made_ + n * width_, squares + block_.first_head);
        if (alone) finish(block_, values, squares, made_ + n * width_, out_ + n * values_);
      }
    });
  }

  // The convolved inputs of a group at a visit, and its k.q.
  float mix(int64_t visit, int64_t group, float* to) const {
    const int64_t keys = block_.key_size, size = block_.value_size, all = block_.groups * keys;
    const int64_t first = block_.delta() ? 0 : values_;  // of the keys and queries
    const auto convolved = [&](int64_t at, int64_t size) {
      convolve(visit, at, at + size, [=](int64_t c, auto n, Floats x) { store(to + c, silu(x), n); });
      return to + at;
    };
    for (int64_t n = 0; n < block_.heads / block_.groups; ++n) {
      convolved((block_.delta() ? 2 * all : 0) + block_.head_of(group, n) * size, size);
    }
    float* const one = convolved(first + group * keys, keys);
    float* const other = convolved(first + all + group * keys, keys);
    if (block_.delta()) {  // q and k
      const float by_q = inverse_root(dot(one, one, keys) + kSmallest);
      const float by_k = inverse_root(dot(other, other, keys) + kSmallest);
      scale_all(one, by_q * inverse_root(static_cast<float>(keys)), keys);
      scale_all(other, by_k, keys);
    }
    return dot(one, other, keys);
  }

  // The gates of a group's heads at a visit.
  void open(int64_t visit, int64_t group, float* decays, float* beta_dt) const {
    for (int64_t n = 0; n < block_.heads / block_.groups; ++n) {
      const int64_t h = block_.head_of(group, n);
      const float x = gate(visit, block_.delta() ? block_.heads + h : h) + block_.dt_bias[h];
      float dt = x > kLinear ? x : std::log1p(std::exp(x));
      if (block_.delta()) {
        beta_dt[h] = 1.0f / (1.0f + std::exp(-gate(visit, h)));
      } else {
        dt = dt < block_.min_dt ? block_.min_dt : dt > block_.max_dt ? block_.max_dt : dt;  // keeps NaN
        beta_dt[h] = dt;
      }
      decays[h] = std::exp(dt * block_.decay[h]);
    }
  }

  // ---- what is kept ----

  SPECINFER_LOOP void keep_all(const Input& input, float* to) const {
    for (int64_t c = 0; c < channels_; c += kLanes) {
      input.template each_of<1>(c, channels_ - c, [&](auto, Floats x) { store(to + c, x, channels_ - c); });
    }
  }

  // Writes the inputs of a node's row to the ring.
  void keep_inputs(int64_t visit) const {
    const Visit& its = states_.visits[visit];
    float* const to = ring_row(visit);
    keep_all(input_of(its), to);
    for (int64_t n = 0; n < block_.num_gates(); ++n) to[channels_ + n] = gate(visit, n);
  }

  // Writes the last inputs of a request's chain to its saves and its own slot, which may be the one it is read from.
  void keep_tails(int64_t number) const {
    const StateRequest& request = states_.requests[number];
    const auto keep = [&](int64_t visits, int64_t slot) {
      for (int64_t t = 0; t < taps_ - 1; ++t) {
        keep_all(input_of(request, visits - (taps_ - 1) + t), tail_of(slot) + t * channels_);
      }
    };
    for (int64_t s = 0; s < states_.num_saves; ++s) {
      const StateSave& save = states_.saves[s];
      if (save.request == number) keep(save.visits, save.slot);
    }
    if (request.chain > 0 || request.source != request.slot) keep(request.chain, request.slot);
  }

  static constexpr int64_t kMostTaps = 16;

  const Recurrence& block_;
  const T* made_;
  const float* gates_;
  const States& states_;
  const int64_t rows_;
  float *const results_, *const squares_;
  T* const out_;
  const int64_t width_, channels_, values_, taps_;
  int32_t* requests_;  // of each visit
};

}  // namespace

void recur_alone(const Recurrence& block, Type type, const void* made, const float* gates, const States& states,
                 int64_t rows, float* values, float* squares, void* out) {
  const Scratch::Mark mark;
  by_type(type, [&](auto element) {
    using T = decltype(element);
    Pass<T>(block, static_cast<const T*>(made), gates, states, rows, values, squares, static_cast<T*>(out)).run();
  });
}

void norm_values(const Recurrence& block, Type type, const void* made, const float* values, const float* squares,
                 int64_t rows, void* out) {
  const int64_t size = block.values(), heads = block.normed_heads(), width = block.width();
  by_type(type, [&](auto element) {
    using T = decltype(element);
    Pool::get().split(rows, kPieceElements / size + 1, [&](int64_t first, int64_t end) {
      for (int64_t n = first; n < end; ++n) {
        finish(block, values + n * size, squares + n * heads, static_cast<const T*>(made) + n * width,
               static_cast<T*>(out) + n * size);
      }
    });
  });
}

void recur(const Recurrence& block, Type type, const void* made, const float* gates, const States& states, int64_t rows,
           void* out) {
  const Scratch::Mark mark;
  auto* const values = Scratch::get().take<float>(rows * block.values());
  auto* const squares = Scratch::get().take<float>(rows * block.normed_heads());
  recur_alone(block, type, made, gates, states, rows, values, squares, out);
  if (block.whole_heads == 0) return;
  // Others have zeros in the place of a square, so its bits are those of the rank that has it.
  if (block.last.exchange->add(reinterpret_cast<int32_t*>(squares), rows * block.whole_heads)) {
    norm_values(block, type, made, values, squares, rows, out);
  }
}

}  // namespace specinfer
