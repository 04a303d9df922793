"""Skeleton: a transformers model without weights, with products for its linear layers, and a trial pass.

The trial runs the model's own code once, on three tokens, with zero weights that take no memory. It finds how
the model calls attention, or why it cannot run here, before any weight is read.
"""

import contextlib
import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from specinfer.errors import ModelError, UnhostedError
from specinfer.models.hosted.attention import (
    ATTENTION,
    EXPERTS,
    IMPLEMENTATION,
    TRYING,
    AttentionTrial,
    Call,
    check_calls,
)
from specinfer.models.hosted.modules import ProductExperts, ProductLinear, Stack

OUTPUT: Final = "lm_head"  # tensor name of every output layer for weight readers
_TOKENS: Final = 3  # tokens in the trial
_STATES: Final = re.compile(r"mamba|conv|recurrent|linear|hybrid|deltanet|lightning", re.IGNORECASE)
_READ_WEIGHT: Final = re.compile(r"\bself\.(\w+)\.weight\b(?!\.(?:dtype|device|shape)\b)")
_OTHER_SENSES: Final = re.compile(r"vision|audio|image|speech|vq|perceptor|mm_token")
_STATEFUL: Final = re.compile(r"Mamba|Recurrent|DeltaNet|ShortConv|Rwkv|xLSTM|Lightning|SSM")
NO_INTERFACE: Final = "does not compute attention through transformers' attention interface"
_MAX_ELEMENTS: Final = 1 << 27  # maximum elements of a matrix that a model's own code multiplies with
_MAX_ERROR: Final = 160  # characters of another library's error


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A model without memory, and the results of its trial."""

    model: Any  # transformers' model, with a head
    base: Any  # its part that computes hidden states
    base_name: str
    head: ProductLinear  # computes logits
    head_path: str
    embedding_path: str  # path of the token embeddings
    ties: Mapping[str, str]  # parameters that are aliases of others
    calls: tuple[Call, ...]
    hidden_size: int
    plain_head: bool  # logits are the head's product with hidden states, without further operations

    @classmethod
    def of(cls, config: Any, model_class: Any, dtype: torch.dtype) -> Self:
        """The skeleton of that config; raises UnhostedError with the reason if it cannot run here."""
        check_config(config)
        config._attn_implementation = IMPLEMENTATION
        config._experts_implementation = IMPLEMENTATION
        with _own_errors("cannot be made of its config"), without_memory(dtype):
            model = model_class(config)
        model.eval()
        for name, module in model.named_modules():
            if isinstance(module, nn.Conv1d | nn.Conv2d) or _STATEFUL.search(type(module).__name__):
                raise UnhostedError(f"has layers with a state ({name}: {type(module).__name__})")
        base = _base_of(model)
        replace_linears(model)
        paths = {id(module): name for name, module in model.named_modules()}
        base_name = paths[id(base)]
        head = model.get_output_embeddings()
        if not isinstance(head, ProductLinear):
            raise UnhostedError("has no output layer with a single matrix")
        embeddings = model.get_input_embeddings()
        if not isinstance(embeddings, nn.Embedding):
            raise UnhostedError("has no table of embeddings")
        if "position_ids" not in inspect.signature(base.forward).parameters:
            raise UnhostedError("accepts no position ids")
        trial = _Trial(model, base, base_name, head)
        calling = {id(call.module) for call in trial.calls}
        for module in model.modules():
            if id(module) in calling and any(isinstance(child, nn.Linear) for child in module.children()):
                raise UnhostedError("multiplies with weights in its attention code")
        _stack(model, trial.calls_seen, head)
        try:
            _Trial(model, base, base_name, head)
        except UnhostedError:  # its code needs separate memory for each layer's output
            for module in model.modules():
                if isinstance(module, ProductLinear):
                    module.stack = None
        return cls(
            *(model, base, base_name, head, paths[id(head)], paths[id(embeddings)]),
            *(dict(model.all_tied_weights_keys), tuple(trial.calls), trial.hidden_size, trial.plain_head),
        )

    @property
    def head_is_tied(self) -> bool:
        """True if the output layer is the token embeddings."""
        return self.ties.get(f"{self.head_path}.weight") == f"{self.embedding_path}.weight"

    def product_name(self, module: ProductLinear, path: str) -> str:
        """The tensor name of a product: its path, but OUTPUT is reserved for the output layer."""
        if module is self.head:
            return OUTPUT
        return f"model.{path}" if path.startswith(OUTPUT) else path


def check_config(config: Any) -> None:
    """Raise UnhostedError unless the config is of a decoder for text alone."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnhostedError("has an encoder")
    if others := [name for name in getattr(config, "sub_configs", {}) if _OTHER_SENSES.search(name)]:
        raise UnhostedError(f"reads more than text ({', '.join(others)})")
    kinds = {str(kind) for kind in getattr(config.get_text_config(), "layer_types", None) or ()}
    if states := sorted(kind for kind in kinds if _STATES.search(kind)):
        raise UnhostedError(f"has layers with a state ({', '.join(states)})")


def _base_of(model: Any) -> nn.Module:
    """The part of a model that computes hidden states."""
    for base in (
        model.get_decoder(),
        getattr(model, model.base_model_prefix, None),
        model._modules.get("model"),
    ):
        if isinstance(base, nn.Module) and base is not model and list(base.children()):
            return base
    raise UnhostedError("has no part that computes hidden states")


def replace_linears(model: nn.Module) -> None:
    """Replace every linear layer of `model` by a ProductLinear.

    A layer with a custom forward is kept, and one whose weight the surrounding module's code reads.
    """
    from transformers.pytorch_utils import Conv1D

    for module in list(model.modules()):
        kind: Any = type(module)
        read = _weights_read(kind)
        child: Any
        for name, child in list(module.named_children()):
            if (type(child) is nn.Linear or type(child) is Conv1D) and name not in read:
                made = ProductLinear(child.weight, child.bias, transposed=type(child) is Conv1D)
                module._modules[name] = made


@contextlib.contextmanager
def without_memory(dtype: torch.dtype) -> Iterator[None]:
    """Within the block, transformers models are created in that dtype, with parameters that take no memory.

    Buffers are computed as usual.
    """
    from transformers import initialization

    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with initialization.no_init_weights(), _OnMeta():
            yield
    finally:
        torch.set_default_dtype(before)


class _OnMeta(TorchFunctionMode):
    """Creates uninitialized tensors on the meta device."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is torch.empty and named.get("device") is None:
            named["device"] = "meta"
        return func(*args, **named)


class _Trial:
    """One pass on zeros; afterwards the model is unchanged, except for its attention."""

    def __init__(self, model: Any, base: nn.Module, base_name: str, head: ProductLinear) -> None:
        attention = AttentionTrial()
        modules = list(model.modules())
        for module in modules:
            setattr(module, ATTENTION, attention)
            if is_experts(module):
                setattr(module, EXPERTS, ProductExperts(()))
        tokens, positions = torch.zeros(1, _TOKENS, dtype=torch.int64), torch.arange(_TOKENS)[None]
        configs = [module.config for module in modules if hasattr(module, "config")]
        self.calls_seen: list[tuple[nn.Module, Tensor]] = []  # linear layers and their inputs, in order

        def record(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            if given:
                self.calls_seen.append((module, given[0]))

        hooks = [one.register_forward_pre_hook(record) for one in modules if isinstance(one, ProductLinear)]
        for config in configs:
            setattr(config, TRYING, True)
        try:
            with _zeros(model), torch.inference_mode(), _own_errors("fails in a trial"):
                read = base(input_ids=tokens, position_ids=positions, use_cache=False)
                hidden = read.last_hidden_state
                self.plain_head = _is_plain(model, base_name, head, hidden)
        finally:
            for config in configs:
                delattr(config, TRYING) if hasattr(config, TRYING) else None
            for module in modules:
                delattr(module, ATTENTION)
            for hook in hooks:
                hook.remove()
        self.hidden_size = int(hidden.shape[-1])
        self.calls = attention.calls
        layers = int(getattr(model.config.get_text_config(), "num_hidden_layers", 0) or len(self.calls))
        if not self.calls:
            raise UnhostedError(NO_INTERFACE)
        if len(self.calls) % layers:
            raise UnhostedError(f"calls attention {len(self.calls)} times in {layers} layers")
        check_calls(self.calls)


def _stack(model: nn.Module, calls_seen: Sequence[tuple[nn.Module, Tensor]], head: nn.Module) -> None:
    """Let layers of one module that were called in sequence with one tensor share a product."""
    parents = {id(child): module for module in model.modules() for child in module.children()}
    calls = Counter(id(module) for module, _ in calls_seen)
    exact = {id(one) for name, one in model.named_modules() if keeps_float32(model, name)}
    groups: list[list[ProductLinear]] = []
    before: tuple[object, ...] = ()
    for module, given in calls_seen:
        assert isinstance(module, ProductLinear)
        key = (id(given), id(parents[id(module)]), module.transposed, module.bias is None)
        in_float32 = module.weight.dtype is torch.float32 and head.weight.dtype is not torch.float32
        alone = calls[id(module)] > 1 or module is head or id(module) in exact or in_float32
        if key == before and not alone:
            groups[-1].append(module)
        else:
            groups.append([module])
        before = () if alone else key
    for group in groups:
        if len(group) > 1:
            stack = Stack(group)
            for module in group:
                module.stack = stack


def _is_plain(model: Any, base_name: str, head: ProductLinear, hidden: Tensor) -> bool:
    """True if a model's logits are its head's product with unmodified hidden states."""
    seen: list[Tensor] = []
    hook = head.register_forward_hook(lambda module, given, made: seen.extend((given[0], made)))
    with given_states(model, base_name) as given:
        given.hidden = hidden
        logits = model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False).logits
    hook.remove()
    if len(seen) != 2:
        raise UnhostedError("computes logits with more than one product")
    read, made = seen
    same = read.data_ptr() == hidden.data_ptr() and read.shape == hidden.shape
    return same and logits.data_ptr() == made.data_ptr() and logits.shape == made.shape


class _States:
    """An output of layers with hidden states alone."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, place: int | slice) -> Any:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        return None


class GivenStates(nn.Module):
    """Replaces a model's layers, and returns given hidden states."""

    hidden: Tensor

    def forward(self, *given: object, **named: object) -> _States:
        """The output of the replaced layers."""
        return _States(self.hidden)


@contextlib.contextmanager
def given_states(model: Any, base_name: str) -> Iterator[GivenStates]:
    """Within the block the layers of `model` return given hidden states."""
    parent_name, _, name = base_name.rpartition(".")
    parent, given = model.get_submodule(parent_name), GivenStates()
    base = getattr(parent, name)
    given.eval()
    setattr(parent, name, given)
    try:
        yield given
    finally:
        setattr(parent, name, base)


@contextlib.contextmanager
def _zeros(model: nn.Module) -> Iterator[None]:
    """Within the block all parameters except those of products are zeros with the memory of one number."""
    kept: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in model.modules():
        if isinstance(module, ProductLinear) or is_experts(module):
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter.numel() > _MAX_ELEMENTS and not isinstance(module, nn.Embedding):
                    raise UnhostedError(
                        f"multiplies with the whole matrix {type(module).__name__}.{name} in its own code"
                    )
                zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                kept.append((module, name, parameter))
                module._parameters[name] = nn.Parameter(zeros, requires_grad=False)
    try:
        yield
    finally:
        for module, name, parameter in kept:
            module._parameters[name] = parameter


def is_experts(module: nn.Module) -> bool:
    """True for a module of experts that transformers lets other code compute."""
    return all(hasattr(module, name) for name in ("_is_expert_parallel", "is_transposed", "_apply_gate"))


def keeps_float32(model: Any, name: str) -> bool:
    """True if the model requires float32 there, independent of its dtype."""
    return any(part in name for part in model._keep_in_fp32_modules_strict or ())


@cache
def _weights_read(kind: type) -> frozenset[str]:
    """The children whose weights a module class uses itself, beyond their dtype."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return frozenset()
    return frozenset(_READ_WEIGHT.findall(source))


@contextlib.contextmanager
def _own_errors(what: str) -> Iterator[None]:
    """Convert errors of a model's code within the block to UnhostedError."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (IMPLEMENTATION,):
            raise UnhostedError(NO_INTERFACE) from None
        line = (str(error).strip() or type(error).__name__).splitlines()[0][:_MAX_ERROR]
        raise UnhostedError(f"{what} ({type(error).__name__}: {line})") from error
