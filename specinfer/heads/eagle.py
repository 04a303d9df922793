"""EAGLE heads: `EagleHead`, a module for training and reference, and `EagleModel` for the engine.

Row t of a text reads token t + 1 and the target's hidden states of token t, and guesses token t + 2. A row
has further steps: step s reads one more token and, in place of the target's hidden states, the output of step
s - 1. It attends to the rows of the text up to its own and to the earlier steps of its row.

In the engine the rows of all texts form one batch, attention follows paths of token trees, and the tokens
after a row are nodes of a tree.

Shapes: B sequences, T rows, S steps, N taps, D the head's hidden size, R rows with a guess, U tokens of the
draft vocabulary.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from specinfer.attention.backend import Attend
from specinfer.heads.config import EagleConfig, LayersConfig
from specinfer.heads.layers import HeadLayer, HeadNorm, Rotation, rotation_at, softmax
from specinfer.heads.runner import HeadCache, HeadModel, HeadPass
from specinfer.heads.vocabulary import HeadVocabulary
from specinfer.kernels.product import first_channels
from specinfer.models.config import ModelConfig
from specinfer.models.decoder import Decoder
from specinfer.models.decoder_layer import DecoderLayer
from specinfer.models.language_model import Residual
from specinfer.models.layers import RowNorm
from specinfer.models.weight_memory import Weights
from specinfer.runtime.batch import ModelBatch, Rows, build_batch
from specinfer.runtime.features import TappedRows, joined
from specinfer.runtime.runner import probe_rows

Recursive = TypeVar("Recursive", bound=LayersConfig)


class _Seen:
    """Keys and values of one layer: those of the text's rows, then those of each step."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []  # [B, T, K, H]
        self._values: list[Tensor] = []

    def add(self, keys_BTKH: Tensor, values_BTKH: Tensor) -> None:
        """Append the keys and values of the next step."""
        self._keys.append(keys_BTKH)
        self._values.append(values_BTKH)

    def attended(self, q_BTKGH: Tensor, window: int | None) -> Tensor:
        """Return the attention output of the last step's rows, [B, T, K, G, H]; a window covers all steps."""
        rows = q_BTKGH.shape[1]
        hidden = torch.ones(rows, rows, dtype=torch.bool, device=q_BTKGH.device).triu(1)
        if window is not None:
            hidden |= torch.ones_like(hidden).tril(len(self._keys) - 1 - window)
        scores = torch.einsum("btkgh,bskh->btkgs", q_BTKGH, self._keys[0])
        scores = scores.masked_fill(hidden[None, :, None, None, :], float("-inf"))
        own = [torch.einsum("btkgh,btkh->btkg", q_BTKGH, keys)[..., None] for keys in self._keys[1:]]
        weights = softmax(torch.cat((scores, *own), dim=-1))
        found = torch.einsum("btkgs,bskh->btkgh", weights[..., :rows], self._values[0])
        for step, values in enumerate(self._values[1:], start=rows):
            found = found + weights[..., step, None] * values[:, :, :, None, :]
        return found


class RecursiveHead(HeadVocabulary):
    """A head whose steps read a token and the step before, as a module with names of checkpoints."""

    body: ModelConfig
    layers: nn.ModuleList
    norm: HeadNorm
    feeds_normed: bool  # True if the next step reads the output behind the norm

    @abstractmethod
    def fused(self, taps_BTND: Tensor) -> Tensor:
        """Project the target's hidden states to the features of step 0, [B, T, D]."""

    @abstractmethod
    def entered(self, layer: HeadLayer, embedded: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream, and the input of the first layer's q, k and v."""

    def forward(self, token_ids_BTS: Tensor, taps_BTND: Tensor) -> Tensor:
        """Return the input of the output layer for every step of every row, [B, T, S, D].

        `token_ids_BTS[:, t, s]` is the token of step s of row t: in training, token t + 1 + s of the text.
        Sequences may be padded at their ends, because attention is causal.
        """
        body = self.body
        assert body.rope is not None
        rows, steps = token_ids_BTS.shape[1:]
        places = torch.arange(rows, device=token_ids_BTS.device)
        feature = self.fused(taps_BTND)
        seen = [_Seen() for _ in self.layers]
        read: list[Tensor] = []
        for step in range(steps):
            embedded = self.embed_tokens(token_ids_BTS[:, :, step])
            rotation = rotation_at(places + step, body.rope, body.head_dim)
            feature = self._layers(embedded, feature, rotation, seen)
            normed = self.norm(feature)
            read.append(normed)
            if self.feeds_normed:
                feature = normed
        return torch.stack(read, dim=2)

    def _layers(self, embedded: Tensor, x: Tensor, rotation: Rotation, seen: Sequence[_Seen]) -> Tensor:
        for number, (layer, before) in enumerate(zip(self.layers, seen, strict=True)):
            assert isinstance(layer, HeadLayer)
            if number == 0:
                x, given = self.entered(layer, embedded, x)
            else:
                given = layer.input_layernorm(x)
            attention = layer.self_attn
            before.add(attention.keys(given, rotation), attention.values(given))
            window = self.body.layer_windows[number]
            x = layer.after_attention(x, before.attended(attention.queries(given, rotation), window))
        return x


class EagleHead(RecursiveHead):
    """An EAGLE head."""

    def __init__(self, config: EagleConfig, ids: Sequence[int] | None = None) -> None:
        """See HeadVocabulary."""
        super().__init__(config, ids)
        body, eps = config.body, config.body.norm_eps
        taps, size = len(config.taps), config.target_hidden_size
        self.config, self.body = config, body
        self.feeds_normed = config.norm_output
        if config.norm_before_fc:
            self.input_norm = HeadNorm(taps * size, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(HeadNorm(size, eps) for _ in range(taps))
        self.fc = nn.Linear(taps * size, body.hidden_size, bias=False)
        self.layers = nn.ModuleList(
            HeadLayer(body, reads_token=number == 0) for number in range(body.num_layers)
        )
        self.norm = HeadNorm(body.hidden_size, eps)

    def fused(self, taps_BTND: Tensor) -> Tensor:
        """See RecursiveHead."""
        if self.config.fc_norm:
            parts = [norm(taps_BTND[..., i, :]) for i, norm in enumerate(self.fc_norm)]
            taps_BTND = torch.stack(parts, dim=-2)
        flat = taps_BTND.flatten(-2)
        out: Tensor = self.fc(self.input_norm(flat) if self.config.norm_before_fc else flat)
        return out.to(self.fc.weight.dtype)

    def entered(self, layer: HeadLayer, embedded: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """See RecursiveHead."""
        normed = layer.hidden_norm(x)
        if self.config.norm_before_residual:
            x = normed
        return x, torch.cat((layer.input_layernorm(embedded), normed), dim=-1)


@dataclass(frozen=True, slots=True)
class EagleText:
    """Rows of one text in a pass: tokens with the target's hidden states, or nodes with the head's.

    Positions of `rows` count from the start of their block table, which is at position `shift` of the text.
    """

    rows: Rows
    shift: int
    states: Sequence[TappedRows] = ()  # the target's hidden states, one for each row; or
    fed_TD: Tensor | None = None  # the head's output at the parent rows


class RecursiveModel(HeadModel[Recursive, EagleText]):
    """A head whose rows read a token and the target's hidden states, or its own output at the row before."""

    def guess(self, texts: Sequence[EagleText], cache: HeadCache) -> HeadPass:
        """See HeadModel. The state of a text is the input of its next rows: [rows with a guess, D]."""
        batch = self.batch(texts, cache.block_size)
        feature_TD = torch.cat(
            [self.fused(joined(text.states)) if text.fed_TD is None else text.fed_TD for text in texts]
        )
        attend = cache.attention.bind(batch.paths)
        read_TD, fed_TD = self.run(batch.token_ids_T, feature_TD, batch.positions_T, attend)
        rows = [text.rows for text in texts]
        ends = accumulate(len(part.token_ids) for part in rows)
        made = [
            fed_TD[end - (len(part.token_ids) - part.logits_from) : end]
            for part, end in zip(rows, ends, strict=True)
        ]
        read_RD = read_TD if batch.logit_rows is None else read_TD.index_select(0, batch.logit_rows)
        return HeadPass(made, read_RD)

    def batch(self, texts: Sequence[EagleText], block_size: int) -> ModelBatch:
        """Return the rows of these texts; each attends to its text and to its ancestors."""
        rows = [text.rows for text in texts]
        batch = build_batch(rows, block_size=block_size, device=self.device)
        if any(text.shift for text in texts):
            shifts = np.repeat([text.shift for text in texts], [len(part.token_ids) for part in rows])
            positions_T = batch.positions_T + torch.from_numpy(shifts).to(self.device)
            batch = replace(batch, positions_T=positions_T)
        return batch

    def fused(self, taps_TND: Tensor) -> Tensor:
        """Return the features of the target's hidden states, [T, D]: by default its last norm's output."""
        return self._target.final_norm(Residual(taps_TND[:, 0].contiguous()))

    @abstractmethod
    def run(
        self, token_ids_T: Tensor, feature_TD: Tensor, positions_T: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Return the input of the output layer and the feature for child rows, both [T, D].

        `feature_TD` may be overwritten.
        """

    def probe(self, rows: int, block_size: int) -> list[EagleText]:
        """See HeadModel."""
        part = probe_rows(rows, block_size, self._target.config.vocab_size)
        return [EagleText(part, 0, self.zero_states(rows))]


class EagleModel(RecursiveModel[EagleConfig]):
    """An EAGLE head computed with the kernels.

    The q, k and v projections of the first layer read a token's embedding and the hidden state, concatenated.
    """

    def __init__(self, head: EagleConfig, weights: Weights, target: Decoder, ids: Sequence[int]) -> None:
        """See HeadModel."""
        super().__init__(head, weights, target, ids)
        body = head.body

        def norm(name: str) -> RowNorm:
            return RowNorm.of(name, body, weights)

        self._head = weights.linear("lm_head")
        self._input_norm = norm("input_norm") if head.norm_before_fc else None
        self._fc_norms = [norm(f"fc_norm.{i}") for i in range(len(head.taps))] if head.fc_norm else []
        self._fc = weights.linear("fc")
        self._first = DecoderLayer(0, body, weights, "layers.0", input_norm=False)
        self._of_token = norm("layers.0.input_layernorm")
        self._of_hidden = norm("layers.0.hidden_norm")
        self._others = [DecoderLayer(i, body, weights, f"layers.{i}") for i in range(1, body.num_layers)]
        self._norm = norm("norm")

    def fused(self, taps_TND: Tensor) -> Tensor:
        """See RecursiveModel."""
        if self._fc_norms:
            parts = [norm(taps_TND[:, i].contiguous()) for i, norm in enumerate(self._fc_norms)]
            flat = torch.cat(parts, dim=-1)
        else:
            flat = taps_TND.flatten(1)
        return self._fc(flat if self._input_norm is None else self._input_norm(flat))

    def run(
        self, token_ids_T: Tensor, feature_TD: Tensor, positions_T: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """See RecursiveModel."""
        rope = self._ropes[0].at(positions_T)
        embedded_TD = self.embedded(token_ids_T, positions_T)
        hidden_TD = self._of_hidden(feature_TD)
        given_TC = torch.cat((self._of_token(embedded_TD), hidden_TD), dim=-1)
        x_TD = hidden_TD if self.head.norm_before_residual else feature_TD
        y_TD = self._first.of_normed(x_TD, given_TC, rope, attend)
        for layer in self._others:
            y_TD = layer(x_TD, y_TD, rope, attend)
        read_TD = self._norm(x_TD, y_TD)
        return read_TD, read_TD if self.head.norm_output else x_TD

    def logits(self, h_RD: Tensor) -> Tensor:
        """See HeadModel."""
        return self._head(h_RD)

    def first_logits(self, count: int) -> Callable[[Tensor], Tensor] | None:
        """See HeadModel."""
        return first_channels(self._head, count)
