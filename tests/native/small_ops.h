// Norms, activations and embeddings.

#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "numbers.h"

namespace proof {

template <typename T>
void prove_norms(const Library& library, bool centred, Chance& chance) {
  constexpr float kEps = 0.5f;
  for (const int64_t size : {70, 96, 1000}) {
    for (const bool added : {false, true}) {
      const std::string name = std::string(centred ? "LayerNorm of " : "RMSNorm of ") + std::to_string(size) + " " +
                               kName<T> + ": ";
      constexpr int64_t rows = 9;
      const auto x = chance.normals<T>(rows * size, 2), y = chance.normals<T>(rows * size);
      const auto weight = chance.normals<T>(size), bias = chance.normals<T>(size);
      const Norm by{weight.data(), centred && added ? bias.data() : nullptr, kEps, centred ? 1 : 0};
      const auto norm = [&](std::vector<T> given, const std::vector<int64_t>& chosen, bool in_place,
                            std::vector<T>& left) {
        std::vector<T> out(chosen.size() * size);
        library.add_norm(kType<T>, given.data(), added ? y.data() : nullptr, &by, out.data(), chosen.data(),
                         chosen.size(), size, in_place ? 1 : 0);
        left = given;
        return out;
      };
      std::vector<int64_t> all(rows);
      std::iota(all.begin(), all.end(), 0);
      std::vector<T> sums, left;
      const auto whole = norm(x, all, true, sums);
      std::vector<double> want;
      bool summed = true;
      for (int64_t r = 0; r < rows; ++r) {
        double squares = 0, mean = 0;
        for (int64_t i = r * size; i < (r + 1) * size; ++i) {
          const T sum = added ? narrow<T>(widen(x[i]) + widen(y[i])) : x[i];
          summed = summed && same(&sum, &sums[i], 1);
          if (centred) mean += static_cast<double>(widen(sum)) / size;
        }
        for (int64_t i = r * size; i < (r + 1) * size; ++i) squares += (widen(sums[i]) - mean) * (widen(sums[i]) - mean);
        for (int64_t i = 0; i < size; ++i) {
          const double normed = (widen(sums[r * size + i]) - mean) / std::sqrt(squares / size + kEps);
          want.push_back(normed * widen(weight[i]) + (by.bias == nullptr ? 0 : widen(bias[i])));
        }
        const auto alone = norm(x, {r}, false, left);
        check(same(alone.data(), whole.data() + r * size, size), name + "a row is not what it is among all");
        check(same(left.data(), x.data(), rows * size), name + "what was to stay is written to");
      }
      check(summed, name + "sums differ");
      check(near(whole, want), name + "results are off");
    }
  }
}

inline double act(Activation by, double x) {
  if (by == Activation::kSilu) return x / (1 + std::exp(-x));
  if (by == Activation::kRelu) return x > 0 ? x : 0;
  if (by == Activation::kRelu2) return x > 0 ? x * x : 0;
  if (by == Activation::kGelu) return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
  if (by == Activation::kClampedSwish) {
    const double clamped = std::min(x, 7.0);
    return clamped / (1 + std::exp(-1.702 * clamped));
  }
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

inline double beside(Activation by, double up) {
  return by == Activation::kClampedSwish ? std::clamp(up, -7.0, 7.0) + 1 : up;
}

template <typename T>
void prove_activations(const Library& library, Chance& chance) {
  for (const int64_t size : {70, 5000}) {
    for (int number = 0; number < 2 * static_cast<int>(Activation::kActivations); ++number) {
      const bool gated = number % 2 != 0;
      const auto by = static_cast<Activation>(number / 2);
      const std::string name = std::string(gated ? "gate " : "activation ") + std::to_string(number / 2) + " of " +
                               std::to_string(size) + " " + kName<T>;
      constexpr int64_t rows = 3;
      const int64_t width = gated ? 2 * size : size;
      const auto given = chance.normals<T>(rows * width, 3);
      std::vector<T> whole(rows * size), alone(size);
      const auto compute = gated ? library.gate : library.activate;
      compute(kType<T>, number / 2, given.data(), whole.data(), rows, size);
      std::vector<double> want;
      for (int64_t r = 0; r < rows; ++r) {
        const T* const from = given.data() + r * width;
        for (int64_t i = 0; i < size; ++i) {
          want.push_back(act(by, widen(from[i])) * (gated ? beside(by, widen(from[size + i])) : 1));
        }
        compute(kType<T>, number / 2, from, alone.data(), 1, size);
        check(same(alone.data(), whole.data() + r * size, size), name + ": a row is not what it is among all");
      }
      check(near(whole, want), name + ": results are off");
    }
  }
}

template <typename T>
void prove_embeddings(const Library& library, Chance& chance) {
  constexpr int64_t entries = 50, size = 70;
  const auto table = chance.normals<T>(entries * size);
  const std::vector<int64_t> ids{3, 49, 0, 3};
  for (const float scale : {1.0f, 2.7f}) {
    std::vector<T> out(ids.size() * size);
    const auto embed = [&](const std::vector<int64_t>& some) {
      return library.embed(kType<T>, table.data(), entries, some.data(), scale, out.data(), some.size(), size);
    };
    check(embed(ids) != 0 && embed({3, -1}) == 0 && embed({50}) == 0, "ids a table lacks are not refused");
    bool right = true;
    for (size_t i = 0; i < out.size(); ++i) {
      const T want = narrow<T>(widen(table[ids[i / size] * size + i % size]) * scale);
      right = right && same(&want, &out[i], 1);
    }
    check(right, std::string("embeddings in ") + kName<T> + " differ");
  }
}

}  // namespace proof
