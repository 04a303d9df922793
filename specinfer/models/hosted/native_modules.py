"""Modules of transformers' models, computed by native kernels: norms, gated MLPs and rotated attention.

Two or three native calls replace about a dozen calls of PyTorch. A module is recognized by its layers and
weights, and tried once on random rows. A kernel computes Llama's formula, which most families share, and
replaces modules whose own code gives the bits of that formula. All other modules run unchanged.

Shapes: T rows of a step, D hidden size, F MLP size, H head size.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from specinfer.kernels.ops import NormParts, Ops, torch_activation
from specinfer.kernels.product import Product
from specinfer.kernels.structures import ACTIVATIONS
from specinfer.models.hosted.attention import ATTENTION, Call, PassAttention
from specinfer.models.hosted.modules import ProductLinear

Forward = Callable[..., Any]
_SIZES: Final = (1e-3, 1.0, 1e3)  # rows: small show an epsilon, large a clamp


def native_norm(norm: NormParts, forward: Forward, ops: Ops, x: Tensor) -> Tensor:
    """The forward of an RMSNorm: x / rms(x) * weight."""
    if x.dtype is not norm.weight_D.dtype:
        made: Tensor = forward(x)
        return made
    return ops.norm_of_sum(_rows(x), None, norm).view(x.shape)


def native_gated_mlp(gate_up: Product, activation: str, down: Product, ops: Ops, x: Tensor) -> Tensor:
    """The forward of a gated MLP, down(act(gate(x)) * up(x)), with one product for gate and up."""
    return down(ops.gate(gate_up(_rows(x)), activation)).view(x.shape)


def native_self_attention(
    qkv: Product,
    output: Product,
    attention: PassAttention,
    forward: Forward,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    *given: Any,
    **named: Any,
) -> tuple[Tensor, None]:
    """The forward of attention, with one product for q, k and v; the attention backend rotates them.

    `forward` is the module's own. Both tensors of `position_embeddings` are [1, T, H].
    """
    rotation = attention.rotation_of(*position_embeddings)
    if rotation is None:
        made: tuple[Tensor, None] = forward(hidden_states, position_embeddings, *given, **named)
        return made
    out_TC = attention.attend_rotated(qkv(_rows(hidden_states)), rotation)
    return output(out_TC).view(*hidden_states.shape[:-1], -1), None


@torch.inference_mode()
def native_forward(
    module: nn.Module, calls: Sequence[Call], attention: PassAttention, ops: Ops, device: torch.device
) -> Forward | None:
    """The forward that replaces a module's forward; None to run the module's code.

    The weights must be in memory; `calls` are the calls of `attention` in a pass.
    """
    children: Any = module._modules
    if (norm := _norm_of(module)) is not None:
        return partial(native_norm, norm, module.forward, ops)
    gate_up, down = _stacked(children, ("gate_proj", "up_proj")), _alone(children, "down_proj")
    activation = activation_of(children["act_fn"]) if "act_fn" in children else None
    if gate_up is not None and down is not None and activation is not None and _is_gated_mlp(module, device):
        return partial(native_gated_mlp, gate_up, activation, down, ops)
    qkv, output = _stacked(children, ("q_proj", "k_proj", "v_proj")), _alone(children, "o_proj")
    own = [call for call in calls if call.module is module]
    size = attention.specs[0].head_dim
    sized = own and all(call.key_size == call.value_size == size for call in own)
    if qkv is not None and output is not None and sized and _rotates_halves(module, size, device):
        return partial(native_self_attention, qkv, output, attention, module.forward)
    return None


def _norm_of(module: Any) -> NormParts | None:
    """The norm that a module computes; None if it computes something else."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    eps = getattr(module, "eps", None) if eps is None else eps
    if [*module._parameters] != ["weight"] or weight is None or weight.dim() != 1 or not eps:
        return None
    x = _samples(weight.numel(), weight.dtype, weight.device)
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    same = _equal(lambda: module.forward(x), weight * normed.to(x.dtype))
    return NormParts(weight.detach(), eps) if same else None


def _is_gated_mlp(module: Any, device: torch.device) -> bool:
    """True if a module's code multiplies an activated gate with up, and only that."""
    x = _samples(module.gate_proj.in_features, module.gate_proj.weight.dtype, device)
    gated = module.act_fn(module.gate_proj(x)) * module.up_proj(x)
    return _equal(lambda: module.forward(x), module.down_proj(gated))


def _rotates_halves(module: Any, size: int, device: torch.device) -> bool:
    """True if an attention module's code does no more than rotate the halves of heads before attention."""
    x = _samples(module.q_proj.in_features, module.q_proj.weight.dtype, device)
    angles = _samples(size // 2, x.dtype, device).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    found: list[Tensor] = []

    def attend(module: object, query: Tensor, key: Tensor, value: Tensor, *given: object) -> Tensor:
        found.extend((query, key, value))
        return query.transpose(1, 2)

    def rotated(heads: Tensor) -> Tensor:
        first, second = heads.chunk(2, -1)
        return heads * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]

    parts = [
        layer(x).view(1, len(_SIZES), -1, size).transpose(1, 2)
        for layer in (module.q_proj, module.k_proj, module.v_proj)
    ]
    query, key, value = rotated(parts[0]), rotated(parts[1]), parts[2]
    made = module.o_proj(query.transpose(1, 2).flatten(2))
    usual = getattr(module, ATTENTION)
    setattr(module, ATTENTION, attend)
    try:
        same = _equal(
            lambda: module.forward(hidden_states=x, position_embeddings=(cos, sin), attention_mask=None)[0],
            made,
        )
    finally:
        setattr(module, ATTENTION, usual)
    return same and len(found) == 3 and all(map(torch.equal, found, (query, key, value)))


def _samples(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random rows, [1, T, size]."""
    made = torch.randn(1, len(_SIZES), size, generator=torch.Generator().manual_seed(0))
    return (made * torch.tensor(_SIZES)[:, None]).to(device, dtype)


def _equal(forward: Callable[[], Tensor], want: Tensor) -> bool:
    """True if a module's forward has these bits; one with other arguments raises any exception."""
    try:
        return torch.equal(forward(), want)
    except Exception:
        return False


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _stacked(children: Any, names: Sequence[str]) -> Product | None:
    """The product of these linear layers together; None if they have none."""
    layers = [children.get(name) for name in names]
    stack = layers[0].stack if isinstance(layers[0], ProductLinear) else None
    return stack.product if stack is not None and list(stack.layers) == layers else None


def _alone(children: Any, name: str) -> Product | None:
    layer = children.get(name)
    return layer.product if isinstance(layer, ProductLinear) and layer.stack is None else None


def activation_of(function: Any) -> str | None:
    """The native activation with the same values; None if there is none."""
    if isinstance(function, nn.Module) and next(function.parameters(), None) is not None:
        return None
    numbers = torch.linspace(-12, 12, 1024)
    made = function(numbers)
    return next((name for name in ACTIVATIONS if torch.equal(torch_activation(name)(numbers), made)), None)
