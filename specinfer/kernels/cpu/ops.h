// The ops of a decoder layer, as layers.cpp calls them; each file says what its own do.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace specinfer {

at::Tensor add_rms_norm(at::Tensor x, const std::optional<at::Tensor>& y, const at::Tensor& weight, double eps);

at::Tensor silu_mul(const at::Tensor& gate_up);
at::Tensor gelu_tanh_mul(const at::Tensor& gate_up);

at::Tensor rope_and_store(const at::Tensor& qkv, const std::optional<at::Tensor>& q_norm,
                          const std::optional<at::Tensor>& k_norm, double eps,
                          const std::optional<at::Tensor>& cos, const std::optional<at::Tensor>& sin,
                          at::Tensor k_cache, at::Tensor v_cache, const at::Tensor& slots);

at::Tensor tree_attention(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                          const at::Tensor& slots, const at::Tensor& requests, const at::Tensor& shared,
                          const at::Tensor& tail_ends, const at::Tensor& tails, double scale, int64_t window);

at::Tensor bfloat16_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                           int64_t channels);
at::Tensor int8_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                       const std::optional<at::Tensor>& bias, int64_t channels);
at::Tensor int4_linear(const at::Tensor& x, const at::Tensor& levels, const at::Tensor& scales,
                       const at::Tensor& zeros, const std::optional<at::Tensor>& bias, int64_t channels);

}  // namespace specinfer
