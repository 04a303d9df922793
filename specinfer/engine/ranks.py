"""Ranks: the processes that run a target together, their parts of it, and their group."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from specinfer.config import EngineConfig
from specinfer.engine.drafts import FoundModel
from specinfer.errors import ConfigError
from specinfer.kernels.exchange import SharedExchange
from specinfer.kernels.library import Library
from specinfer.models.config import ModelConfig
from specinfer.models.language_model import LanguageModel
from specinfer.models.shard import Layout
from specinfer.models.weight_sizes import part_bytes
from specinfer.option import parse_address
from specinfer.parallel.follower import Settings, SharedDraft
from specinfer.parallel.launch import Followers
from specinfer.parallel.listener import RankListener
from specinfer.parallel.processes import FollowerProcesses
from specinfer.runtime.executor import Host
from specinfer.runtime.sharded import identity_of
from specinfer.speculation_config import Quantization
from specinfer.transport.group import LIMIT, Group
from specinfer.transport.link import read_key


class Ranks:
    """The ranks of one target; this process is rank 0."""

    group: Group  # set by `start`
    hosts: list[Host]  # set by `join`, with the memory that is free after loading

    def __init__(
        self,
        found: FoundModel,
        config: EngineConfig,
        layout: Layout,
        drafts: Mapping[str, tuple[FoundModel, Quantization]],
        *,
        whole_table: bool,
        processes: FollowerProcesses | None,
    ) -> None:
        """Divide the target, and the `drafts` that allow it, among ranks; drafts use the first stage's.

        With `whole_table` each rank of the first stage has all embeddings, which a head reads. `processes`
        are this host's followers if they have been started. Raises ConfigError if the model cannot be divided
        among `layout.size` ranks, or the key is invalid.
        """
        self.found = found
        self.layout = layout
        self.size = layout.size
        self.quantization = config.kind
        self.parts = [layout.part(rank, found.config, whole_table=whole_table) for rank in range(layout.size)]
        # For each rank of the first stage; ranks on other hosts load only the target.
        self.drafts: dict[str, Sequence[ModelConfig]] = {}
        if 1 < layout.width <= config.ranks_here:
            for name, (draft, kind) in drafts.items():
                with suppress(ConfigError):  # it stays whole on rank 0
                    own = layout.of_draft(draft.config, exact=kind == "int8")
                    self.drafts[name] = [own.part(rank, draft.config) for rank in range(layout.width)]
        self._config = config
        self._key = None if config.key_file is None else read_key(config.key_file)
        self._whole_table = whole_table
        self._processes = processes
        self.summary = ""  # the division of the model among the ranks, in a line; set by `join`

    def start(self, library: Library | None, drafts: Sequence[SharedDraft], **settings: Any) -> None:
        """Start the followers, which load their parts.

        Ranks of a stage on one host exchange data through shared memory if they have a library.

        Args:
            library: the native kernels, or None.
            drafts: the drafts that the ranks share.
            **settings: further fields of the followers' Settings.

        Raises:
            ConfigError: ranks of other hosts cannot connect to this one.
            PeerLostError: a rank does not connect.
        """
        width = self.layout.width
        processes = self._processes or FollowerProcesses(self._config.ranks_here, width)
        ended_by: FollowerProcesses | Followers = processes
        try:
            self._followers = ended_by = Followers(processes, self._listener())
            exchange = None
            if library is not None and 0 in processes.memory:
                exchange = SharedExchange(library, processes.memory[0], width, 0, limit=LIMIT)
            self._send_settings(exchange, library is not None, drafts, settings)
        except BaseException:
            ended_by.close()
            raise
        finally:
            processes.close_files()

    def _send_settings(
        self,
        exchange: SharedExchange | None,
        native: bool,
        drafts: Sequence[SharedDraft],
        settings: Mapping[str, Any],
    ) -> None:
        """Send the followers their settings, and form the group."""
        layout, peers = self.layout, self._followers
        width, hosts, addresses = layout.width, peers.hosts, peers.addresses
        shared = [native and len(set(hosts[one : one + width])) == 1 for one in self._stages()]
        peers.send_settings(
            [
                asdict(
                    Settings(
                        rank=rank,
                        model=str(self.found.model.path.resolve()),
                        size=self.size,
                        bounds=layout.bounds,
                        quantization=self.quantization,
                        sum_parts=layout.parts,
                        whole_table=self._whole_table,
                        drafts=drafts if rank < width else (),
                        shared=shared[rank // width],
                        threads=self._config.threads,
                        max_context=self._config.scheduler.max_context,
                        same_host=addresses.count(addresses[rank]),
                        limit=LIMIT,
                        **settings,
                    )
                )
                for rank in range(1, self.size)
            ]
        )
        over_gloo = [rank for rank in range(1, self.size) if width > 1 and not shared[rank // width]]
        self.group = Group(
            0,
            self.size,
            peers.links,
            limit=LIMIT,
            peers=peers,
            exchange=exchange,
            bounds=layout.bounds,
            over_gloo=over_gloo,
        )

    def _stages(self) -> range:
        """Return the first rank of each stage."""
        return range(0, self.size, self.layout.width)

    def _listener(self) -> RankListener | None:
        """Return the listener for ranks of other hosts, or None without them."""
        config = self._config
        if config.master is None:
            return None
        assert self._key is not None, "the config has been checked"
        return RankListener(
            parse_address("master", config.master), self._key, range(config.ranks_here, self.size)
        )

    def check_loading(self) -> None:
        """Raise ModelError if a follower cannot load its part, PeerLostError if one has ended."""
        self._followers.check_loading()

    def join(self, model: LanguageModel) -> None:
        """Wait until all ranks have loaded, and check that their models agree; ranks end with the model.

        Raises ModelError if a rank cannot load its part or has another model, PeerLostError if one ends.
        """
        quantization = self.quantization
        followers = self._followers
        free = followers.ready(identity_of(model, self.found.model.path, quantization, self.group))
        addresses = followers.addresses
        self.hosts = [self._host(address, addresses, free) for address in dict.fromkeys(addresses)]
        followers.connect(self.group, self._key)
        weakref.finalize(model, self.group.free)
        layout, group, size = self.layout, self.group, model.config.hidden_size
        bytes_of = [
            part_bytes(self.found.model, part, model.dtype, model.kernels, quantization)
            for part in self.parts
        ]
        summary = [f"{self.size} ranks"]
        if layout.stages > 1:
            summary.append(f"{layout.stages} stages of {_sum(layout.layers)} layers")
        if layout.width > 1:
            summary.append(f"heads {_sum([part.num_heads for part in self.parts[: layout.width]])}")
        summary.append(f"weights {_sum([round(one / 1e6) for one in bytes_of])} MB")
        if layout.width > 1:
            micros = 1e6 * group.seconds(size)
            summary.append(f"partial sums over {group.transport}, {micros:.0f} us for 16 rows")
        if self.drafts:
            summary.append(f"shared drafts: {len(self.drafts)}")
        if layout.stages > 1:
            micros = 1e6 * group.hop_seconds(size, model.dtype)
            summary.append(f"16 rows from stage to stage in {micros:.0f} us")
        self.summary = ", ".join(summary)

    def _host(self, address: str, addresses: Sequence[str], free: Sequence[int]) -> Host:
        """Return the host of an address, with its free memory after the last of its ranks has loaded."""
        ranks = [rank for rank in range(1, self.size) if addresses[rank] == address]
        parts = [self.parts[rank] for rank in ranks]
        if not address:
            parts += (part for shards in self.drafts.values() for part in shards[1:])
        return Host(address, parts, min((free[rank - 1] for rank in ranks), default=0))


def _sum(numbers: Sequence[int]) -> str:
    return " + ".join(map(str, numbers))
