"""A head of EAGLE-3's shape in plain PyTorch: for training, and the oracle of what the engine runs.

Row t of a text is of its token t + 1 and the target's hidden states of token t; it guesses token t + 2. Below
a row hang steps: step s is of one more token, and instead of the target's hidden states it has what step
s - 1 put out; it sees the rows of the text up to its own, and the steps before it there.

A head that guesses all levels in one pass (P-EAGLE) has steps of a mask token, and hidden states of its own.
That of EAGLE-1 and 2 is given one hidden state, behind the target's last norm.

Shapes: B sequences, T rows, S steps, N taps, D the head's hidden size, U tokens it can name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specinfer.heads.config import EagleConfig
from specinfer.heads.layers import HeadLayer, Norm, Rotation, rotations, softmax
from specinfer.heads.vocabulary import Tables, Vocabulary


class EagleHead(Vocabulary):
    """The head as a module whose tensors have the names of checkpoints."""

    def __init__(
        self, config: EagleConfig, ids: Sequence[int] | None = None, tables: Tables | None = None
    ) -> None:
        """As Vocabulary."""
        super().__init__(config, ids, tables)
        body, eps = config.body, config.body.norm_eps
        taps, size = len(config.taps), config.target_hidden_size
        self.config = config
        if config.norm_before_fc:
            self.input_norm = Norm(taps * size, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(size, eps) for _ in range(taps))
        early = config.fc_reads_token
        width = taps * size + (body.hidden_size if early else 0)
        self.fc = nn.Linear(width, body.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            HeadLayer(body, reads_token=number == 0 and not early, input_norm=number > 0 or not early)
            for number in range(body.num_layers)
        )
        if not early:
            self.norm = Norm(body.hidden_size, eps)
        if config.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, taps * size))

    def fused(self, taps_BTND: Tensor) -> Tensor:
        """What the head makes of the target's hidden states, [B, T, D]: the features of step 0."""
        if self.config.fc_reads_token:
            return taps_BTND.squeeze(-2)
        if self.config.fc_norm:
            parts = [norm(taps_BTND[..., i, :]) for i, norm in enumerate(self.fc_norm)]
            taps_BTND = torch.stack(parts, dim=-2)
        flat = taps_BTND.flatten(-2)
        out: Tensor = self.fc(self.input_norm(flat) if self.config.norm_before_fc else flat)
        return out.to(self.fc.weight.dtype)

    def forward(self, token_ids_BTS: Tensor, taps_BTND: Tensor) -> Tensor:
        """What the output layer reads of every step of every row, [B, T, S, D].

        `token_ids_BTS[:, t, s]` is the token of row t's step s: in training, token t + 1 + s of the text.
        Sequences may be padded behind their ends: no row sees what comes after it. Where the head guesses all
        levels in one pass only step 0's tokens count.
        """
        body = self.config.body
        assert body.rope is not None
        rows, steps = token_ids_BTS.shape[1:]
        places = torch.arange(rows, device=token_ids_BTS.device)
        feature = self.fused(taps_BTND)
        seen = [_Seen() for _ in self.layers]
        read: list[Tensor] = []
        for step in range(steps):
            token_ids_BT = token_ids_BTS[:, :, step]
            if step and self.config.mask_token_id is not None:
                token_ids_BT = torch.full_like(token_ids_BT, self.config.mask_token_id)
                masked_11ND = self.mask_hidden.view(1, 1, *taps_BTND.shape[2:])
                feature = self.fused(masked_11ND).expand_as(feature)
            embedded = self.embed_tokens(token_ids_BT)
            rotation = rotations(places + step, body.rope, body.head_dim)
            feature = self._layers(embedded, feature, rotation, seen)
            normed = feature if self.config.fc_reads_token else self.norm(feature)
            read.append(normed)
            if self.config.norm_output:
                feature = normed
        return torch.stack(read, dim=2)

    def _layers(self, embedded: Tensor, feature: Tensor, rotation: Rotation, seen: Sequence[_Seen]) -> Tensor:
        x = self.fc(torch.cat((embedded, feature), dim=-1)) if self.config.fc_reads_token else feature
        for number, (layer, before) in enumerate(zip(self.layers, seen, strict=True)):
            assert isinstance(layer, HeadLayer)
            if number == 0 and self.config.fc_reads_token:
                given = x
            elif number == 0:
                normed = layer.hidden_norm(x)
                if self.config.norm_before_residual:
                    x = normed
                given = torch.cat((layer.input_layernorm(embedded), normed), dim=-1)
            else:
                given = layer.input_layernorm(x)
            attention = layer.self_attn
            before.add(attention.keys(given, rotation), attention.values(given))
            x = layer.after_attention(x, before.attended(attention.queries(given, rotation)))
        return x


class _Seen:
    """Keys and values of one layer: of the text's rows, then of each step."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []  # [B, T, K, H]
        self._values: list[Tensor] = []

    def add(self, keys_BTKH: Tensor, values_BTKH: Tensor) -> None:
        """Those of the next step."""
        self._keys.append(keys_BTKH)
        self._values.append(values_BTKH)

    def attended(self, q_BTKGH: Tensor) -> Tensor:
        """What the last step's rows find: [B, T, K, G, H]."""
        rows = q_BTKGH.shape[1]
        hidden = torch.ones(rows, rows, dtype=torch.bool, device=q_BTKGH.device).triu(1)
        scores = torch.einsum("btkgh,bskh->btkgs", q_BTKGH, self._keys[0])
        scores = scores.masked_fill(hidden[None, :, None, None, :], float("-inf"))
        own = [torch.einsum("btkgh,btkh->btkg", q_BTKGH, keys)[..., None] for keys in self._keys[1:]]
        weights = softmax(torch.cat((scores, *own), dim=-1))
        found = torch.einsum("btkgs,bskh->btkgh", weights[..., :rows], self._values[0])
        for step, values in enumerate(self._values[1:], start=rows):
            found = found + weights[..., step, None] * values[:, :, :, None, :]
        return found
