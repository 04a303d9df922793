"""Modules of transformers with Llama's code, computed by native kernels.

Most families copy that code for norms, gated MLPs and attention. Two or three native calls replace about a
dozen calls of PyTorch.

Shapes: T rows of a step, D hidden size, F MLP size, H head size.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from specinfer.kernels.ops import NormParts, Ops, torch_activation
from specinfer.kernels.product import Product
from specinfer.kernels.structures import ACTIVATIONS
from specinfer.models.hosted.attention import Call, PassAttention
from specinfer.models.hosted.modules import ProductLinear

Forward = Callable[..., Any]
_NAMES: Final = ("RMSNorm", "MLP", "Attention")  # suffixes of the classes' names


class NativeNorm:
    """The forward of an RMSNorm."""

    def __init__(self, module: Any, ops: Ops) -> None:
        self._norm, self._ops = NormParts(module.weight.detach(), module.variance_epsilon), ops
        self._forward = module.forward

    def __call__(self, x: Tensor) -> Tensor:
        """x / rms(x) * weight."""
        if x.dtype is not self._norm.weight_D.dtype:
            made: Tensor = self._forward(x)
            return made
        return self._ops.norm_of_sum(_rows(x), None, self._norm).view(x.shape)


class NativeGatedMLP:
    """The forward of a gated MLP, with one product for gate and up."""

    def __init__(self, gate_up: Product, activation: str, down: Product, ops: Ops) -> None:
        self._gate_up, self._activation, self._down, self._ops = gate_up, activation, down, ops

    def __call__(self, x: Tensor) -> Tensor:
        """down(act(gate(x)) * up(x))."""
        gate_up_T2F = self._gate_up(_rows(x))
        return self._down(self._ops.gate(gate_up_T2F, self._activation)).view(x.shape)


class NativeSelfAttention:
    """The forward of attention, with one product for q, k and v; the attention backend rotates them."""

    def __init__(self, qkv: Product, output: Product, attention: PassAttention, forward: Forward) -> None:
        """`forward` is the module's forward method."""
        self._qkv, self._output, self._attention, self._forward = qkv, output, attention, forward

    def __call__(
        self, hidden_states: Tensor, position_embeddings: Any = None, *given: Any, **named: Any
    ) -> tuple[Tensor, None]:
        """The module's forward; both tensors of `position_embeddings` are [1, T, H]."""
        rotation = self._attention.rotation_of(*position_embeddings)
        if rotation is None:
            made: tuple[Tensor, None] = self._forward(hidden_states, position_embeddings, *given, **named)
            return made
        out_TC = self._attention.attend_rotated(self._qkv(_rows(hidden_states)), rotation)
        return self._output(out_TC).view(*hidden_states.shape[:-1], -1), None


def native_forward(
    module: nn.Module, calls: Sequence[Call], attention: PassAttention, ops: Ops
) -> Forward | None:
    """The forward that replaces a module's forward; None to run the module's code.

    The products must exist; `calls` are the calls of `attention` in a pass.
    """
    kind: Any = type(module)
    if not kind.__name__.endswith(_NAMES):
        return None
    code = _code(kind.forward)
    children: Any = module._modules
    if code == _llama().norm:
        return NativeNorm(module, ops)
    if code == _llama().mlp:
        gate_up, down = _stacked(children, ("gate_proj", "up_proj")), _alone(children, "down_proj")
        activation = activation_of(children["act_fn"]) if "act_fn" in children else None
        if gate_up is not None and down is not None and activation is not None:
            return NativeGatedMLP(gate_up, activation, down, ops)
    if code in _llama().attention and _rotates_as_llama(kind):
        qkv, output = _stacked(children, ("q_proj", "k_proj", "v_proj")), _alone(children, "o_proj")
        size = attention.specs[0].head_dim
        own = [call for call in calls if call.module is module]
        sized = all(call.key_size == call.value_size == size for call in own)
        if qkv is not None and output is not None and own and sized:
            return NativeSelfAttention(qkv, output, attention, module.forward)
    return None


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


class _LlamaCode(NamedTuple):
    """The parts of Llama's code that are compared."""

    norm: str
    mlp: str
    attention: tuple[str, ...]  # without and with an argument for a sliding window
    rotation: str


@cache
def _llama() -> _LlamaCode:
    from transformers.models.llama import modeling_llama as llama
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

    return _LlamaCode(
        _code(llama.LlamaRMSNorm.forward),
        _code(llama.LlamaMLP.forward),
        (_code(llama.LlamaAttention.forward), _code(Qwen2Attention.forward)),
        _code(llama.apply_rotary_pos_emb),
    )


def _rotates_as_llama(kind: Any) -> bool:
    """True if the function that rotates q and k for a class of attention has Llama's code."""
    function = inspect.unwrap(kind.forward).__globals__.get("apply_rotary_pos_emb")
    return function is not None and _code(function) == _llama().rotation


@cache
def _code(function: Any) -> str:
    """The names of a function's parameters and its statements, without types and docstring."""
    try:
        tree: Any = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return f"unknown code of {function}"
    first = ast.get_docstring(tree) is not None
    return "\n".join([one.arg for one in tree.args.args] + [ast.unparse(one) for one in tree.body[first:]])
