// Attention of rows that each follow a path of cache slots: text, then the row's ancestors, then itself.
//
//   slots     [S]           the cache slots of each request's positions, one request after another
//   requests  [R, 4]        its first row, its rows, where its slots begin, how many they are
//   shared    [T]           a row's path: the first `shared` of its request's slots,
//   tails     ragged [T]    then these of them
//
// The keys of a path are read in blocks of 64 counted from its start. A score is one sum over the head, in
// order; a block's weights are one sum over its keys, in order; blocks follow one another. So a row's result is
// a function of its own path, whatever rows are computed with it. What rows share is the packing: a block is
// laid out for the product once for all rows whose paths agree there.
//
// Both products are the same loop, C[q-row, column] += A[q-row, step] * B[step, column], where a step is a
// 32-bit word: one float, or two bfloat16.
//
//   scores   A = queries,  step = word of the head,  B = keys transposed,  column = key
//   values   A = weights,  step = keys of a word,    B = values,           column = element of the head

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "ops.h"
#include "vector.h"

namespace {

using namespace specinfer;

constexpr int kBlock = 64;                 // keys
constexpr int kColumns = kBlock / kLanes;  // vectors of scores
constexpr int kMaxRows = 6;                // with 4 vectors of sums each, 24 of 32 registers
constexpr int kTile = 96;                  // query rows that share packed blocks: their sums stay in the L2 cache
constexpr double kThreadWork = 1 << 15;    // multiplications worth another thread, which a product has left waiting
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

struct Free {
  void operator()(void* p) const { ::operator delete(p, std::align_val_t(64)); }
};

// Uninitialised and aligned to cache lines.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t size)
      : data_(static_cast<T*>(::operator new(size * sizeof(T), std::align_val_t(64)))) {}
  T* get() const { return data_.get(); }

 private:
  std::unique_ptr<T, Free> data_;
};

// f(0), ..., f(N - 1), with numbers the compiler knows from the start.
template <int N, typename F>
[[gnu::always_inline]] inline void each(F f) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (f(std::integral_constant<int, I>{}), ...);
  }(std::make_integer_sequence<int, N>{});
}

// ---- the product ----

template <typename T>
Floats multiply(uint32_t a, Words b, Floats sum);

template <>
inline Floats multiply<float>(uint32_t a, Words b, Floats sum) {
  return fma(broadcast(std::bit_cast<float>(a)), std::bit_cast<Floats>(b), sum);
}

template <>
inline Floats multiply<BFloat16>(uint32_t a, Words b, Floats sum) {
#if defined(__AVX512BF16__)
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
#else
  sum = fma(broadcast(std::bit_cast<float>(a << 16)), std::bit_cast<Floats>(b << 16), sum);
  return fma(broadcast(std::bit_cast<float>(a & 0xffff0000u)), std::bit_cast<Floats>(b & 0xffff0000u), sum);
#endif
}

// One block of registers: C[R, N vectors] += A[R, steps] * B[steps, N vectors]; strides in elements. Unrolled by
// hand, so to speak: sums whose indices are known only late would be kept in memory.
template <typename T, int R, int N>
void product_tile(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, float* c,
                  int64_t c_stride, int64_t steps) {
  Floats sums[R][N];
  each<R>([&](auto r) { each<N>([&](auto n) { sums[r][n] = load(c + r * c_stride + n * kLanes); }); });
  for (int64_t s = 0; s < steps; ++s) {
    Words words[N];
    each<N>([&](auto n) { std::memcpy(&words[n], b + s * b_stride + n * kLanes, sizeof(Words)); });
    each<R>([&](auto r) {
      const uint32_t word = a[r * a_stride + s];
      each<N>([&](auto n) { sums[r][n] = multiply<T>(word, words[n], sums[r][n]); });
    });
  }
  each<R>([&](auto r) { each<N>([&](auto n) { store(c + r * c_stride + n * kLanes, sums[r][n]); }); });
}

template <typename T, int R>
void product_rows(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, float* c,
                  int64_t c_stride, int64_t steps, int64_t columns) {
  for (int64_t n = 0; n < columns; n += kBlock) {
    switch (std::min<int64_t>(kColumns, (columns - n) / kLanes)) {
      case 4: product_tile<T, R, 4>(a, a_stride, b + n, b_stride, c + n, c_stride, steps); break;
      case 3: product_tile<T, R, 3>(a, a_stride, b + n, b_stride, c + n, c_stride, steps); break;
      case 2: product_tile<T, R, 2>(a, a_stride, b + n, b_stride, c + n, c_stride, steps); break;
      default: product_tile<T, R, 1>(a, a_stride, b + n, b_stride, c + n, c_stride, steps);
    }
  }
}

// C += A * B for up to kMaxRows rows; `columns` is a multiple of kLanes.
template <typename T>
void product(int rows, const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, float* c,
             int64_t c_stride, int64_t steps, int64_t columns) {
  switch (rows) {
    case 1: return product_rows<T, 1>(a, a_stride, b, b_stride, c, c_stride, steps, columns);
    case 2: return product_rows<T, 2>(a, a_stride, b, b_stride, c, c_stride, steps, columns);
    case 3: return product_rows<T, 3>(a, a_stride, b, b_stride, c, c_stride, steps, columns);
    case 4: return product_rows<T, 4>(a, a_stride, b, b_stride, c, c_stride, steps, columns);
    case 5: return product_rows<T, 5>(a, a_stride, b, b_stride, c, c_stride, steps, columns);
    default: return product_rows<T, 6>(a, a_stride, b, b_stride, c, c_stride, steps, columns);
  }
}

// ---- packing ----

// Of the rows i and i + D, the lanes with bit D of one change places with those without it of the other: after
// D = 1, 2, 4, 8 rows are columns.
template <int D, size_t... I>
[[gnu::always_inline]] inline void exchange(Words (&v)[kLanes], std::index_sequence<I...>) {
  each<kLanes / 2>([&](auto n) {
    constexpr int i = n / D * 2 * D + n % D;
    const Words a = v[i], b = v[i + D];
    v[i] = specinfer::shuffle<(I & D ? kLanes + I - D : I)...>(a, b);
    v[i + D] = specinfer::shuffle<(I & D ? kLanes + I : I + D)...>(a, b);
  });
}

[[gnu::always_inline]] inline void transpose(Words (&v)[kLanes]) {
  constexpr auto lanes = std::make_index_sequence<kLanes>{};
  exchange<1>(v, lanes);
  exchange<2>(v, lanes);
  exchange<4>(v, lanes);
  exchange<8>(v, lanes);
}

struct Shape {
  int64_t heads, kv_heads, group, head;
  int64_t steps;    // words of a query or key head
  int64_t padded;   // elements of a value head, whole vectors
  int64_t stride;   // elements from a slot to the next
};

// A block of keys and values as the products read them.
template <typename T>
class Packed {
 public:
  static constexpr int kPerWord = sizeof(uint32_t) / sizeof(T);

  explicit Packed(const Shape& shape)
      : shape_(shape), keys_(round_up(shape.steps, kLanes) * kBlock), values_(kBlock / kPerWord * shape.padded) {}

  const uint32_t* keys() const { return keys_.get(); }
  const uint32_t* values() const { return values_.get(); }

  // Lay out `count` keys; those before `from` lie here already.
  void pack(const T* k, const T* v, const int32_t* slots, int64_t from, int64_t count) {
    for (int64_t first = from / kLanes * kLanes; first < count; first += kLanes) {
      pack_keys(k, slots + first, std::min<int64_t>(kLanes, count - first), first);
    }
    for (int64_t key = from / kPerWord * kPerWord; key < count; key += kPerWord) {
      const T* const one = v + slots[key] * shape_.stride;
      const T* const other = key + 1 < count ? v + slots[key + 1] * shape_.stride : nullptr;
      pack_values(one, other, values_.get() + key / kPerWord * shape_.padded);
    }
  }

 private:
  void pack_keys(const T* k, const int32_t* slots, int64_t count, int64_t column) {
    const T* rows[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) rows[i] = k + slots[std::min(i, count - 1)] * shape_.stride;
    for (int64_t step = 0; step < shape_.steps; step += kLanes) {
      const int64_t bytes = std::min<int64_t>(kLanes, shape_.steps - step) * sizeof(uint32_t);
      Words v[kLanes] = {};
      if (bytes == sizeof(Words)) {
        each<kLanes>([&](auto i) { std::memcpy(&v[i], rows[i] + step * kPerWord, sizeof(Words)); });
      } else {
        each<kLanes>([&](auto i) { std::memcpy(&v[i], rows[i] + step * kPerWord, bytes); });
      }
      transpose(v);
      uint32_t* const to = keys_.get() + step * kBlock + column;
      each<kLanes>([&](auto i) { std::memcpy(to + i * kBlock, &v[i], sizeof(Words)); });
    }
  }

  void pack_values(const T* one, const T* other, uint32_t* to) const {
    for (int64_t i = 0; i < shape_.head; i += kLanes) {
      const Words low = std::bit_cast<Words>(load(one + i, shape_.head - i));
      if constexpr (kPerWord == 1) {
        std::memcpy(to + i, &low, sizeof low);
      } else {
        const Words high =
            other == nullptr ? Words{} : std::bit_cast<Words>(load(other + i, shape_.head - i));
        const Words both = (low >> 16) | high;
        std::memcpy(to + i, &both, sizeof both);
      }
    }
  }

  Shape shape_;
  Buffer<uint32_t> keys_, values_;
};

// ---- the batch ----

// The rows' paths, as the op is given them.
struct Paths {
  const int32_t *slots, *shared, *tail_ends, *tails;

  int64_t tail(int64_t row) const { return tail_ends[row + 1] - tail_ends[row]; }
  int64_t length(int64_t row) const { return shared[row] + tail(row); }

  bool alike(int64_t a, int64_t b) const {
    return tail(a) == 0 ? tail(b) == 0 : tail(b) > 0 && shared[a] == shared[b];
  }

  // The slots of keys first..last of a row's path.
  void read(const int32_t* list, int64_t row, int64_t first, int64_t last, int32_t* to) const {
    const int32_t* const own = tails + tail_ends[row] - shared[row];
    for (int64_t i = first; i < last; ++i) *to++ = list[i < shared[row] ? i : own[i]];
  }
};

// What one thread does at a time: some rows of one request, for one key-value head. None of them has a tail, or
// all have, behind as many shared slots.
struct Task {
  int64_t first, last, list, kv_head;
  double work;
};

// ---- attention ----

template <typename T>
class Worker {
 public:
  Worker(const Shape& shape, const Paths& paths, const T* q, const T* k, const T* v, T* out, float scale,
         int64_t window)
      : shape_(shape),
        paths_(paths),
        q_(q),
        k_(k),
        v_(v),
        out_(out),
        scale_(scale),
        window_(window),
        packed_(shape),
        queries_(kTile * shape.steps),
        sums_(kTile * shape.padded),
        scores_(kMaxRows * kBlock),
        weights_(kMaxRows * kBlock) {}

  void run(const Task& task) {
    start(task);
    const int64_t group = shape_.group, rows = task.last - task.first;
    const int32_t* const list = paths_.slots + task.list;
    int64_t begin = std::numeric_limits<int64_t>::max(), end = 0;
    for (int64_t row = task.first; row < task.last; ++row) {
      begin = std::min(begin, seen_from(row));
      end = std::max(end, paths_.length(row));
    }
    // Up to here the paths are one: those without tails are beginnings of the same list.
    const int64_t agreed = paths_.tail(task.first) == 0 ? end : paths_.shared[task.first];
    const T* const k = k_ + task.kv_head * shape_.head;
    const T* const v = v_ + task.kv_head * shape_.head;
    int32_t slots[kBlock];
    const int64_t first = begin / kBlock * kBlock;
    fetch(k, v, list + first, std::min(first + kBlock, agreed) - first);
    for (int64_t block = first; block < end; block += kBlock) {
      fetch(k, v, list + block + kBlock, std::min(block + 2 * kBlock, agreed) - block - kBlock);
      if (block + kBlock <= agreed || agreed == end) {
        const int64_t count = std::min<int64_t>(kBlock, end - block);
        packed_.pack(k, v, list + block, 0, count);
        attend(task, 0, rows * group, block, count);
        continue;
      }
      int64_t there = 0;  // keys of this block that are packed and the same for every row
      for (int64_t row = task.first; row < task.last; ++row) {
        const int64_t count = std::min<int64_t>(kBlock, paths_.length(row) - block);
        if (count <= 0) continue;
        paths_.read(list, row, block, block + count, slots);
        packed_.pack(k, v, slots, there, count);
        there = std::max<int64_t>(0, agreed - block);
        attend(task, (row - task.first) * group, (row - task.first + 1) * group, block, count);
      }
    }
    finish(task);
  }

 private:
  // Ask for keys and values that are packed next: in a pass the products before have swept the caches.
  void fetch(const T* k, const T* v, const int32_t* slots, int64_t count) const {
    constexpr int64_t line = 64 / sizeof(T);
    for (int64_t n = 0; n < count; ++n) {
      const int64_t at = slots[n] * shape_.stride;
      for (int64_t i = 0; i < shape_.head; i += line) {
        __builtin_prefetch(k + at + i);
        __builtin_prefetch(v + at + i);
      }
    }
  }

  int64_t seen_from(int64_t row) const {
    return window_ > 0 ? std::max<int64_t>(0, paths_.length(row) - window_) : 0;
  }

  // The task's query rows as words, heads of a row one after another; nothing summed yet.
  void start(const Task& task) {
    const int64_t group = shape_.group, count = (task.last - task.first) * group;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t head = (task.first + i / group) * shape_.heads + task.kv_head * group + i % group;
      std::memcpy(queries_.get() + i * shape_.steps, q_ + head * shape_.head, shape_.head * sizeof(T));
      highest_[i] = kMinusInfinity;
      total_[i] = 0.0f;
    }
    std::fill_n(sums_.get(), count * shape_.padded, 0.0f);
  }

  // Query rows first..last see the packed block of `count` keys, which begins at `block` in their paths.
  void attend(const Task& task, int64_t first, int64_t last, int64_t block, int64_t count) {
    const int64_t columns = round_up(count, kLanes);
    for (int64_t i = first; i < last; i += kMaxRows) {
      const int rows = static_cast<int>(std::min<int64_t>(kMaxRows, last - i));
      if (!any_sees(task, i, i + rows - 1, block)) continue;
      std::fill_n(scores_.get(), rows * kBlock, 0.0f);
      product<T>(rows, queries_.get() + i * shape_.steps, shape_.steps, packed_.keys(), kBlock, scores_.get(),
                 kBlock, shape_.steps, columns);
      for (int r = 0; r < rows; ++r) {
        const int64_t row = task.first + (i + r) / shape_.group;
        weigh(i + r, r, seen_from(row) - block, paths_.length(row) - block, columns / kLanes);
      }
      product<T>(rows, reinterpret_cast<const uint32_t*>(weights_.get()), kBlock / Packed<T>::kPerWord,
                 packed_.values(), shape_.padded, sums_.get() + i * shape_.padded, shape_.padded,
                 (count + Packed<T>::kPerWord - 1) / Packed<T>::kPerWord, shape_.padded);
    }
  }

  bool any_sees(const Task& task, int64_t i, int64_t last, int64_t block) const {
    for (; i <= last; ++i) {
      const int64_t row = task.first + i / shape_.group;
      if (seen_from(row) < block + kBlock && paths_.length(row) > block) return true;
    }
    return false;
  }

  // Scores -> weights of keys from..to of the block; what was summed before is scaled to the new highest score.
  void weigh(int64_t i, int r, int64_t from, int64_t to, int64_t vectors) {
    float* const scores = scores_.get() + r * kBlock;
    T* const weights = weights_.get() + r * kBlock;
    if (from >= kBlock || to <= 0) {
      std::memset(weights, 0, kBlock * sizeof(T));  // they are read as words
      return;
    }
    using Ints = int32_t __attribute__((vector_size(64)));
    const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Ints low = Ints{} + static_cast<int32_t>(std::max<int64_t>(from, 0));
    const Ints high = Ints{} + static_cast<int32_t>(std::min<int64_t>(to, kBlock));
    Floats best = broadcast(kMinusInfinity);
    Floats seen[kColumns];
    for (int64_t n = 0; n < vectors; ++n) {
      const Ints key = lanes + static_cast<int32_t>(n * kLanes);
      seen[n] = load(scores + n * kLanes) * scale_;
      seen[n] = (key >= low) & (key < high) ? seen[n] : broadcast(kMinusInfinity);
      best = max(best, seen[n]);
    }
    const float before = highest_[i], highest = std::max(before, max(best));
    Floats sums{};
    for (int64_t n = 0; n < vectors; ++n) {
      const Floats weight = seen[n] == kMinusInfinity ? Floats{} : exp(seen[n] - highest);
      sums += weight;
      store(weights + n * kLanes, weight);
    }
    if (highest > before) {
      highest_[i] = highest;
      const Floats shrink = before == kMinusInfinity ? Floats{} : exp(broadcast(before - highest));
      total_[i] *= shrink[0];
      float* const summed = sums_.get() + i * shape_.padded;
      for (int64_t n = 0; n < shape_.padded; n += kLanes) store(summed + n, load(summed + n) * shrink);
    }
    total_[i] += sum(sums);
  }

  void finish(const Task& task) {
    const int64_t group = shape_.group, count = (task.last - task.first) * group;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t head = (task.first + i / group) * shape_.heads + task.kv_head * group + i % group;
      const float* const summed = sums_.get() + i * shape_.padded;
      const Floats inverse = broadcast(1.0f / total_[i]);
      for (int64_t n = 0; n < shape_.head; n += kLanes) {
        store(out_ + head * shape_.head + n, load(summed + n) * inverse, shape_.head - n);
      }
    }
  }

  const Shape shape_;
  const Paths paths_;
  const T *const q_, *const k_, *const v_;
  T* const out_;
  const float scale_;
  const int64_t window_;
  Packed<T> packed_;
  Buffer<uint32_t> queries_;
  Buffer<float> sums_, scores_;
  Buffer<T> weights_;
  float highest_[kTile], total_[kTile];
};

// The rows cut into tasks, longest first, small enough that every thread gets some.
std::vector<Task> make_tasks(const Shape& shape, const Paths& paths, const int32_t* requests, int64_t count,
                             int64_t rows, int64_t window) {
  const int64_t fair = rows * shape.kv_heads / at::get_num_threads();
  const int64_t most = std::clamp<int64_t>(fair, 1, std::max<int64_t>(1, kTile / shape.group));
  std::vector<Task> tasks;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t begin = requests[4 * n], end = begin + requests[4 * n + 1], list = requests[4 * n + 2];
    for (int64_t first = begin; first < end;) {
      int64_t last = first;
      double keys = 0;
      for (; last < end && last - first < most && paths.alike(first, last); ++last) {
        const int64_t length = paths.length(last);
        keys += static_cast<double>(window > 0 ? std::min(length, window) : length);
      }
      for (int64_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
        tasks.push_back({first, last, list, kv_head, keys * shape.group * shape.head});
      }
      first = last;
    }
  }
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.work > b.work; });
  return tasks;
}

template <typename T>
void run_tasks(const std::vector<Task>& tasks, const Shape& shape, const Paths& paths, const at::Tensor& q,
               const at::Tensor& k_cache, const at::Tensor& v_cache, at::Tensor& out, float scale,
               int64_t window) {
  if (tasks.empty()) return;
  double work = 0;
  for (const Task& task : tasks) work += task.work;
  const auto workers = std::clamp<int64_t>(static_cast<int64_t>(work / kThreadWork), 1,
                                           std::min<int64_t>(at::get_num_threads(), tasks.size()));
  const T* const q_data = q.const_data_ptr<T>();
  const T* const k_data = k_cache.const_data_ptr<T>();
  const T* const v_data = v_cache.const_data_ptr<T>();
  T* const out_data = out.mutable_data_ptr<T>();
  std::atomic<size_t> next{0};
  at::parallel_for(0, workers, 1, [&](int64_t, int64_t) {
    Worker<T> worker(shape, paths, q_data, k_data, v_data, out_data, scale, window);
    for (size_t i = next++; i < tasks.size(); i = next++) worker.run(tasks[i]);
  });
}

void check_ints(const at::Tensor& x, int64_t least, const char* name) {
  TORCH_CHECK(x.scalar_type() == at::kInt && x.is_contiguous() && x.numel() >= least, name,
              " must be int32, at least ", least, " of them, got ", x.sizes());
}

}  // namespace

at::Tensor specinfer::tree_attention(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                                     const at::Tensor& slots, const at::Tensor& requests,
                                     const at::Tensor& shared, const at::Tensor& tail_ends,
                                     const at::Tensor& tails, double scale, int64_t window) {
  const auto dtype = q.scalar_type();
  TORCH_CHECK(q.dim() == 3 && q.is_contiguous(), "q must be contiguous [T, N, H], got ", q.sizes());
  TORCH_CHECK(k_cache.dim() == 3 && k_cache.is_contiguous() && v_cache.sizes() == k_cache.sizes() &&
                  v_cache.is_contiguous() && k_cache.scalar_type() == dtype && v_cache.scalar_type() == dtype &&
                  k_cache.size(2) == q.size(2) && q.size(1) % k_cache.size(1) == 0,
              "the caches must be contiguous [P, K, H] of q's dtype, got ", k_cache.sizes(), " and ",
              v_cache.sizes(), " for q ", q.sizes());
  const int64_t rows = q.size(0), per_word = sizeof(uint32_t) / q.element_size();
  check_ints(slots, 1, "slots");
  check_ints(requests, 4, "requests");
  check_ints(shared, rows, "shared");
  check_ints(tail_ends, rows + 1, "tail_ends");
  check_ints(tails, 0, "tails");
  for (const int32_t slot : c10::ArrayRef<int32_t>(slots.const_data_ptr<int32_t>(), slots.numel())) {
    TORCH_CHECK(0 <= slot && slot < k_cache.size(0), "slot ", slot, " of a cache of ", k_cache.size(0));
  }
  Shape shape{};
  shape.heads = q.size(1);
  shape.kv_heads = k_cache.size(1);
  shape.group = shape.heads / shape.kv_heads;
  shape.head = q.size(2);
  TORCH_CHECK(shape.head % per_word == 0, "a head must be whole 32-bit words, got ", shape.head, " elements");
  TORCH_CHECK(shape.group <= kTile, "at most ", kTile, " query heads share a key-value head, got ", shape.group);
  shape.steps = shape.head / per_word;
  shape.padded = round_up(shape.head, kLanes);
  shape.stride = shape.kv_heads * shape.head;
  const Paths paths{slots.const_data_ptr<int32_t>(), shared.const_data_ptr<int32_t>(),
                    tail_ends.const_data_ptr<int32_t>(), tails.const_data_ptr<int32_t>()};
  const auto tasks = make_tasks(shape, paths, requests.const_data_ptr<int32_t>(), requests.numel() / 4, rows, window);
  at::Tensor out = at::empty_like(q);
  if (dtype == at::kBFloat16) {
    run_tasks<BFloat16>(tasks, shape, paths, q, k_cache, v_cache, out, static_cast<float>(scale), window);
  } else {
    TORCH_CHECK(dtype == at::kFloat, "q must be bfloat16 or float32, got ", dtype);
    run_tasks<float>(tasks, shape, paths, q, k_cache, v_cache, out, static_cast<float>(scale), window);
  }
  return out;
}

TORCH_LIBRARY_FRAGMENT(specinfer, m) {
  m.def(
      "tree_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor slots, Tensor requests, Tensor shared, "
      "Tensor tail_ends, Tensor tails, float scale, int window) -> Tensor");
  m.impl("tree_attention", c10::DispatchKey::CPU, TORCH_FN(specinfer::tree_attention));
}
