"""Medusa heads: the module, the engine's model, and their checkpoint formats.

All levels read one hidden state of a text, so there is no KV cache. Tensors are named as in vLLM:

Medusa    {medusa_num_heads, medusa_num_layers}; tensors I.J.linear.weight and I.J.linear.bias of layer J
          of head I, and I.LAST.weight, its output layer; medusa_lm_head.safetensors; no sizes
vLLM      {model_type: medusa, num_heads, num_hidden_layers, hidden_size, vocab_size}; tensors
          blocks.I.layers.J.weight, lm_heads.I.weight; truncated_vocab_size and token_map: the tokens, in
          any order, that the output layers have rows for (default: all);
          original_lm_head: all heads share one output layer

Shapes: B texts, L levels, D the target's hidden size, U tokens of the draft vocabulary.
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
from specinfer.models.quantized.pieces import TensorEntry
from specinfer.models.weight_memory import Weights
from specinfer.runtime.features import TappedRows, joined

TOKEN_MAP: Final = "token_map"
_COUNTS: Final = {"num_heads": "medusa_num_heads", "num_hidden_layers": "medusa_num_layers"}
_PREFIX: Final = re.compile(r"^medusa_heads?\.")
_LAYER: Final = re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$")
_OUTPUT: Final = re.compile(r"^(\d+)\.(\d+)\.weight$")


class ResidualLayers(nn.Module):
    """Layers of one head, each x + silu(W x + b)."""

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
    """All heads of a checkpoint; the tensors have vLLM's names."""

    def __init__(self, config: MedusaConfig, ids: Sequence[int]) -> None:
        """`ids` is the draft vocabulary, ascending."""
        super().__init__()
        self.config = config
        self.ids = torch.tensor(ids)
        self.blocks = nn.ModuleList(ResidualLayers(config) for _ in range(config.depth))
        self.lm_heads = nn.ModuleList(
            nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            for _ in range(config.output_layers)
        )

    def forward(self, h: Tensor) -> Tensor:
        """Return the logits of every level [..., L, U] for final hidden states after the norm [..., D].

        Level i at token t guesses token t + 2 + i, because the target itself predicts token t + 1.
        """
        levels = [
            self.lm_heads[0 if self.config.shared_head else level](block(h))
            for level, block in enumerate(self.blocks)
        ]
        return torch.stack(levels, dim=-2)


@dataclass(frozen=True, slots=True)
class MedusaText:
    """Input of one text: its last hidden state and the number of levels to guess."""

    state: TappedRows
    levels: int


class MedusaModel(HeadModel[MedusaConfig, MedusaText]):
    """Medusa heads computed with the kernels' products."""

    def __init__(
        self, head: MedusaConfig, weights: Weights, target: LayeredModel, ids: Sequence[int]
    ) -> None:
        """See HeadModel. `target` applies its final norm to the hidden states."""
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
        """See HeadModel. All texts have the same number of levels; each level is a row."""
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
        """See HeadModel. Each text reads two tokens, as for a block head, and guesses all levels."""
        [state] = self.zero_states(1)
        return [MedusaText(state, self.head.depth)] * -(-rows // 2)


def is_medusa(c: Mapping[str, object]) -> bool:
    """Return whether a config.json describes Medusa heads, and not a model that includes them."""
    kind = c.get("model_type")
    return kind == "medusa" or (not kind and "medusa_num_heads" in c)


def medusa_name(c: Mapping[str, object], name: str) -> str:
    """Return a tensor's name in vLLM's layout; an unknown name is returned unchanged."""
    name = _PREFIX.sub("", name)
    if layer := _LAYER.match(name):
        return f"blocks.{layer[1]}.layers.{layer[2]}.{layer[3]}"
    if (output := _OUTPUT.match(name)) and int(output[2]) == _count(c, "num_hidden_layers"):
        return f"lm_heads.{output[1]}.weight"
    return "lm_heads.0.weight" if name == "lm_head.weight" else name


def medusa_config(
    c: Mapping[str, object], target_layers: int, shapes: Mapping[str, Sequence[int]]
) -> MedusaConfig:
    """Return the config for a config.json and the tensors' shapes under vLLM's names.

    Raises ModelError on anything unsupported.
    """
    output = shapes.get("lm_heads.0.weight", ())
    rows, width = output if len(output) == 2 else (None, None)
    scale = c.get("logit_scale", 1.0)
    if scale != 1.0:
        raise ModelError(f"logit_scale is {scale!r}; only Medusa heads without logit scaling are supported")
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
    """Read a number under vLLM's name or Medusa's."""
    return integer(c, name if name in c else _COUNTS[name])


def vocabulary_from_map(path: Path, config: MedusaConfig, entries: Entries) -> tuple[Sequence[int], Entries]:
    """Return the draft vocabulary of Medusa heads, ascending, and the tensors with rows in that order."""
    named, vocab = config.draft_vocab_size, config.vocab_size
    if named == vocab:  # vLLM then ignores the map: rows are in the order of token ids
        return range(vocab), {name: entry for name, entry in entries.items() if name != TOKEN_MAP}
    if TOKEN_MAP not in entries:
        raise ModelFileError(
            f"{path} has a draft vocabulary of {named} of {vocab} tokens but lacks {TOKEN_MAP!r}"
        )
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
