#include "experts.h"

#include <cmath>
#include <limits>

#include "profile.h"
#include "scratch.h"

namespace specinfer {
namespace {

constexpr int64_t kPieceElements = 1 << 11;  // minimum work of a job

// Calls f(row) for all rows of `size` elements.
template <typename F>
void each_row(int64_t rows, int64_t size, const F& f) {
  Pool::get().split(rows, kPieceElements / size + 1, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) f(r);
  });
}

float sigmoid_of(float x) { return 1.0f / (1.0f + std::exp(-x)); }

void choose(const float* logits, int64_t count, int64_t each, bool normalized, const Scores& scores, int64_t* chosen,
            float* weights) {
  if (!std::all_of(logits, logits + count, [](float logit) { return std::isfinite(logit); })) {
    for (int64_t n = 0; n < each; ++n) {
      chosen[n] = n;
      weights[n] = std::numeric_limits<float>::quiet_NaN();
    }
    return;
  }
  const Scratch::Mark mark;
  const float* values = logits;  // the largest win
  if (scores.sigmoid != 0) {
    auto* const made = Scratch::get().take<float>(count);
    for (int64_t e = 0; e < count; ++e) {
      made[e] = sigmoid_of(logits[e]) + (scores.bias == nullptr ? 0.0f : scores.bias[e]);
    }
    values = made;
  }
  const auto before = [&](int64_t a, int64_t b) {
    return values[a] > values[b] || (values[a] == values[b] && a < b);
  };
  int64_t found = 0;  // number of chosen experts, best first
  for (int64_t e = 0; e < count; ++e) {
    if (found == each && !before(e, chosen[each - 1])) continue;
    int64_t at = found < each ? found++ : each - 1;
    for (; at > 0 && before(e, chosen[at - 1]); --at) chosen[at] = chosen[at - 1];
    chosen[at] = e;
  }
  const float largest = logits[chosen[0]];
  std::sort(chosen, chosen + each);
  float sum = 0.0f;
  if (scores.sigmoid != 0) {
    for (int64_t n = 0; n < each; ++n) sum += weights[n] = sigmoid_of(logits[chosen[n]]);
    const float divisor = normalized ? sum + scores.epsilon : 1.0f;
    for (int64_t n = 0; n < each; ++n) weights[n] = weights[n] / divisor * scores.scale;
    return;
  }
  for (int64_t n = 0; n < each; ++n) sum += weights[n] = std::exp(logits[chosen[n]] - largest);
  if (!normalized) {
    sum = 0.0f;
    for (int64_t e = 0; e < count; ++e) sum += std::exp(logits[e] - largest);
  }
  for (int64_t n = 0; n < each; ++n) weights[n] /= sum;
}

// Rows by expert, ascending: those of expert e are rows[begins[e]] up to rows[begins[e + 1]].
struct Routes {
  const int64_t *rows, *begins;
  const float* weights;  // of the expert, for each row

  Routes(const Experts& experts, const float* logits, int64_t count) {
    Scratch& scratch = Scratch::get();
    const int64_t each = experts.per_token, all = count * each;
    auto* const chosen = scratch.take<int64_t>(all);
    auto* const own = scratch.take<float>(all);
    choose_experts(logits, experts.router.channels, count, experts.count, each, experts.normalized != 0,
                   experts.scores, chosen, own);
    auto* const ends = scratch.take<int64_t>(experts.count + 2);  // from 1 on: next free place of each expert
    std::fill_n(ends, experts.count + 2, 0);
    for (int64_t p = 0; p < all; ++p) ++ends[chosen[p] + 2];
    for (int64_t e = 0; e < experts.count; ++e) ends[e + 2] += ends[e + 1];
    auto* const sorted = scratch.take<int64_t>(all);
    auto* const beside = scratch.take<float>(all);
    for (int64_t p = 0; p < all; ++p) {
      const int64_t to = ends[chosen[p] + 1]++;
      sorted[to] = p / each;
      beside[to] = own[p];
    }
    rows = sorted;
    begins = ends;
    weights = beside;
  }
};

}  // namespace

void choose_experts(const float* logits, int64_t stride, int64_t rows, int64_t count, int64_t each, bool normalized,
                    const Scores& scores, int64_t* chosen, float* weights) {
  each_row(rows, count, [&](int64_t r) {
    choose(logits + r * stride, count, each, normalized, scores, chosen + r * each, weights + r * each);
  });
}

void open_gates(const float* logits, int64_t stride, int64_t rows, float* open) {
  for (int64_t r = 0; r < rows; ++r) open[r] = 1.0f / (1.0f + std::exp(-logits[r * stride]));
}

void add_weighted(Type type, float* total, const void* made, const int64_t* rows, const float* weights, int64_t count,
                  int64_t size) {
  by_type(type, [&](auto element) {
    const auto* const results = static_cast<const decltype(element)*>(made);
    each_row(count, size, [&](int64_t n) {
      float* const to = total + (rows == nullptr ? n : rows[n]) * size;
      const auto* const from = results + n * size;
      for (int64_t i = 0; i < size; i += kLanes) {
        store(to + i, fma(load(from + i, size - i), Floats(weights[n]), load(to + i, size - i)), size - i);
      }
    });
  });
}

void run_experts(const Experts& experts, Type type, Activation activation, const void* x, int64_t rows, void* y) {
  const Scratch::Mark mark;
  Scratch& scratch = Scratch::get();
  const int64_t size = experts.router.inner, stride = experts.router.channels, bytes = type == Type::kBFloat16 ? 2 : 4;
  auto* const logits = scratch.take<float>(rows * stride);
  {
    const Timed timed(Stage::kProduct);
    multiply(experts.router, {widened_rows(type, x, rows, size), Type::kFloat32, rows}, logits);
  }
  const auto routes = [&] {
    const Timed timed(Stage::kGate);
    return Routes(experts, logits, rows);
  }();
  int64_t most = experts.shared != 0 ? rows : 0, wide = experts.gate_up[0].channels, narrow = experts.down[0].inner;
  for (int64_t e = 0; e < experts.count; ++e) most = std::max(most, routes.begins[e + 1] - routes.begins[e]);
  if (experts.shared != 0) {
    wide = std::max(wide, experts.shared_gate_up.channels);
    narrow = std::max(narrow, experts.shared_down.inner);
  }
  const auto buffer = [&](int64_t width) { return scratch.take<char>(most * width * bytes); };
  char *const own = buffer(size), *const gate_up = buffer(wide), *const inner = buffer(narrow), *const made = buffer(size);
  auto* const total = scratch.take<float>(rows * size);
  std::fill_n(total, rows * size, 0.0f);

  const auto run = [&](const Product& first, const Product& last, const void* from, int64_t count) {
    {
      const Timed timed(Stage::kProduct);
      multiply(first, {from, type, count}, gate_up);
    }
    {
      const Timed timed(Stage::kGate);
      (experts.gated != 0 ? gate : activate)(type, activation, gate_up, inner, count, last.inner);
    }
    const Timed timed(Stage::kProduct);
    multiply(last, {inner, type, count}, made);
    return !lost(last);
  };
  for (int64_t e = 0; e < experts.count; ++e) {
    const int64_t* const its = routes.rows + routes.begins[e];
    const int64_t count = routes.begins[e + 1] - routes.begins[e];
    if (count == 0) continue;
    {
      const Timed timed(Stage::kGate);
      each_row(count, size, [&](int64_t n) {
        std::copy_n(static_cast<const char*>(x) + its[n] * size * bytes, size * bytes, own + n * size * bytes);
      });
    }
    if (!run(experts.gate_up[e], experts.down[e], own, count)) return;
    const Timed timed(Stage::kGate);
    add_weighted(type, total, made, its, routes.weights + routes.begins[e], count, size);
  }
  if (experts.shared != 0) {
    if (!run(experts.shared_gate_up, experts.shared_down, x, rows)) return;
    const Timed timed(Stage::kGate);
    auto* const open = scratch.take<float>(rows);
    if (experts.shared_gated != 0) {
      open_gates(logits + experts.count, stride, rows, open);
    } else {
      std::fill_n(open, rows, 1.0f);
    }
    add_weighted(type, total, made, nullptr, open, rows, size);
  }
  const Timed timed(Stage::kGate);
  by_type(type, [&](auto element) {
    auto* const to = static_cast<decltype(element)*>(y);
    each_row(rows, size, [&](int64_t r) {
      for (int64_t i = r * size, end = i + size; i < end; i += kLanes) store(to + i, load(total + i, end - i), end - i);
    });
  });
}

}  // namespace specinfer
