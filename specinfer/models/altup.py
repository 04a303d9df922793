"""Gemma 3n: several residual streams, one of them computed by layers, the others predicted (AltUp).

Shapes: T rows of a step, S streams (4), D hidden size, F MLP size.

    predict   each stream is the sum of all, with factors made from the active one
    layer     an ordinary layer of the active stream, beside it a product of low rank (LAuReL)
    correct   each stream moves as the active one has, by a factor of its own
    inputs    the term of per-layer inputs is added to the other streams

A layer runs op by op, with about 25 calls, which take some microseconds each. Every operation is element by
element, or over single rows, so that a row's values depend on no other row.
"""

from typing import Final

import torch
from torch import Tensor

from specinfer.attention.backend import Attend, Rotation
from specinfer.kernels.low_rank import AdaptedLayer
from specinfer.models.config import ModelConfig
from specinfer.models.decoder import Decoder
from specinfer.models.decoder_layer import AFTER_ATTENTION, BEFORE_ATTENTION, BEFORE_MLP, DecoderLayer
from specinfer.models.language_model import PassContext, Residual
from specinfer.models.layers import RowNorm, turns
from specinfer.models.weight_memory import Weights

_ENTER, _LEAVE = "model.altup_projections", "model.altup_unembed_projections"
_SMALLEST: Final = 1e-5  # mean square of a stream before it is scaled


class AltUpLayer(DecoderLayer):
    """One layer: a step of all streams."""

    __slots__ = ("_altup", "_laurel", "_laurel_norm", "_made", "_router", "_router_norm", "_scale")

    def __init__(self, layer: int, config: ModelConfig, weights: Weights, prefix: str) -> None:
        super().__init__(layer, config, weights, prefix)
        assert config.altup is not None, "another decoder has other layers"
        self._altup = config.altup
        self._router = weights.linear(f"{prefix}.altup.modality_router", precise=True)
        self._router_norm = RowNorm.of(f"{prefix}.altup.router_norm", config, weights)
        # coefficients of the predictions, and of the corrections
        names = "prediction_coefs", "correction_coefs"
        self._made = tuple(weights.exact(f"{prefix}.altup.{name}.weight") for name in names)
        self._scale = weights.tensor(f"{prefix}.altup.correct_output_scale")
        self._laurel = tuple(weights.linear(f"{prefix}.laurel.linear_{side}") for side in ("left", "right"))
        self._laurel_norm = RowNorm.of(f"{prefix}.laurel.post_laurel_norm", config, weights)

    def step(
        self,
        x_TSD: Tensor,
        rope: Rotation | None,
        attend: Attend,
        adapted: AdaptedLayer | None,
        per_layer_TC: Tensor | None,
    ) -> Tensor:
        """Return the streams behind the layer, [T, S, D]."""
        active = self._altup.active
        routed_TS = self._routed(x_TSD[:, active].contiguous())
        x_TSD, before_TD = self._ops.predict_streams(x_TSD, routed_TS, self._made[0], active)
        given_TD = self.normed(before_TD, None, BEFORE_ATTENTION)
        left, right = self._laurel
        beside_TD = self._laurel_norm(right(left(given_TD))) + given_TD
        made_TD = self._term(self.attended(given_TD, rope, attend, adapted), AFTER_ATTENTION)
        x_TD = (before_TD + made_TD + beside_TD) * 2**-0.5
        x_TD = x_TD + self._behind_mlp(self.normed(x_TD, None, BEFORE_MLP), adapted, x_TD)
        self._ops.correct_streams(x_TSD, self._routed(x_TD), self._made[1], before_TD, x_TD)
        if per_layer_TC is not None:
            given_TD = x_TSD[:, active] * self._scale if self._altup.scaled else x_TSD[:, active]
            x_TSD[:, 1:] += self._of_inputs(given_TD.contiguous(), per_layer_TC)[:, None]
        return x_TSD

    def _routed(self, x_TD: Tensor) -> Tensor:
        """The router's logits of an active stream, float32 [T, S]."""
        return self._router(self._router_norm(x_TD).float())


class AltUpDecoder(Decoder):
    """A decoder with several streams."""

    layer_class = AltUpLayer

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        assert config.altup is not None, "Decoder computes other models"
        others = range(config.altup.streams - 1)
        self._enter = weights.linear(*(f"{_ENTER}.{i}" for i in others))
        self._leave = [weights.linear(f"{_LEAVE}.{i}") for i in others]

    def embed(self, token_ids_T: Tensor, positions_T: Tensor) -> Residual:
        """The streams' beginnings, [T, S, D]."""
        x_TD = super().embed(token_ids_T, positions_T).x_TD
        others_TSD = self._enter(x_TD).view(len(x_TD), -1, x_TD.shape[1])
        others_TSD = _as_large_as(x_TD[:, None], others_TSD)
        return Residual(torch.cat([x_TD[:, None], others_TSD], 1))

    def run_layers(
        self, residual: Residual, context: PassContext, per_layer_TC: Tensor | None = None
    ) -> tuple[Residual, Tensor | None]:
        """As of every decoder; there are no taps, since heads read one stream alone."""
        x_TSD, turned = residual.x_TD, turns(self._ropes, context.positions_T)
        for i, layer in enumerate(self._layers):
            assert isinstance(layer, AltUpLayer), "made by layer_class"
            adapted = AdaptedLayer.of(context.adapted, i)
            x_TSD = layer.step(x_TSD, turned[layer.parts.rope], context.attend, adapted, per_layer_TC)
        return Residual(x_TSD), None

    def final_norm(self, residual: Residual, rows: Tensor | None = None) -> Tensor:
        """The norm of the streams' mean."""
        x_RSD = residual.x_TD if rows is None else residual.x_TD[rows]
        first_RD = total_RD = x_RSD[:, 0].contiguous()
        for stream, leave in enumerate(self._leave, start=1):
            total_RD = total_RD + _as_large_as(first_RD, leave(x_RSD[:, stream].contiguous()))
        return super().final_norm(Residual(total_RD / (1 + len(self._leave))))


def _as_large_as(x: Tensor, y: Tensor) -> Tensor:
    """Rows y with the root mean square of rows x."""
    wanted, found = ((one * one).mean(-1, keepdim=True) for one in (x, y))
    return y * wanted.sqrt() / found.clamp(min=_SMALLEST).sqrt()
