"""Ranks: a target's parts, the processes that have them, and the group they form."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

from specinfer.engine.drafts import Found
from specinfer.kernels.exchange import SharedExchange, shared_file
from specinfer.kernels.library import Library
from specinfer.models.language_model import LanguageModel
from specinfer.models.weights import weight_bytes
from specinfer.parallel.follower import Settings
from specinfer.parallel.group import LIMIT, Group
from specinfer.parallel.launch import Followers
from specinfer.parallel.share import Layout
from specinfer.runtime.sharded import identity_of
from specinfer.speculation_config import Quantization


class Ranks:
    """The ranks of one target on this host, of which this process is rank 0."""

    group: Group  # once they are started

    def __init__(self, found: Found, layout: Layout, *, whole_table: bool) -> None:
        """With `whole_table` each rank of the first stage has all embeddings, as a draft reads them.

        Raises ConfigError where so many ranks cannot share the model.
        """
        self.found = found
        self.layout = layout
        self.size = layout.size
        self.parts = [layout.part(rank, found.config, whole_table=whole_table) for rank in range(layout.size)]
        self._whole_table = whole_table
        self._told = ""

    def start(self, library: Library | None, **how: Any) -> None:
        """Start the followers, which begin to load their parts; `how` are the rest of their Settings.

        Ranks of a stage with a library exchange through memory that they share.
        """
        layout, exchange = self.layout, None
        settings = [
            Settings(
                rank=rank,
                size=self.size,
                bounds=layout.bounds,
                model=str(self.found.model.path.resolve()),
                whole_table=self._whole_table,
                limit=LIMIT,
                **how,
            )
            for rank in range(1, self.size)
        ]
        memory: list[int] = []  # of each stage
        try:
            if library is not None and layout.width > 1:
                memory += (shared_file(library, layout.width) for _ in layout.layers)
            peers = self._followers = Followers(
                [one.to_json() for one in settings],
                [memory[rank // layout.width] for rank in range(1, self.size)] if memory else (),
            )
            if library is not None and memory:
                try:
                    exchange = SharedExchange(library, memory[0], layout.width, 0, limit=LIMIT)
                except BaseException:
                    peers.close()
                    raise
        finally:
            for file in memory:
                os.close(file)
        how = {"limit": LIMIT, "exchange": exchange, "bounds": layout.bounds}
        self.group = Group(0, self.size, peers.links, peers=peers, **how)

    def join(self, model: LanguageModel, quantization: Quantization) -> None:
        """Wait for the others, whose model must be this rank's, and meet them; they end when it is let go.

        Raises ModelError where one cannot load it or runs something else, PeerLostError where one ends.
        """
        self._followers.ready(identity_of(model, self.found.model.path, quantization, self.group))
        self._followers.meet(self.group)
        weakref.finalize(model, self.group.free)
        layout, group, size = self.layout, self.group, model.config.hidden_size
        bytes_of = [weight_bytes(part, model.dtype, model.kernels, quantization) for part in self.parts]
        told = [f"{self.size} ranks"]
        if layout.stages > 1:
            told.append(f"{layout.stages} stages of {_sum(layout.layers)} layers")
        if layout.width > 1:
            told.append(f"heads {_sum([part.num_heads for part in self.parts[: layout.width]])}")
        told.append(f"weights {_sum([round(one / 1e6) for one in bytes_of])} MB")
        if layout.width > 1:
            micros = 1e6 * group.seconds(size)
            told.append(f"partial sums over {group.transport}, {micros:.0f} us for 16 rows")
        if layout.stages > 1:
            micros = 1e6 * group.hop_seconds(size, model.dtype)
            told.append(f"16 rows from stage to stage in {micros:.0f} us")
        self._told = ", ".join(told)

    def __str__(self) -> str:
        """Who has what, in a line."""
        return self._told


def _sum(numbers: Sequence[int]) -> str:
    return " + ".join(map(str, numbers))
