"""AssistantModel: Gemma 4's assistants in the engine.

    row       a token's embedding and a hidden state of the target's size, concatenated and projected
    layers    attend to the text before the root in the target's caches; nodes of the tree have no keys
    outputs   logits, and projected back the hidden state that child rows read

All rows of a tree have the position of its root, as in training.

Shapes: T rows, R rows with a guess, D the target's hidden size, A the assistant's, N clusters, K tokens of a
cluster, V tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specinfer.attention.backend import Attend, Paths
from specinfer.heads.assistant_layout import CENTROIDS
from specinfer.heads.config import AssistantConfig
from specinfer.heads.eagle import EagleText, RecursiveModel
from specinfer.heads.runner import HeadCache
from specinfer.kernels.product import first_channels
from specinfer.models.decoder import Decoder
from specinfer.models.decoder_layer import DecoderLayer
from specinfer.models.layers import RowNorm, turns
from specinfer.models.weight_memory import Weights
from specinfer.runtime.batch import ModelBatch
from specinfer.runtime.kv_cache import KvCache
from specinfer.runtime.runner import probe_rows


class AssistantModel(RecursiveModel[AssistantConfig]):
    """An assistant computed with the kernels."""

    def __init__(
        self, head: AssistantConfig, weights: Weights, target: Decoder, order: Sequence[int]
    ) -> None:
        """`order` are the tokens cluster by cluster; see HeadModel."""
        super().__init__(head, weights, target, range(head.vocab_size))
        body = head.body
        self._enter, self._leave = weights.linear("pre_projection"), weights.linear("post_projection")
        self._layers = [DecoderLayer(i, body, weights, f"layers.{i}") for i in range(body.num_layers)]
        self._norm = RowNorm.of("norm", body, weights)
        if head.clusters:
            self._order_NK = torch.tensor(order, device=self.device).view(head.clusters, -1)
            # The rows of a cluster lie side by side, as its tokens get their logits together.
            table_VA = weights.tensor("embed_tokens.weight").index_select(0, self._order_NK.flatten())
            self._table_NKA = table_VA.view(head.clusters, -1, head.hidden_size)
            self._centroids = weights.linear(CENTROIDS, precise=True)
        else:
            self._output = weights.linear("lm_head")

    def cache(self, num_blocks: int, block_size: int, target: KvCache | None) -> HeadCache:
        """See HeadModel: the target's keys and values, which are only read."""
        assert target is not None, "an assistant has its target's cache"
        layers = [layer or 0 for layer in self.head.sources(self._target.config)]
        keys, values = ([kind[layer] for layer in layers] for kind in (target.keys, target.values))
        scales = [target.scales[layer] for layer in layers] if target.scales else ()
        return HeadCache(block_size, target, self.kernels.attention.over(keys, values, scales))

    def batch(self, texts: Sequence[EagleText], block_size: int) -> ModelBatch:
        """See RecursiveModel. All rows have the root's position, and attend to the text before it."""
        roots: list[int] = []
        requests: list[int] = []
        blocks = 0
        for text in texts:
            rows = text.rows
            count, tree = len(rows.token_ids), 1 if rows.parents is None else len(rows.parents)
            root = rows.start + (0 if rows.parents is None else count - tree)
            requests += len(roots), len(roots) + count, blocks, max(root, count)
            roots += [root] * count
            blocks += len(rows.block_table)
        paths = Paths.of(
            *(requests, roots, [0] * (len(roots) + 1), ()),
            tables=[text.rows.block_table for text in texts],
            block_size=block_size,
        )
        token_ids_T = torch.tensor([i for text in texts for i in text.rows.token_ids], device=self.device)
        return ModelBatch(token_ids_T, torch.tensor(roots, device=self.device), paths, None)

    def run(
        self, token_ids_T: Tensor, feature_TD: Tensor, positions_T: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """See RecursiveModel."""
        turned = turns(self._ropes, positions_T)
        x_TA = self._enter(torch.cat((self.embedded(token_ids_T, positions_T), feature_TD), dim=-1))
        y_TA: Tensor | None = None
        for layer in self._layers:
            y_TA = layer(x_TA, y_TA, turned[layer.parts.rope], attend)
        read_TA = self._norm(x_TA, y_TA)
        return read_TA, self._leave(read_TA)

    def logits(self, h_RA: Tensor) -> Tensor:
        """Return logits [R, V] for input rows of the output layer.

        Tokens of other clusters have 1 less than the smallest logit of their row, as in transformers.
        """
        if not self.head.clusters:
            return self._output(h_RA)
        rows_RA = h_RA.float()
        chosen_RN = self._centroids(rows_RA).topk(self.head.chosen).indices
        logits_RV = rows_RA.new_empty(len(rows_RA), self.head.vocab_size)
        for row_A, chosen_N, out_V in zip(rows_RA, chosen_RN, logits_RV, strict=True):
            found = self._table_NKA.index_select(0, chosen_N).flatten(0, 1).float() @ row_A
            out_V.fill_(found.min() - 1).index_copy_(0, self._order_NK[chosen_N].flatten(), found)
        return logits_RV

    def first_logits(self, count: int) -> Callable[[Tensor], Tensor] | None:
        """See HeadModel."""
        return None if self.head.clusters else first_channels(self._output, count)

    def probe(self, rows: int, block_size: int) -> list[EagleText]:
        """See HeadModel."""
        part = replace(probe_rows(rows, block_size, self._target.config.vocab_size), start=rows)
        return [EagleText(part, 0, self.zero_states(rows))]
