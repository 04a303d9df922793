// Attention along paths, and the preparation of heads.

#pragma once

#include <numeric>
#include <string>
#include <vector>

#include "numbers.h"

namespace proof {

// The paths of the rows of some requests; the rows are at the last positions of their request.
struct Requests {
  int32_t block_size = 1;
  std::vector<int32_t> tables, shared, tail_ends{0}, tails;
  std::vector<Request> requests;

  void begin(const std::vector<int32_t>& table, int64_t positions) {
    const auto first = static_cast<int32_t>(shared.size());
    requests.push_back({first, first, static_cast<int32_t>(tables.size()), static_cast<int32_t>(positions)});
    tables.insert(tables.end(), table.begin(), table.end());
  }

  void row(int32_t together, const std::vector<int32_t>& tail = {}) {
    shared.push_back(together);
    tails.insert(tails.end(), tail.begin(), tail.end());
    tail_ends.push_back(static_cast<int32_t>(tails.size()));
    ++requests.back().end;
  }

  int64_t rows() const { return static_cast<int64_t>(shared.size()); }

  const Request& of(int64_t row) const {
    size_t n = 0;
    while (requests[n].end <= row) ++n;
    return requests[n];
  }

  int32_t slot(const Request& request, int64_t position) const {
    return tables[request.table + position / block_size] * block_size + static_cast<int32_t>(position % block_size);
  }

  std::vector<int32_t> tail(int64_t row) const {
    return {tails.begin() + tail_ends[row], tails.begin() + tail_ends[row + 1]};
  }

  // The slots on the path of a row.
  std::vector<int32_t> path(int64_t row) const {
    std::vector<int32_t> path;
    for (int32_t i = 0; i < shared[row]; ++i) path.push_back(slot(of(row), i));
    for (const int32_t position : tail(row)) path.push_back(slot(of(row), position));
    return path;
  }

  Paths paths() const {
    const auto size = [](const auto& some) { return static_cast<int64_t>(some.size()); };
    return {tables.data(), requests.data(), shared.data(), tail_ends.data(), tails.data(),
            size(tables),  size(requests),  rows(),        size(tails),      block_size};
  }
};

constexpr int64_t kSlots = 512;

// The last rows of a prompt, a tree of nine nodes after 130 positions, one of three after 61, and a single row.
inline Requests some_requests(int32_t block_size, Chance& chance) {
  std::vector<int32_t> blocks(kSlots / block_size);
  std::iota(blocks.begin(), blocks.end(), 0);
  for (size_t i = blocks.size(); i > 1; --i) std::swap(blocks[i - 1], blocks[chance.integer(0, static_cast<int>(i))]);
  Requests all;
  all.block_size = block_size;
  const auto begin = [&](int64_t positions) {
    const int64_t n = (positions + block_size - 1) / block_size;
    all.begin({blocks.end() - n, blocks.end()}, positions);
    blocks.resize(blocks.size() - n);
  };
  begin(75);
  for (int i = 60; i <= 75; ++i) all.row(i);
  begin(139);
  all.row(131);
  all.row(131, {131});
  all.row(131, {132});
  all.row(131, {131, 133});
  all.row(131, {131, 134});
  all.row(131, {132, 135});
  all.row(131, {131, 133, 136});
  all.row(131, {131, 133, 136, 137});
  all.row(131, {131, 134, 138});
  begin(64);
  all.row(62);
  all.row(62, {62});
  all.row(62, {63});
  begin(70);
  all.row(70);
  return all;
}

template <typename T>
void prove_attention(const Library& library, int64_t head, int64_t window, int32_t block_size, bool plain, bool int8,
                     Chance& chance) {
  constexpr int64_t kHeads = 6, kKvHeads = 2;
  const std::string name = std::string("attention of heads of ") + std::to_string(head) + " " + kName<T> +
                           ", window " + std::to_string(window) + ", blocks of " + std::to_string(block_size) +
                           (plain ? "" : ", with a cap, biases and sinks") + (int8 ? ", of int8: " : ": ");
  const Requests all = some_requests(block_size, chance);
  Heads heads{};
  heads.heads = kHeads;
  heads.kv_heads = kKvHeads;
  heads.head = head;
  heads.scale = 1 / std::sqrt(static_cast<float>(head));
  heads.window = window;
  const auto sinks = chance.normals<T>(kHeads);
  std::vector<float> slopes;
  for (int64_t h = 0; h < kHeads; ++h) slopes.push_back(0.125f / static_cast<float>(h + 1));
  if (!plain) {
    heads.softcap = 2.0f;
    heads.slopes = slopes.data();
    heads.sinks = sinks.data();
  }
  const int64_t width = kHeads * head, stride = kKvHeads * head;
  const auto q = chance.normals<T>(all.rows() * width, 2);
  std::vector<T> k = chance.normals<T>(kSlots * stride), v = chance.normals<T>(kSlots * stride);
  std::vector<int8_t> bytes[2];
  std::vector<BFloat16> scales[2];
  const auto to_int8 = [&](std::vector<T>& rows, int n) {  // with powers of two, so that `rows` have the same numbers
    for (size_t i = 0; i < rows.size(); ++i) {
      const float scale = i / head % 3 == 0 ? 0.0625f : 0.03125f;
      bytes[n].push_back(static_cast<int8_t>(std::clamp(std::round(widen(rows[i]) / scale), -127.0f, 127.0f)));
      rows[i] = narrow<T>(bytes[n].back() * scale);
      if (i % head == 0) scales[n].push_back(narrow<BFloat16>(scale));
    }
  };
  LayerCache cache{k.data(), v.data(), nullptr, nullptr};
  if (int8) {
    to_int8(k, 0);
    to_int8(v, 1);
    cache = {bytes[0].data(), bytes[1].data(), scales[0].data(), scales[1].data()};
  }
  const auto attend = [&](const Requests& some, const T* queries) {
    std::vector<T> out(some.rows() * width);
    const Paths paths = some.paths();
    check(library.fault_of_paths(&paths, kSlots) == 0, name + "paths are refused");
    check(library.fault_of_paths(&paths, 0) != 0, name + "paths out of the cache are not refused");
    library.tree_attention(kType<T>, &heads, &paths, queries, &cache, out.data());
    return out;
  };
  const auto whole = attend(all, q.data());
  std::vector<double> want;
  for (int64_t r = 0; r < all.rows(); ++r) {
    const auto path = all.path(r);
    const size_t first = window > 0 && static_cast<int64_t>(path.size()) > window ? path.size() - window : 0;
    for (int64_t h = 0; h < kHeads; ++h) {
      std::vector<double> weights, sums(head);
      double total = plain ? 0 : std::exp(static_cast<double>(widen(sinks[h])));
      for (size_t i = first; i < path.size(); ++i) {
        double score = 0;
        for (int64_t e = 0; e < head; ++e) {
          score += static_cast<double>(widen(q[(r * kHeads + h) * head + e])) *
                   widen(k[path[i] * stride + h / (kHeads / kKvHeads) * head + e]);
        }
        score *= heads.scale;
        const double distance = static_cast<double>(path.size() - 1 - i);
        if (!plain) score = heads.softcap * std::tanh(score / heads.softcap) - slopes[h] * distance;
        weights.push_back(std::exp(score));
        total += weights.back();
      }
      for (size_t i = first; i < path.size(); ++i) {
        for (int64_t e = 0; e < head; ++e) {
          sums[e] += weights[i - first] / total * widen(v[path[i] * stride + h / (kHeads / kKvHeads) * head + e]);
        }
      }
      want.insert(want.end(), sums.begin(), sums.end());
    }
    // The row by itself: as a node of a tree, and as text in blocks of one position.
    Requests node, text;
    node.block_size = block_size;
    const Request& request = all.of(r);
    const int32_t positions = all.tail(r).empty() ? all.shared[r] : all.tail(r).back() + 1;
    const auto table = all.tables.begin() + request.table;
    node.begin({table, table + (positions + block_size - 1) / block_size}, positions);
    node.row(all.shared[r], all.tail(r));
    text.begin(path, path.size());
    text.row(static_cast<int32_t>(path.size()));
    for (const Requests& alone : {node, text}) {
      const auto row = attend(alone, q.data() + r * width);
      check(same(row.data(), whole.data() + r * width, width),
            name + "row " + std::to_string(r) + (&alone == &node ? "" : " alone") + " is not what it is among all");
    }
  }
  check(near(whole, want, int8 ? std::max(1e-3, double{kNear<T>}) : kNear<T>), name + "results are off");
}

template <typename T>
void prove_rope(const Library& library, int64_t head, bool normed, bool whole, Chance& chance) {
  constexpr int64_t kHeads = 4, kKvHeads = 2, width = kHeads + 2 * kKvHeads;
  const std::string name = std::string("rope of heads of ") + std::to_string(head) + " " + kName<T> + ": ";
  const Requests all = some_requests(normed ? 5 : 16, chance);
  const Paths paths = all.paths();
  const int64_t rows = all.rows(), half = head / 2;
  const auto qkv = chance.normals<T>(rows * width * head), weight = chance.normals<T>(kHeads * head);
  Heads heads{};
  heads.heads = kHeads;
  heads.kv_heads = kKvHeads;
  heads.head = head;
  heads.eps = 0.5f;
  heads.q_norm = heads.k_norm = normed ? weight.data() : nullptr;
  heads.whole_norms = whole ? 1 : 0;
  std::vector<float> cos, sin;
  for (int64_t i = 0; i < rows * half; ++i) {
    const double angle = chance.uniform(0, 6);
    cos.push_back(static_cast<float>(std::cos(angle)));
    sin.push_back(static_cast<float>(std::sin(angle)));
  }
  std::vector<T> k(kSlots * kKvHeads * head), v(k.size()), q(rows * kHeads * head), got;
  const LayerCache cache{k.data(), v.data(), nullptr, nullptr};
  library.rope_and_store(kType<T>, &heads, &paths, qkv.data(), cos.data(), sin.data(), &cache, q.data());
  std::vector<double> want;
  bool copied = true;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t h = 0; h < width; ++h) {
      const T* const x = qkv.data() + (r * width + h) * head;
      const int64_t slot = all.path(r).back() * kKvHeads * head;
      if (h >= kHeads + kKvHeads) {
        copied = copied && same(x, v.data() + slot + (h - kHeads - kKvHeads) * head, head);
        continue;
      }
      const T* const to = h < kHeads ? q.data() + (r * kHeads + h) * head : k.data() + slot + (h - kHeads) * head;
      got.insert(got.end(), to, to + head);
      const int64_t place = h < kHeads ? h : h - kHeads, count = h < kHeads ? kHeads : kKvHeads;
      const T* const normed_from = whole ? x - place * head : x;
      const int64_t elements = whole ? count * head : head;
      double squares = 0;
      for (int64_t i = 0; i < elements; ++i) {
        squares += static_cast<double>(widen(normed_from[i])) * widen(normed_from[i]);
      }
      const double scale = 1 / std::sqrt(squares / elements + heads.eps);
      const T* const by = weight.data() + (whole ? place * head : 0);
      const auto at = [&](int64_t i) { return normed ? widen(x[i]) * scale * widen(by[i]) : widen(x[i]); };
      for (int64_t i = 0; i < half; ++i) want.push_back(at(i) * cos[r * half + i] - at(half + i) * sin[r * half + i]);
      for (int64_t i = 0; i < half; ++i) want.push_back(at(half + i) * cos[r * half + i] + at(i) * sin[r * half + i]);
    }
  }
  check(copied, name + "values differ");
  check(near(got, want), name + "results are off");
}

}  // namespace proof
