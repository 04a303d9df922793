"""Parts of DFlash 2: a block head with convolutions along a block, and a selector of candidates.

    convolution   y[t] = sum over taps k of x[t - k] * (base[k] + delta[t, k]), before and behind attention
                  and MLP; rows before the block are 0. Groups of channels share deltas, which are
                  projections of the input before attention or MLP
    selector      of a row's likeliest tokens b, behind token a: logit[b] + sum(A[a] * projected(h) * B[b])

Shapes: T rows, R rows with a guess, D hidden size, K taps, G groups of channels, V tokens, S selector's rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.attention.backend import Attend, Rotation
from specinfer.heads.config import BlockConfig
from specinfer.kernels.product import Product
from specinfer.models.config import ModelConfig
from specinfer.models.decoder_layer import BEFORE_ATTENTION, BEFORE_MLP, DecoderLayer
from specinfer.models.weight_memory import Weights

_CONVOLUTIONS: Final = ("attention_conv", "mlp_conv")
_TABLES: Final = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
_PROJECTION: Final = "candidate_selector.hidden_projection"


def dflash2_shapes(head: BlockConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that a head has beside those of the first DFlash."""
    size, taps, rank = head.hidden_size, head.conv_taps, head.selector_rank
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(head.body.num_layers if taps else 0):
        for name in _CONVOLUTIONS:
            shapes[f"layers.{layer}.{name}.base_kernel"] = 2, taps, size
            deltas = 2 * taps * (size // head.conv_group)
            shapes[f"layers.{layer}.{name}.kernel_projection.weight"] = deltas, size
    if rank:
        shapes |= dict.fromkeys(_TABLES, (head.vocab_size, rank)) | {f"{_PROJECTION}.weight": (rank, size)}
    return shapes


@dataclass(frozen=True, slots=True)
class Convolution:
    """The convolutions around attention or MLP of a layer."""

    base_2KD: Tensor
    projection: Product  # from a row to both deltas

    @classmethod
    def of(cls, name: str, weights: Weights) -> Self:
        """Those with tensors of this name."""
        return cls(weights.tensor(f"{name}.base_kernel"), weights.linear(f"{name}.kernel_projection"))

    def before(self, x_TD: Tensor, places_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of attention or MLP, and the deltas behind it; `places_T` are rows of blocks."""
        deltas = self.projection(x_TD).view(len(x_TD), 2, self.base_2KD.shape[1], -1)
        return _convolved(x_TD, self.base_2KD[0], deltas[:, 0], places_T), deltas[:, 1]

    def behind(self, y_TD: Tensor, delta_TKG: Tensor, places_T: Tensor) -> Tensor:
        """Return its output, [T, D]."""
        return _convolved(y_TD, self.base_2KD[1], delta_TKG, places_T)


def _convolved(x_TD: Tensor, base_KD: Tensor, delta_TKG: Tensor, places_T: Tensor) -> Tensor:
    made_TD = torch.zeros_like(x_TD)
    for tap, base_D in enumerate(base_KD):
        kernel_TD = base_D + delta_TKG[:, tap].repeat_interleave(len(base_D) // delta_TKG.shape[-1], dim=-1)
        earlier_TD = F.pad(x_TD, (0, 0, tap, 0))[: len(x_TD)]
        made_TD += earlier_TD * kernel_TD * (places_T >= tap)[:, None]
    return made_TD


class ConvolvedLayer(DecoderLayer):
    """A layer with convolutions around attention and MLP."""

    __slots__ = ("_convolutions",)

    def __init__(self, layer: int, config: ModelConfig, weights: Weights, prefix: str) -> None:
        super().__init__(layer, config, weights, prefix)
        self._convolutions = [Convolution.of(f"{prefix}.{name}", weights) for name in _CONVOLUTIONS]

    def of_block(
        self, x_TD: Tensor, y_TD: Tensor | None, rope: Rotation, attend: Attend, places_T: Tensor
    ) -> Tensor:
        """Return the term to be added to x, [T, D]; x += y in place. `places_T` are the rows of blocks."""
        of_attention, of_mlp = self._convolutions
        given_TD, delta_TKG = of_attention.before(self.normed(x_TD, y_TD, BEFORE_ATTENTION), places_T)
        y_TD = of_attention.behind(self.attended(given_TD, rope, attend), delta_TKG, places_T)
        given_TD, delta_TKG = of_mlp.before(self.normed(x_TD, y_TD, BEFORE_MLP), places_T)
        return of_mlp.behind(self.mlp_output(given_TD, None, x_TD), delta_TKG, places_T)


@dataclass(frozen=True, slots=True)
class Selector:
    """Chooses among a row's likeliest tokens behind a token."""

    before_VS: Tensor
    named_VS: Tensor
    projection: Product
    candidates: int

    @classmethod
    def of(cls, head: BlockConfig, weights: Weights) -> Self:
        """That of a head."""
        before_VS, named_VS = map(weights.tensor, _TABLES)
        return cls(before_VS, named_VS, weights.linear(_PROJECTION), head.candidates)

    def logits(self, logits_RV: Tensor, read_RD: Tensor, token_ids: Sequence[int]) -> Tensor:
        """Return the logits behind these tokens, float32 [R, V], -inf for tokens that are not candidates.

        `logits_RV` and `read_RD` are output and input of the output layer.
        """
        ids_R = torch.tensor(token_ids, device=logits_RV.device)
        likeliest = logits_RV.float().topk(self.candidates)
        context_RS = self.before_VS[ids_R].float() * self.projection(read_RD).float()
        found = torch.einsum("rs,rcs->rc", context_RS, self.named_VS[likeliest.indices].float())
        made_RV = torch.full(logits_RV.shape, float("-inf"), device=logits_RV.device)
        return made_RV.scatter_(1, likeliest.indices, likeliest.values + found)
