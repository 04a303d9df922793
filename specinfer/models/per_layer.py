"""Per-layer embeddings (Gemma 3n and 4): inputs of every layer beside the residual stream.

Shapes: T rows of a step, D hidden size, L layers, P values of a token for one layer, C = L P.

    inputs   (norm(product(embedding)) + table[token] * sqrt(P)) / sqrt(2); the norm is over P values
    a layer  x += norm(out(act(gate(x)) * its inputs))

The table has most of the bytes of a small model, and one row of it is needed for a token: rows are read from
the file. The inputs are computed here, the terms in decoder_layer.py and in the native call (cpu/layers.cpp).
"""

from typing import Final

import torch
from torch import Tensor

from specinfer.kernels.layer_parts import PerLayerParts
from specinfer.kernels.ops import NormParts
from specinfer.models.altup_config import AltUp
from specinfer.models.config import ModelConfig, PerLayer
from specinfer.models.layers import RowNorm
from specinfer.models.weight_memory import Weights

PER_LAYER_TABLE: Final = "model.embed_tokens_per_layer.weight"
_PRODUCT: Final = "model.per_layer_model_projection"
_NORM: Final = "model.per_layer_projection_norm.weight"
_GATE, _OUT, _AFTER = "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"


class PerLayerInputs:
    """Computes the per-layer inputs of tokens."""

    def __init__(self, config: ModelConfig, own: PerLayer, weights: Weights) -> None:
        self._own = own
        self._ops = weights.kernels.ops
        self._table = weights.rows_on_disk(PER_LAYER_TABLE)
        self._scale = float(torch.tensor(own.size**0.5, dtype=weights.dtype))  # rounded as in transformers
        self._product = weights.linear(_PRODUCT)
        # The product is divided by sqrt(D) before its norm, where the division changes eps alone.
        self._norm = NormParts(weights.tensor(_NORM), config.norm_eps * config.hidden_size)

    def __call__(self, token_ids_T: Tensor, x_TD: Tensor) -> Tensor:
        """The inputs of all layers for tokens with these embeddings, [T, C]."""
        known_T = token_ids_T.where(token_ids_T < self._own.vocab, torch.zeros_like(token_ids_T))
        rows_NC, places_T = self._table.rows(known_T)
        own_TC = self._ops.embed(places_T, rows_NC, self._scale)
        made_TC = self._product(x_TD)
        normed = self._ops.add_norm(made_TC.view(-1, self._own.size), None, self._norm)
        own_TC += normed.view(own_TC.shape)
        own_TC *= 2**-0.5
        return own_TC


def per_layer_parts(
    layer: int, config: ModelConfig, own: PerLayer, weights: Weights, prefix: str
) -> PerLayerParts:
    """The products of a layer whose tensor names start with `prefix`."""
    return PerLayerParts(
        after=RowNorm.of(f"{prefix}.{_AFTER}", config, weights).parts,
        gate=weights.linear(f"{prefix}.{_GATE}"),
        out=weights.linear(f"{prefix}.{_OUT}"),
        first=layer * own.size,
    )


def per_layer_shapes(config: ModelConfig, own: PerLayer) -> dict[str, tuple[int, ...]]:
    """The tensors of per-layer embeddings, by name, with their shapes."""
    hidden, size, layers = config.hidden_size, own.size, config.num_layers
    shapes: dict[str, tuple[int, ...]] = {
        PER_LAYER_TABLE: (own.vocab, layers * size),
        f"{_PRODUCT}.weight": (layers * size, hidden),
        _NORM: (size,),
    }
    for i in range(layers):
        prefix = f"model.layers.{i}"
        shapes[f"{prefix}.{_GATE}.weight"] = size, hidden
        shapes[f"{prefix}.{_OUT}.weight"] = hidden, size
        shapes[f"{prefix}.{_AFTER}.weight"] = (hidden,)
    return shapes


def altup_shapes(config: ModelConfig, own: AltUp) -> dict[str, tuple[int, ...]]:
    """The tensors of several streams (altup.py), by name, with their shapes."""
    hidden, streams, rank = config.hidden_size, own.streams, own.rank
    shapes: dict[str, tuple[int, ...]] = {
        f"model.altup_{name}projections.{i}.weight": (hidden, hidden)
        for name in ("", "unembed_")
        for i in range(streams - 1)
    }
    for i in range(config.num_layers):
        altup, laurel = f"model.layers.{i}.altup", f"model.layers.{i}.laurel"
        shapes[f"{altup}.modality_router.weight"] = streams, hidden
        shapes[f"{altup}.router_norm.weight"] = (hidden,)
        shapes[f"{altup}.prediction_coefs.weight"] = streams * streams, streams
        shapes[f"{altup}.correction_coefs.weight"] = streams, streams
        shapes[f"{altup}.correct_output_scale"] = (hidden,)
        shapes[f"{laurel}.linear_left.weight"] = rank, hidden
        shapes[f"{laurel}.linear_right.weight"] = hidden, rank
        shapes[f"{laurel}.post_laurel_norm.weight"] = (hidden,)
    return shapes
