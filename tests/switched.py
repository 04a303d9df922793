"""Tiny random decoders that together use every switch of ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from specinfer.kernels.choice import Kernels
from specinfer.models.config import Activation, Experts, Family, ModelConfig, Norm, NormPlace, QkNorm
from specinfer.models.decoder import Decoder, decoder_shapes
from specinfer.models.positions import Alibi, Rope
from specinfer.models.weight_memory import Weights
from specinfer.models.weight_reader import WeightReader
from specinfer.progress import NoProgress
from specinfer.speculation_config import Quantization

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
    "sinks": replace(PLAIN, attention_sinks=True, qkv_bias=True, o_bias=True),
    "starcoder": replace(
        _LAYER_NORM,
        rope=None,
        learned_positions=True,
        num_kv_heads=1,
        gated_mlp=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        activation=Activation.GELU_TANH,
    ),
}


class RandomFile:
    """Random tensors for the names that a decoder reads."""

    def __init__(self, config: ModelConfig) -> None:
        self.path = Path("random")
        self._tensors: dict[str, Tensor] = {}
        chance = torch.Generator().manual_seed(3)
        for name, shape in decoder_shapes(config).items():
            middle = 1.0 - config.norm_weight_offset if "norm.weight" in name else 0.0
            self._tensors[name] = middle + 0.2 * torch.randn(shape, generator=chance)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        return self._tensors[name][start:stop]


def build(
    config: ModelConfig,
    kernels: Kernels,
    dtype: torch.dtype = torch.float32,
    quantization: Quantization = "none",
) -> Decoder:
    """Build a decoder of this config; its tensors depend only on the order of their names."""
    with WeightReader(RandomFile(config), dtype, NoProgress(), quantization) as reader:
        return Decoder(config, Weights(reader, torch.device("cpu"), kernels))
