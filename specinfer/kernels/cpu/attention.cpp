// Attention of rows that each attend to a path of cache positions: text, then the row's ancestors, then itself.
//
//   tables    [B]           the blocks of each request's positions, concatenated
//   requests  [R]           its rows, the start of its table, its number of positions
//   shared    [T]           a row's path: the first `shared` of its request's positions,
//   tails     ragged [T]    then these of them
//
// A position's slot is looked up when it is needed, one block of keys at a time. The keys of a path are read in
// blocks of 64, counted from its start. A score is one sum over the head, in order. A block's weights are one sum over
// its keys, in order, and blocks follow in order. So a row's result is a function of its own path, independent of the
// other rows, as long as all values are finite.
//
// Rows share the work. Blocks on which their paths agree are laid out once and multiplied for all rows together. After
// them a tree's paths diverge, within a block. There the scores of all rows and all keys of the tree are computed at
// once, since a score does not depend on other keys. Each row then selects the keys on its path, and reads their values
// in place.

#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "attention_bytes.h"
#include "attention_way.h"
#include "attention_weights.h"
#include "flushing.h"
#include "scratch.h"

namespace specinfer {
namespace {

constexpr double kPieceWork = 1 << 15;  // minimum multiplications of a job
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr int kInPlaceRows = 6;

struct Shape : CacheShape {
  int64_t heads, kv_heads, group, words;  // words of a head
};

// Work of one thread: some rows of one request, for one key-value head. Either no row has a tail, or all rows have
// tails and the same number of shared positions.
struct Task {
  int64_t first, last, table, kv_head;
  double work;

  // Start of the block in which the paths diverge; for rows with tails.
  int64_t parting(const Way& way) const { return way.shared(first) / kKeys * kKeys; }
};

// Attention of rows of T over a cache of rows of C, which is T or int8. `Plain` attention is the softmax of scaled
// scores; otherwise with caps, ALiBi biases, or sinks.
template <typename T, typename C, bool Plain>
class Worker {
 public:
  // parted: maximum number of keys of a task from its parting on.
  Worker(const Shape& shape, const Way& way, const Heads& heads, const T* q, const LayerCache& cache, T* out,
         int64_t parted)
      : shape_(shape),
        way_(way),
        heads_(heads),
        q_(q),
        cache_(cache),
        out_(out),
        scale_(heads.scale * kLog<T>),
        window_(heads.window),
        parted_stride_(round_up(parted, kKeys)),
        keys_(take<uint32_t>(shape.steps * kKeys)),
        values_(take<uint32_t>(kKeys / kPerWord<C> * shape.padded)),
        queries_(take<uint32_t>(kMostQueries * kParts * shape.steps)),
        sums_(take<float>(kMostQueries * shape.padded)),
        scores_(take<float>(kMostQueries * kKeys)),
        parted_scores_(take<float>(kMostQueries * parted_stride_)),
        parted_slots_(take<int32_t>(parted_stride_)),
        weights_(take<Weight>(kMostQueries * kKeys)),
        bytes_(kInt8 ? kMostQueries : 0, shape, shape.kv_heads) {}

  void run(const Task& task) {
    const Flushing flushing;
    start(task);
    const int64_t queries = (task.last - task.first) * shape_.group;
    const auto of_head = [&](const void* rows, const BFloat16* scales) {
      return HeadRows{static_cast<const C*>(rows) + task.kv_head * shape_.head,
                      kInt8 ? scales + task.kv_head : nullptr};
    };
    const HeadRows k = of_head(cache_.keys, cache_.key_scales), v = of_head(cache_.values, cache_.value_scales);
    int64_t begin = std::numeric_limits<int64_t>::max(), end = 0;
    for (int64_t row = task.first; row < task.last; ++row) {
      begin = std::min(begin, seen_from(row) / kKeys * kKeys);
      end = std::max(end, way_.length(row));
    }
    const bool parts = way_.tail(task.first) > 0;
    const int64_t together = parts ? task.parting(way_) : end;
    int32_t slots[2][kKeys];  // of the current block, and of the next
    const auto look_up = [&](int64_t block, int32_t* to) {
      const int64_t count = std::clamp<int64_t>(together - block, 0, kKeys);
      way_.paths.slots(task.table, block, count, to);
      ahead_ = ahead(k, v, to, count);
    };
    look_up(begin, slots[0]);
    for (int64_t block = begin, at = 0; block < together; block += kKeys, at ^= 1) {
      ahead_.rest();
      look_up(block + kKeys, slots[at ^ 1]);
      attend(task, queries, k, v, slots[at], block, std::min<int64_t>(kKeys, together - block));
    }
    if (parts) attend_apart(task, queries, k, v, together);
    finish(task);
  }

 private:
  static constexpr bool kInt8 = !std::is_same_v<T, C>;
  static constexpr int kParts = kInt8 ? kPartsOfRow : 1;  // rows of words of a query
  using Weight = std::conditional_t<kInt8, float, T>;

  // K or V of one head, by slot.
  struct HeadRows {
    const C* rows;
    const BFloat16* scales;
  };

  template <typename U>
  static U* take(int64_t count) {
    return Scratch::get().take<U>(count);
  }

  Ahead ahead(const HeadRows& k, const HeadRows& v, const int32_t* slots, int64_t count) const {
    constexpr int64_t size = sizeof(C);
    return {reinterpret_cast<const char*>(k.rows), reinterpret_cast<const char*>(v.rows), shape_.stride * size,
            shape_.head * size, slots, count};
  }

  int64_t seen_from(int64_t row) const {
    return window_ > 0 ? std::max<int64_t>(0, way_.length(row) - window_) : 0;
  }

  // Store the task's query rows as words, heads of a row in order, and reset the sums.
  void start(const Task& task) {
    const int64_t group = shape_.group, count = (task.last - task.first) * group;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t head = (task.first + i / group) * shape_.heads + task.kv_head * group + i % group;
      const T* const query = q_ + head * shape_.head;
      uint32_t* const words = queries_ + i * kParts * shape_.steps;
      std::memset(words, 0, kParts * shape_.steps * sizeof(uint32_t));
      if constexpr (kInt8) {
        bytes_.take_query(i, query, words);
      } else {
        std::memcpy(words, query, shape_.head * sizeof(T));
      }
      highest_[i] = kMinusInfinity;
      total_[i] = 0.0f;
      if constexpr (!Plain) begin(i, head % shape_.heads);
    }
    std::fill_n(sums_, count * shape_.padded, 0.0f);
  }

  // A sink is an initial score with weight 1 and no value.
  void begin(int64_t i, int64_t head) {
    slopes_[i] = heads_.slopes == nullptr ? 0.0f : heads_.slopes[head];
    if (heads_.sinks == nullptr) return;
    highest_[i] = (load(static_cast<const T*>(heads_.sinks) + head, 1) * kLog<T>)[0];
    total_[i] = 1.0f;
  }

  // All queries attend to `count` keys, which start at `block` in every path.
  void attend(const Task& task, int64_t queries, const HeadRows& k, const HeadRows& v, const int32_t* slots,
              int64_t block, int64_t count) {
    lay_out_keys(shape_, k.rows, slots, count, keys_);
    lay_out_values(shape_, v.rows, slots, count, values_);
    bytes_.read_key_scales(k.scales, slots, count);
    bytes_.read_value_scales(v.scales, slots, count);
    for (int64_t first = 0; first < queries; first += kQueriesAtOnce) {
      const int64_t some = std::min<int64_t>(kQueriesAtOnce, queries - first);
      score(first, some, count, scores_, kKeys);
      for (int64_t i = 0; i < some; ++i) {
        const int64_t row = task.first + (first + i) / shape_.group;
        weigh(first + i, scores_ + i * kKeys, weights_ + i * kKeys, seen_from(row) - block, way_.length(row) - block,
              block);
      }
      add_values(first, some, count, weights_);
    }
  }

  // Scores of some queries and the `count` keys that are laid out; rows of `to` are `stride` apart.
  void score(int64_t first, int64_t some, int64_t count, float* to, int64_t stride) {
    const int64_t columns = round_up(count, kLanes);
    const uint32_t* const words = queries_ + first * kParts * shape_.steps;
    if constexpr (kInt8) {
      bytes_.score(first, some, words, keys_, columns, to, stride, ahead_);
    } else {
      multiply_block<T, true>(some, words, shape_.steps, keys_, kKeys, to, stride, shape_.words, columns, ahead_);
    }
  }

  // Adds the `count` values that are laid out, times weights, to the sums of some queries.
  void add_values(int64_t first, int64_t some, int64_t count, const Weight* weights) {
    const int64_t steps = (count + kPerWord<C> - 1) / kPerWord<C>, padded = shape_.padded;
    float* const sums = sums_ + first * padded;
    if constexpr (kInt8) {
      bytes_.add_values(some, weights, values_, steps, sums, ahead_);
    } else {
      multiply_block<T, false>(some, reinterpret_cast<const uint32_t*>(weights), kKeys / kPerWord<T>, values_, padded,
                               sums, padded, steps, padded, ahead_);
    }
  }

  // Each row attends to the keys of its own path from `parting` on.
  void attend_apart(const Task& task, int64_t queries, const HeadRows& k, const HeadRows& v, int64_t parting) {
    const int64_t end = way_.end(task.first, task.last);
    way_.paths.slots(task.table, parting, end - parting, parted_slots_);
    ahead_ = ahead(k, v, parted_slots_, end - parting);
    ahead_.rest();
    for (int64_t block = parting; block < end; block += kKeys) {
      const int64_t count = std::min<int64_t>(kKeys, end - block);
      lay_out_keys(shape_, k.rows, parted_slots_ + block - parting, count, keys_);
      bytes_.read_key_scales(k.scales, parted_slots_ + block - parting, count);
      score(0, queries, count, parted_scores_ + block - parting, parted_stride_);
    }
    for (int64_t row = task.first; row < task.last; ++row) {
      const int64_t length = way_.length(row), from = seen_from(row), first = (row - task.first) * shape_.group;
      for (int64_t block = std::max(parting, from / kKeys * kKeys); block < length; block += kKeys) {
        int32_t entries[kKeys], slots[kKeys];
        const int64_t count = std::min<int64_t>(kKeys, length - block);
        way_.read(row, block, block + count, entries);
        for (int64_t n = 0; n < count; ++n) slots[n] = parted_slots_[entries[n] - parting];
        for (int64_t i = first; i < first + shape_.group; ++i) {
          const float* const all = parted_scores_ + i * parted_stride_ - parting;
          float* const own = scores_ + i * kKeys;
          for (int64_t n = 0; n < count; ++n) own[n] = all[entries[n]];
          weigh(i, own, weights_ + i * kKeys, from - block, length - block, block);
        }
        add_in_place(first, v, slots, count);
      }
    }
  }

  void add_in_place(int64_t first, const HeadRows& v, const int32_t* slots, int64_t count) {
    if constexpr (kInt8) {
      lay_out_values(shape_, v.rows, slots, count, values_);
      bytes_.read_value_scales(v.scales, slots, count);
      add_values(first, shape_.group, count, weights_ + first * kKeys);
    } else {
      const auto add = [&](auto rows, int64_t i) {
        multiply_in_place<T, rows>(weights_ + i * kKeys, kKeys, v.rows, slots, shape_.stride, count, shape_.head,
                                   sums_ + i * shape_.padded, shape_.padded);
      };
      int64_t i = first;
      const int64_t last = first + shape_.group;
      for (; i + kInPlaceRows <= last; i += kInPlaceRows) add(std::integral_constant<int, kInPlaceRows>{}, i);
      for (; i + 3 <= last; i += 3) add(std::integral_constant<int, 3>{}, i);
      for (; i < last; ++i) add(std::integral_constant<int, 1>{}, i);
    }
  }

  // Scores -> weights of keys from..to of the block at `block`; earlier sums are rescaled to the new maximum score.
  void weigh(int64_t i, const float* scores, Weight* weights, int64_t from, int64_t to, int64_t block) {
    if (from >= kKeys || to <= 0) {
      std::memset(weights, 0, kKeys * sizeof(Weight));
      return;
    }
    if (from <= 0 && to >= kKeys) return weigh_vectors<kKeyVectors, true>(i, scores, weights, from, to, block);
    const int64_t vectors = (std::min<int64_t>(to, kKeys) + kLanes - 1) / kLanes;
    std::memset(weights + vectors * kLanes, 0, (kKeyVectors - vectors) * kLanes * sizeof(Weight));
    each<kKeyVectors>([&](auto n) {
      if (vectors == n + 1) weigh_vectors<n + 1, false>(i, scores, weights, from, to, block);
    });
  }

  template <int Vectors, bool All>
  void weigh_vectors(int64_t i, const float* scores, Weight* weights, int64_t from, int64_t to, int64_t block) {
    const Ints low = static_cast<int32_t>(std::max<int64_t>(from, 0));
    const Ints high = static_cast<int32_t>(std::min<int64_t>(to, kKeys));
    const auto sees = [&](int n) {
      const Ints key = lane_numbers() + n * kLanes;
      return (key >= low) & (key < high);
    };
    Floats best = kMinusInfinity;
    Floats seen[Vectors];
    each<Vectors>([&](auto n) {
      if constexpr (Plain) {
        seen[n] = load(scores + n * kLanes) * scale_;
      } else {
        seen[n] = changed<T>(heads_, load(scores + n * kLanes), slopes_[i], block + n * kLanes, block + to);
      }
      if constexpr (!All) seen[n] = select(sees(n), seen[n], Floats(kMinusInfinity));
      best = max(best, seen[n]);
    });
    const float before = highest_[i], highest = std::max(before, max(best));
    Floats sums = 0.0f;
    each<Vectors>([&](auto n) {
      Floats weight = power<T>(seen[n] - highest);
      if constexpr (!All) weight = select(sees(n), weight, Floats(0.0f));
      sums = sums + weight;
      store_weights(weights + n * kLanes, weight);
    });
    if (highest > before) {
      highest_[i] = highest;
      const Floats shrink = before == kMinusInfinity ? Floats(0.0f) : power<T>(Floats(before - highest));
      total_[i] *= shrink[0];
      float* const summed = sums_ + i * shape_.padded;
      for (int64_t n = 0; n < shape_.padded; n += kLanes) store(summed + n, load(summed + n) * shrink);
    }
    total_[i] += sum(sums);
  }

  void finish(const Task& task) {
    const int64_t group = shape_.group, count = (task.last - task.first) * group;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t head = (task.first + i / group) * shape_.heads + task.kv_head * group + i % group;
      const float* const summed = sums_ + i * shape_.padded;
      const Floats inverse = 1.0f / total_[i];
      for (int64_t n = 0; n < shape_.head; n += kLanes) {
        store(out_ + head * shape_.head + n, load(summed + n) * inverse, shape_.head - n);
      }
    }
  }

  const Shape shape_;
  const Way way_;
  const Heads heads_;
  const T* const q_;
  const LayerCache cache_;
  T* const out_;
  Ahead ahead_{};
  const float scale_;
  const int64_t window_, parted_stride_;
  uint32_t *const keys_, *const values_, *const queries_;
  float *const sums_, *const scores_, *const parted_scores_;
  int32_t* const parted_slots_;
  Weight* const weights_;
  ByteProducts bytes_;
  float highest_[kMostQueries], total_[kMostQueries], slopes_[Plain ? 1 : kMostQueries];
};

// Divide the rows into tasks, longest first, small enough that every thread gets some.
std::vector<Task> make_tasks(const Shape& shape, const Way& way, int64_t window) {
  const Paths& paths = way.paths;
  const int64_t fair = paths.rows * shape.kv_heads / Pool::get().threads();
  const int64_t most = std::clamp<int64_t>(fair, 1, std::max<int64_t>(1, kMostQueries / shape.group));
  std::vector<Task> tasks;
  for (int64_t n = 0; n < paths.num_requests; ++n) {
    const Request& request = paths.requests[n];
    for (int64_t first = request.first; first < request.end;) {
      int64_t last = first;
      double keys = 0;
      for (; last < request.end && last - first < most && way.alike(first, last); ++last) {
        const int64_t length = way.length(last);
        keys += static_cast<double>(window > 0 ? std::min(length, window) : length);
      }
      for (int64_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
        tasks.push_back({first, last, request.table, kv_head, keys * shape.group * shape.head});
      }
      first = last;
    }
  }
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.work > b.work; });
  return tasks;
}

}  // namespace

void tree_attention(Type type, const Heads& heads, const Paths& paths, const void* q, const LayerCache& cache,
                    void* out) {
  const Way way{paths};
  Shape shape{};
  shape.heads = heads.heads;
  shape.kv_heads = heads.kv_heads;
  shape.group = heads.heads / heads.kv_heads;
  shape.head = heads.head;
  const bool int8 = cache.key_scales != nullptr;
  const int64_t element = int8 ? 1 : type == Type::kBFloat16 ? 2 : 4;
  shape.words = (heads.head * element + 3) / 4;
  shape.steps = round_up(shape.words, kStepsAtOnce);
  shape.padded = round_up(heads.head, kLanes);
  shape.stride = heads.kv_heads * heads.head;
  const auto tasks = make_tasks(shape, way, heads.window);
  if (tasks.empty()) return;
  double work = 0;
  int64_t parted = 0;
  for (const Task& task : tasks) {
    work += task.work;
    if (way.tail(task.first) > 0) parted = std::max(parted, way.end(task.first, task.last) - task.parting(way));
  }
  const auto pieces = std::clamp<int64_t>(static_cast<int64_t>(work / kPieceWork), 1,
                                          std::min<int64_t>(Pool::get().threads(), tasks.size()));
  const auto attend = [&](auto of_rows, auto of_cache, auto plain) {
    using T = decltype(of_rows);
    using Mine = Worker<T, decltype(of_cache), plain>;
    const Scratch::Mark mark;
    std::vector<std::unique_ptr<Mine>> workers;
    for (int64_t i = 0; i < pieces; ++i) {
      workers.push_back(std::make_unique<Mine>(shape, way, heads, static_cast<const T*>(q), cache,
                                              static_cast<T*>(out), parted));
    }
    std::atomic<size_t> next{0};
    Pool::get().run(pieces, [&](int64_t i) {
      for (size_t task; (task = next++) < tasks.size();) workers[i]->run(tasks[task]);
    });
  };
  const bool plain = heads.softcap == 0.0f && heads.slopes == nullptr && heads.sinks == nullptr;
  by_type(type, [&](auto number) {
    const auto over = [&](auto of_cache) {
      plain ? attend(number, of_cache, std::true_type{}) : attend(number, of_cache, std::false_type{});
    };
    int8 ? over(int8_t{}) : over(number);
  });
}

}  // namespace specinfer
