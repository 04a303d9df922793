// The layers of a decoder in one call: between the products of a small model, calls of one op after another
// take as long as the ops do.
//
// kernels/layers.py is how it is called, models/decoder.py the same computation op by op, with the same bits.

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include "ops.h"

namespace {

using namespace specinfer;
using at::Tensor;
using std::optional;
using std::vector;

// op(arguments...), which a profiler sees as it sees ops that are called one by one.
template <typename Op, typename... Arguments>
Tensor call(const char* name, Op op, const Arguments&... arguments) {
  RECORD_FUNCTION(name, c10::ArrayRef<const c10::IValue>{});
  return op(arguments...);
}

struct Product {
  enum Kind { kBfloat16, kInt8, kInt4 } kind;
  vector<Tensor> weight;  // as the kind's op is given it
  optional<Tensor> bias;
  int64_t channels;

  Product(const std::string& name, vector<Tensor> given, optional<Tensor> bias, int64_t channels)
      : weight(std::move(given)), bias(std::move(bias)), channels(channels) {
    const std::array<std::pair<const char*, size_t>, 3> kinds = {{{"bfloat16", 1}, {"int8", 2}, {"int4", 3}}};
    const auto found = std::find_if(kinds.begin(), kinds.end(), [&](const auto& k) { return name == k.first; });
    TORCH_CHECK(found != kinds.end() && weight.size() == found->second, "no product of kind ", name, " with ",
                weight.size(), " tensors");
    kind = static_cast<Kind>(found - kinds.begin());
  }

  Tensor operator()(const Tensor& x) const {
    switch (kind) {
      case kBfloat16: return call("specinfer::bfloat16_linear", bfloat16_linear, x, weight[0], bias, channels);
      case kInt8: return call("specinfer::int8_linear", int8_linear, x, weight[0], weight[1], bias, channels);
      default:
        return call("specinfer::int4_linear", int4_linear, x, weight[0], weight[1], weight[2], bias, channels);
    }
  }
};

struct Layer {
  Tensor before_attention, before_mlp;
  optional<Tensor> after_attention, after_mlp, q_norm, k_norm;
  Product qkv, o, gate_up, down;
  double scale;
  int64_t window;  // 0: a row sees its whole path
  bool local;      // turned by the second rotation
};

optional<Tensor> at_or_none(const vector<Tensor>& tensors, size_t i) {
  return i < tensors.size() ? optional<Tensor>(tensors[i]) : std::nullopt;
}

class Layers : public torch::CustomClassHolder {
 public:
  Layers(double eps, bool gelu) : eps_(eps), gelu_(gelu) {}

  // norms: before attention, before the MLP, and after each where there are such; head_norms: q and k, or
  // none; kinds, weights, biases and channels: of qkv, o, gate and up, down.
  void add(const vector<Tensor>& norms, const vector<Tensor>& head_norms, const vector<std::string>& kinds,
           const vector<vector<Tensor>>& weights, const vector<optional<Tensor>>& biases,
           const vector<int64_t>& channels, double scale, int64_t window, bool local) {
    TORCH_CHECK(norms.size() == 2 || norms.size() == 4, "two or four norms, got ", norms.size());
    TORCH_CHECK(head_norms.empty() || head_norms.size() == 2, "no norms of heads or two, got ", head_norms.size());
    TORCH_CHECK(kinds.size() == 4 && weights.size() == 4 && biases.size() == 4 && channels.size() == 4,
                "four products, got ", kinds.size());
    const auto product = [&](size_t i) { return Product(kinds[i], weights[i], biases[i], channels[i]); };
    layers_.push_back({norms[0], norms[1], at_or_none(norms, 2), at_or_none(norms, 3), at_or_none(head_norms, 0),
                       at_or_none(head_norms, 1), product(0), product(1), product(2), product(3), scale, window,
                       local});
  }

  // x [T, D] becomes what the last layer's MLP is to be added to; returns that. turns: cos and sin, and those
  // of local layers; paths and slots as tree_attention and rope_and_store take them.
  Tensor run(const Tensor& x, const vector<Tensor>& turns, const vector<Tensor>& keys,
             const vector<Tensor>& values, const vector<Tensor>& paths, const Tensor& write_slots) const {
    TORCH_CHECK(turns.size() == 4 && paths.size() == 5, "four tables of turns and five of paths, got ",
                turns.size(), " and ", paths.size());
    TORCH_CHECK(keys.size() == layers_.size() && values.size() == layers_.size(), "caches of ", layers_.size(),
                " layers, got ", keys.size(), " and ", values.size());
    optional<Tensor> y;
    for (size_t i = 0; i < layers_.size(); ++i) {
      const Layer& layer = layers_[i];
      const size_t turn = layer.local ? 2 : 0;
      const Tensor qkv = layer.qkv(norm(x, y, layer.before_attention));
      const Tensor q = call("specinfer::rope_and_store", rope_and_store, qkv, layer.q_norm, layer.k_norm, eps_,
                            turns[turn], turns[turn + 1], keys[i], values[i], write_slots);
      const Tensor seen = call("specinfer::tree_attention", tree_attention, q, keys[i], values[i], paths[0],
                               paths[1], paths[2], paths[3], paths[4], layer.scale, layer.window);
      y = layer.o(seen.view({seen.size(0), seen.size(1) * seen.size(2)}));
      if (layer.after_attention) y = norm(*y, std::nullopt, *layer.after_attention);
      const Tensor gate_up = layer.gate_up(norm(x, y, layer.before_mlp));
      y = layer.down(gelu_ ? call("specinfer::gelu_tanh_mul", gelu_tanh_mul, gate_up)
                           : call("specinfer::silu_mul", silu_mul, gate_up));
      if (layer.after_mlp) y = norm(*y, std::nullopt, *layer.after_mlp);
    }
    TORCH_CHECK(y, "no layers");
    return *y;
  }

 private:
  Tensor norm(const Tensor& x, const optional<Tensor>& y, const Tensor& weight) const {
    return call("specinfer::add_rms_norm", add_rms_norm, x, y, weight, eps_);
  }

  const double eps_;
  const bool gelu_;
  vector<Layer> layers_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(specinfer, m) {
  m.class_<Layers>("Layers").def(torch::init<double, bool>()).def("add", &Layers::add).def("run", &Layers::run);
}
