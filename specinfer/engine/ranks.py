"""Ranks: a target's parts, the processes that have them, and the group they form."""

from __future__ import annotations

import os
import weakref
from typing import Any

from specinfer.engine.drafts import Found
from specinfer.kernels.exchange import SharedExchange, shared_file
from specinfer.kernels.library import Library
from specinfer.models.language_model import LanguageModel
from specinfer.models.weights import weight_bytes
from specinfer.parallel.follower import Settings
from specinfer.parallel.group import LIMIT, Group
from specinfer.parallel.launch import Followers
from specinfer.parallel.share import Share
from specinfer.runtime.sharded import identity_of
from specinfer.speculation_config import Quantization


class Ranks:
    """The ranks of one target on this host, of which this process is rank 0."""

    group: Group  # once they are started

    def __init__(self, found: Found, size: int, *, whole_table: bool) -> None:
        """With `whole_table` each rank has all embeddings, as a draft reads them.

        Raises ConfigError where so many ranks cannot share the model.
        """
        self.found = found
        self.size = size
        self.parts = [Share(rank, size).of(found.config, whole_table=whole_table) for rank in range(size)]
        self._whole_table = whole_table
        self._told = ""

    def start(self, library: Library | None, **how: Any) -> None:
        """Start the followers, which begin to load their parts; `how` are the rest of their Settings.

        Ranks with a library exchange through memory that they share.
        """
        memory = None if library is None else shared_file(library, self.size)
        settings = [
            Settings(
                rank=rank,
                size=self.size,
                model=str(self.found.model.path.resolve()),
                whole_table=self._whole_table,
                limit=LIMIT,
                **how,
            )
            for rank in range(1, self.size)
        ]
        try:
            self._followers = Followers([one.to_json() for one in settings], memory)
            exchange = None
            if library is not None and memory is not None:
                try:
                    exchange = SharedExchange(library, memory, self.size, 0, limit=LIMIT)
                except BaseException:
                    self._followers.close()
                    raise
        finally:
            if memory is not None:
                os.close(memory)
        peers = self._followers
        self.group = Group(0, self.size, peers.links, limit=LIMIT, peers=peers, exchange=exchange)

    def join(self, model: LanguageModel, quantization: Quantization) -> None:
        """Wait for the others, whose model must be this rank's, and meet them; they end when it is let go.

        Raises ModelError where one cannot load it or runs something else, PeerLostError where one ends.
        """
        self._followers.ready(identity_of(model, self.found.model.path, quantization, self.size))
        self._followers.meet(self.group)
        weakref.finalize(model, self.group.free)
        sizes = [weight_bytes(part, model.dtype, model.kernels, quantization) for part in self.parts]
        heads, weights = (
            " + ".join(map(str, numbers))
            for numbers in ([part.num_heads for part in self.parts], [round(size / 1e6) for size in sizes])
        )
        told = f"{self.size} ranks, heads {heads}, weights {weights} MB"
        micros = 1e6 * self.group.seconds(model.config.hidden_size)
        self._told = f"{told}, partial sums over {self.group.transport}, {micros:.0f} us for 16 rows"

    def __str__(self) -> str:
        """Who has what, in a line."""
        return self._told
