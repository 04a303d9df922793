"""Tiny random decoders that together use every switch of ModelConfig."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from specinfer.kernels.choice import Kernels, draft_kernels
from specinfer.kernels.recurrence_config import GateNorm, LayerKind, Recurrence
from specinfer.models import config as configs
from specinfer.models.config import Activation, Experts, Family, ModelConfig, Norm, NormPlace, QkNorm
from specinfer.models.decoder import Decoder
from specinfer.models.decoder_shapes import decoder_shapes
from specinfer.models.positions import Alibi, Rope
from specinfer.models.weight_memory import Weights
from specinfer.models.weight_reader import WeightReader
from specinfer.progress import NoProgress
from specinfer.speculation_config import Quantization
from specinfer.tokenizer import Tokenizer
from tests.engines import Tiny
from tests.kernels import kernels

PLAIN: Final = ModelConfig(
    family=Family.LLAMA,
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    rope=Rope(10000.0),
    layer_windows=(None, 5, None),
    tie_embeddings=True,
    attention_scale=0.25,
    max_context=1024,
)
_HEADS: Final = {"heads": 4, "groups": 2, "key_size": 12, "value_size": 16}
_DELTA: Final = Recurrence(
    kind=LayerKind.GATED_DELTA, taps=4, channels=112, **_HEADS, norm=GateNorm.BEFORE, norm_groups=4
)
_MAMBA: Final = Recurrence(
    kind=LayerKind.MAMBA2,
    taps=3,
    channels=112,
    **_HEADS,
    conv_bias=True,
    norm=GateNorm.BEHIND,
    norm_groups=2,
    max_dt=0.9,
)
_LAYER_NORM: Final = replace(PLAIN, norm=Norm.LAYER, norm_bias=True)
SWITCHED: Final[Mapping[str, ModelConfig]] = {
    "falcon": replace(
        _LAYER_NORM,
        num_kv_heads=1,
        parallel_block=True,
        shared_norm=True,
        gated_mlp=False,
        activation=Activation.GELU,
    ),
    "gpt-neox": replace(
        _LAYER_NORM,
        parallel_block=True,
        gated_mlp=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        rope=Rope(10000.0, rotated=8),
        activation=Activation.GELU_TANH,
    ),
    "falcon-rw": replace(
        _LAYER_NORM, rope=None, alibi=Alibi.of(4, rounded=True), gated_mlp=False, activation=Activation.GELU
    ),
    "mpt": replace(
        PLAIN, rope=None, alibi=Alibi.of(4), norm=Norm.LAYER, gated_mlp=False, qkv_clip=0.5, num_kv_heads=4
    ),
    "cohere": replace(PLAIN, norm=Norm.LAYER, parallel_block=True, shared_norm=True, logit_scale=0.0625),
    "olmo2": replace(PLAIN, norm_place=NormPlace.BEHIND, qk_norm=QkNorm.WHOLE),
    "gemma2": replace(
        PLAIN,
        norm_place=NormPlace.BOTH,
        norm_weight_offset=1.0,
        attention_softcap=2.0,
        logit_softcap=3.0,
        embedding_scale=8.0,
        activation=Activation.GELU_TANH,
    ),
    "biases": replace(PLAIN, qkv_bias=True, o_bias=True, mlp_bias=True, activation=Activation.RELU),
    "granite": replace(PLAIN, residual_scale=0.22, logit_scale=0.125, embedding_scale=12.0),
    "smollm3": replace(PLAIN, layers_without_rope=frozenset({0, 1})),
    "gpt-oss": replace(
        PLAIN,
        attention_sinks=True,
        qkv_bias=True,
        o_bias=True,
        activation=Activation.CLAMPED_SWISH,
        experts=Experts(6, 2, 64, normalized=True, bias=True),
    ),
    "gemma4": replace(
        PLAIN,
        norm_place=NormPlace.BOTH,
        qk_norm=QkNorm.HEAD,
        num_layers=6,
        layer_windows=(5, 5, None) * 2,
        local_rope=Rope(10000.0),
        rope=Rope(10000.0, divisors=(1.0,) * 6 + (1e30,) * 6),
        global_heads=configs.LayerHeads(24, 1, values_are_keys=True),
        shared_layers=3,
        layer_inner=(96,) * 3 + (192,) * 3,
        value_norm=True,
        output_factor=True,
        per_layer=configs.PerLayer(16, 48),
        activation=Activation.GELU_TANH,
    ),
    "sinks": replace(PLAIN, attention_sinks=True, qkv_bias=True, o_bias=True),
    "starcoder": replace(
        _LAYER_NORM,
        rope=None,
        learned_positions=True,
        position_offset=2,
        max_context=1022,
        num_kv_heads=1,
        gated_mlp=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        activation=Activation.GELU_TANH,
    ),
    "lfm2": replace(
        PLAIN,
        qk_norm=QkNorm.HEAD,
        layer_kinds=(LayerKind.SHORT_CONV, LayerKind.ATTENTION, LayerKind.SHORT_CONV),
        recurrence=Recurrence(
            kind=LayerKind.SHORT_CONV, taps=3, channels=64, conv_bias=True, bias=True, out_bias=True
        ),
    ),
    "qwen3.5": replace(
        PLAIN,
        norm_weight_offset=1.0,
        qk_norm=QkNorm.HEAD,
        gated_attention=True,
        rope=Rope(10000.0, rotated=8),
        layer_kinds=(LayerKind.GATED_DELTA, LayerKind.ATTENTION, LayerKind.GATED_DELTA),
        recurrence=_DELTA,
    ),
    "qwen3-next": replace(
        PLAIN,
        experts=Experts(6, 2, 64, normalized=True, shared_size=32, dense_layers=frozenset({0})),
        layer_kinds=(LayerKind.GATED_DELTA, LayerKind.GATED_DELTA, LayerKind.ATTENTION),
        recurrence=replace(_DELTA, tiled=True, groups=1, channels=88),
    ),
    "nemotron-h": replace(
        PLAIN,
        gated_mlp=False,
        activation=Activation.RELU2,
        rope=None,
        layer_kinds=(LayerKind.MAMBA2, LayerKind.ATTENTION, LayerKind.NONE),
        layers_without_mlp=frozenset({0}),
        recurrence=_MAMBA,
    ),
    "falcon-h1": replace(
        PLAIN,
        layer_kinds=(LayerKind.BOTH,) * 3,
        recurrence=replace(_MAMBA, norm=GateNorm.NONE, bias=True, min_dt=0.1, max_dt=math.inf),
    ),
}
RECURRENT: Final = [name for name, config in SWITCHED.items() if config.recurrence is not None]


class RandomFile:
    """Random tensors for the names that a decoder reads."""

    def __init__(self, config: ModelConfig, noise: float = 0.0) -> None:
        """With `noise` the model is similar to that without."""
        self.path = Path("random")
        self._tensors: dict[str, Tensor] = {}
        chance = torch.Generator().manual_seed(3)
        for name, shape in decoder_shapes(config).items():
            of_row = 1.0 if "mixer.norm" in name else 1.0 - config.norm_weight_offset
            middle = -1.0 if name.endswith("decay") else of_row if "norm.weight" in name else 0.0
            self._tensors[name] = middle + 0.2 * torch.randn(shape, generator=chance)
        for tensor in self._tensors.values() if noise else ():
            tensor += noise * torch.randn(tensor.shape, generator=chance)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        return self._tensors[name][start:stop]


def build(
    config: ModelConfig,
    chosen: Kernels,
    dtype: torch.dtype = torch.float32,
    quantization: Quantization = "none",
    noise: float = 0.0,
) -> Decoder:
    """Build a decoder of this config; its tensors depend only on the order of their names."""
    with WeightReader(RandomFile(config, noise), dtype, NoProgress(), quantization) as reader:
        return Decoder(config, Weights(reader, torch.device("cpu"), chosen))


def switched_tiny(config: ModelConfig, tokenizer: Tokenizer) -> Tiny:
    """Return a target, a draft that often agrees with it, and one that seldom does."""
    native = kernels("native")
    target, *drafts = (
        build(config, native if not noise else draft_kernels(native), noise=noise)
        for noise in (0.0, 0.02, 0.4)
    )
    return Tiny(target, *drafts, tokenizer=tokenizer)
