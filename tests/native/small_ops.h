// What lies between products: norms, gates and embeddings.

#pragma once

#include <numeric>
#include <string>
#include <vector>

#include "numbers.h"

namespace proof {

template <typename T>
void prove_norms(const Library& library, Chance& chance) {
  constexpr float kEps = 0.5f;
  for (const int64_t size : {70, 96, 1000}) {
    for (const bool added : {false, true}) {
      const std::string name = std::string("norm of ") + std::to_string(size) + " " + kName<T> + ": ";
      constexpr int64_t rows = 9;
      const auto x = chance.normals<T>(rows * size, 2), y = chance.normals<T>(rows * size);
      const auto weight = chance.normals<T>(size);
      const auto norm = [&](std::vector<T> given, const std::vector<int64_t>& chosen, bool in_place,
                            std::vector<T>& left) {
        std::vector<T> out(chosen.size() * size);
        library.add_rms_norm(kType<T>, given.data(), added ? y.data() : nullptr, weight.data(), out.data(),
                             chosen.data(), chosen.size(), size, kEps, in_place ? 1 : 0);
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
        double squares = 0;
        for (int64_t i = r * size; i < (r + 1) * size; ++i) {
          const T sum = added ? narrow<T>(widen(x[i]) + widen(y[i])) : x[i];
          summed = summed && same(&sum, &sums[i], 1);
          squares += static_cast<double>(widen(sum)) * widen(sum);
        }
        for (int64_t i = 0; i < size; ++i) {
          want.push_back(widen(sums[r * size + i]) / std::sqrt(squares / size + kEps) * widen(weight[i]));
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

template <typename T>
void prove_gates(const Library& library, Chance& chance) {
  for (const int64_t size : {70, 5000}) {
    for (const int gelu : {0, 1}) {
      const std::string name = std::string(gelu ? "gelu" : "silu") + " of " + std::to_string(size) + " " + kName<T>;
      constexpr int64_t rows = 3;
      const auto both = chance.normals<T>(rows * 2 * size, 3);
      std::vector<T> whole(rows * size), alone(size);
      library.gate(kType<T>, gelu, both.data(), whole.data(), rows, size);
      std::vector<double> want;
      for (int64_t r = 0; r < rows; ++r) {
        const T* const from = both.data() + r * 2 * size;
        for (int64_t i = 0; i < size; ++i) {
          const double x = widen(from[i]), u = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
          want.push_back((gelu ? 0.5 * x * (1 + std::tanh(u)) : x / (1 + std::exp(-x))) * widen(from[size + i]));
        }
        library.gate(kType<T>, gelu, from, alone.data(), 1, size);
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
