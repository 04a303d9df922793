// The layers of a decoder in one call: between the products of a small model, calls of one op after another
// take as long as the ops do.
//
// kernels/layers.py is how it is called, models/decoder.py the same computation op by op, with the same bits.

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "ops.h"

namespace {

using at::Tensor;
using std::optional;
using std::vector;

struct Product {
  vector<Tensor> weight;  // as bfloat16_linear, int8_linear or int4_linear is given it: one tensor, two or three
  optional<Tensor> bias;
  int64_t channels;

  Tensor operator()(const Tensor& x) const {
    switch (weight.size()) {
      case 1: return specinfer::bfloat16_linear(x, weight[0], bias, channels);
      case 2: return specinfer::int8_linear(x, weight[0], weight[1], bias, channels);
      default: return specinfer::int4_linear(x, weight[0], weight[1], weight[2], bias, channels);
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

class Layers : public torch::CustomClassHolder {
 public:
  Layers(double eps, bool gelu) : eps_(eps), gated_(gelu ? specinfer::gelu_tanh_mul : specinfer::silu_mul) {}

  // norms: before attention, before the MLP, and after each where there are such; head_norms: q and k, or
  // none; weights, biases and channels: of qkv, o, gate and up, down.
  void add(vector<Tensor> norms, vector<Tensor> head_norms, vector<vector<Tensor>> weights,
           vector<optional<Tensor>> biases, vector<int64_t> channels, double scale, int64_t window, bool local) {
    TORCH_CHECK(norms.size() == 2 || norms.size() == 4, "two or four norms, got ", norms.size());
    TORCH_CHECK(head_norms.empty() || head_norms.size() == 2, "no norms of heads or two, got ", head_norms.size());
    TORCH_CHECK(weights.size() == 4 && biases.size() == 4 && channels.size() == 4, "four products, got ",
                weights.size());
    vector<Product> products;
    for (size_t i = 0; i < 4; ++i) {
      TORCH_CHECK(1 <= weights[i].size() && weights[i].size() <= 3, "a weight is one tensor to three, got ",
                  weights[i].size());
      products.push_back({std::move(weights[i]), std::move(biases[i]), channels[i]});
    }
    Layer layer{norms[0], norms[1]};
    if (norms.size() == 4) layer.after_attention = norms[2], layer.after_mlp = norms[3];
    if (!head_norms.empty()) layer.q_norm = head_norms[0], layer.k_norm = head_norms[1];
    layer.qkv = std::move(products[0]);
    layer.o = std::move(products[1]);
    layer.gate_up = std::move(products[2]);
    layer.down = std::move(products[3]);
    layer.scale = scale;
    layer.window = window;
    layer.local = local;
    layers_.push_back(std::move(layer));
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
      const Tensor qkv = layer.qkv(specinfer::add_rms_norm(x, y, layer.before_attention, eps_));
      const Tensor q = specinfer::rope_and_store(qkv, layer.q_norm, layer.k_norm, eps_, turns[turn],
                                                 turns[turn + 1], keys[i], values[i], write_slots);
      const Tensor seen = specinfer::tree_attention(q, keys[i], values[i], paths[0], paths[1], paths[2], paths[3],
                                                    paths[4], layer.scale, layer.window);
      y = layer.o(seen.view({x.size(0), -1}));
      if (layer.after_attention) y = specinfer::add_rms_norm(*y, std::nullopt, *layer.after_attention, eps_);
      const Tensor gate_up = layer.gate_up(specinfer::add_rms_norm(x, y, layer.before_mlp, eps_));
      y = layer.down(gated_(gate_up));
      if (layer.after_mlp) y = specinfer::add_rms_norm(*y, std::nullopt, *layer.after_mlp, eps_);
    }
    TORCH_CHECK(y, "no layers");
    return *y;
  }

 private:
  const double eps_;
  Tensor (*const gated_)(const Tensor&);
  vector<Layer> layers_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(specinfer, m) {
  m.class_<Layers>("Layers").def(torch::init<double, bool>()).def("add", &Layers::add).def("run", &Layers::run);
}
