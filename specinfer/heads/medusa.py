"""Medusa's heads: as a module, as the engine runs them, and their checkpoints.

All levels are products with one hidden state of a text, so nothing is cached. Tensors go by vLLM's names:

Medusa    {medusa_num_heads, medusa_num_layers}; tensors I.J.linear.weight and I.J.linear.bias of layer J
          of head I, and I.LAST.weight, its output layer; medusa_lm_head.safetensors; no sizes
vLLM      {model_type: medusa, num_heads, num_hidden_layers, hidden_size, vocab_size}; tensors
          blocks.I.layers.J.weight, lm_heads.I.weight; truncated_vocab_size and token_map: which tokens
          output layers have rows of, in any order, unless they have all;
          original_lm_head: all heads share one

Shapes: B texts, L levels, D the target's hidden size, U tokens the heads can name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specinfer.errors import ModelError, ModelFileError
from specinfer.heads.config import MedusaConfig
from specinfer.heads.runner import HeadCache, HeadModel, HeadPass
from specinfer.heads.speculators import flag
from specinfer.heads.vocabulary import ChosenRows, Entries, id_maps, whole_numbers
from specinfer.models.fields import count, integer
from specinfer.models.language_model import LayeredModel, Residual
from specinfer.models.safetensors import TensorEntry
from specinfer.models.weight_memory import Weights
from specinfer.runtime.features import TappedRows, joined

TOKEN_MAP: Final = "token_map"
_COUNTS: Final = {"num_heads": "medusa_num_heads", "num_hidden_layers": "medusa_num_layers"}
_PREFIX: Final = re.compile(r"^medusa_heads?\.")
_LAYER: Final = re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$")
_OUTPUT: Final = re.compile(r"^(\d+)\.(\d+)\.weight$")


class ResidualLayers(nn.Module):
    """The layers of one head, each x + silu(W x + b)."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=config.bias) for _ in range(config.num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHead(nn.Module):
    """All heads of a checkpoint as a module whose tensors have vLLM's names."""

    def __init__(self, config: MedusaConfig, ids: Sequence[int]) -> None:
        """`ids` are the tokens the heads can name, ascending."""
        super().__init__()
        self.config = config
        self.ids = torch.tensor(ids)
        self.blocks = nn.ModuleList(ResidualLayers(config) for _ in range(config.depth))
        self.lm_heads = nn.ModuleList(
            nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            for _ in range(config.output_layers)
        )

    def forward(self, h: Tensor) -> Tensor:
        """The logits of every level, [..., L, U], of what the target's last norm puts out, [..., D].

        Of token t's level i guesses token t + 2 + i: the target itself says token t + 1.
        """
        levels = [
            self.lm_heads[0 if self.config.shared_head else level](block(h))
            for level, block in enumerate(self.blocks)
        ]
        return torch.stack(levels, dim=-2)


@dataclass(frozen=True, slots=True)
class MedusaText:
    """One text's share of a pass: the hidden state it ends in, and how many levels are guessed of it."""

    state: TappedRows
    levels: int


class MedusaModel(HeadModel[MedusaConfig, MedusaText]):
    """The heads over products of the kernels."""

    def __init__(
        self, head: MedusaConfig, weights: Weights, target: LayeredModel, ids: Sequence[int]
    ) -> None:
        """As HeadModel; `target` has the norm behind which hidden states are read."""
        super().__init__(head, weights, target, ids)
        self._blocks = [
            [
                weights.linear(f"blocks.{level}.layers.{layer}", bias=head.bias)
                for layer in range(head.num_layers)
            ]
            for level in range(head.depth)
        ]
        self._heads = [weights.linear(f"lm_heads.{level}") for level in range(head.output_layers)]

    def guess(self, texts: Sequence[MedusaText], cache: HeadCache | None = None) -> HeadPass:
        """As HeadModel says; all texts have as many levels, and a text's rows are these."""
        count = texts[0].levels
        h_BD = self._target.final_norm(Residual(joined([text.state for text in texts])[:, 0]))
        read: list[Tensor] = []
        for block in self._blocks[:count]:
            x_BD = h_BD
            for layer in block:
                x_BD = x_BD + F.silu(layer(x_BD))
            read.append(x_BD)
        logits = [self._heads[0 if self.head.shared_head else level](x_BD) for level, x_BD in enumerate(read)]
        read_RD, logits_RU = (torch.stack(levels, dim=1).flatten(0, 1) for levels in (read, logits))
        return HeadPass([None] * len(texts), read_RD, logits_RU)

    def probe(self, rows: int, block_size: int) -> list[MedusaText]:
        """As HeadModel says, all levels of texts of which two tokens each are read, as a block head's are."""
        [state] = self.zero_states(1)
        return [MedusaText(state, self.head.depth)] * -(-rows // 2)


def is_medusa(c: Mapping[str, object]) -> bool:
    """Whether a config.json describes Medusa's heads, and not a model that has them inside."""
    kind = c.get("model_type")
    return kind == "medusa" or (not kind and "medusa_num_heads" in c)


def medusa_name(c: Mapping[str, object], name: str) -> str:
    """A tensor's name in vLLM's layout; a name that is of no layout stays as it is."""
    name = _PREFIX.sub("", name)
    if layer := _LAYER.match(name):
        return f"blocks.{layer[1]}.layers.{layer[2]}.{layer[3]}"
    if (output := _OUTPUT.match(name)) and int(output[2]) == _count(c, "num_hidden_layers"):
        return f"lm_heads.{output[1]}.weight"
    return "lm_heads.0.weight" if name == "lm_head.weight" else name


def medusa_config(
    c: Mapping[str, object], target_layers: int, shapes: Mapping[str, Sequence[int]]
) -> MedusaConfig:
    """The heads that a config.json describes, with tensors of these shapes under vLLM's names.

    Raises ModelError on anything unsupported.
    """
    output = shapes.get("lm_heads.0.weight", ())
    rows, width = output if len(output) == 2 else (None, None)
    scale = c.get("logit_scale", 1.0)
    if scale != 1.0:
        raise ModelError(f"logit_scale is {scale!r}; supported: Medusa heads whose logits are not scaled")
    vocab = count(c, "vocab_size", rows)
    shared = flag(c, "original_lm_head", False)
    truncated = c.get("truncated_vocab_size")
    return MedusaConfig(
        taps=(target_layers,),
        target_hidden_size=count(c, "hidden_size", width),
        vocab_size=vocab,
        draft_vocab_size=vocab if truncated is None else count(c, "truncated_vocab_size"),
        depth=_count(c, "num_heads"),
        num_layers=_count(c, "num_hidden_layers"),
        bias="blocks.0.layers.0.bias" in shapes,
        shared_head=shared,
        own_head=not shared or rows is not None,
    )


def _count(c: Mapping[str, object], name: str) -> int:
    """A number by vLLM's name or Medusa's own."""
    return integer(c, name if name in c else _COUNTS[name])


def named_by_map(path: Path, config: MedusaConfig, entries: Entries) -> tuple[Sequence[int], Entries]:
    """The tokens that Medusa's heads can name, ascending, and the tensors with their rows in this order."""
    named, vocab = config.draft_vocab_size, config.vocab_size
    if named == vocab:  # then vLLM ignores a map: rows are in the order of tokens
        return range(vocab), {name: entry for name, entry in entries.items() if name != TOKEN_MAP}
    if TOKEN_MAP not in entries:
        raise ModelFileError(f"{path} can name {named} of {vocab} tokens, and lacks {TOKEN_MAP!r}")
    tokens = whole_numbers(path, entries, TOKEN_MAP, named)
    ids, order = tokens.sort()
    try:
        id_maps(ids.tolist(), vocab)
    except ModelError as error:
        raise ModelFileError(f"{path}: tensor {TOKEN_MAP!r} is damaged: {error}") from error
    chosen = dict(entries)
    del chosen[TOKEN_MAP]
    for name in [name for name in chosen if name.startswith("lm_heads.")]:
        entry = entries[name]
        assert isinstance(entry, TensorEntry)
        if entry.shape[:1] == (vocab,):
            chosen[name] = ChosenRows(entry, ids.tolist())
        elif entry.shape[:1] == (named,):
            chosen[name] = ChosenRows(entry, order.tolist())
    return ids.tolist(), chosen
