"""Passes of models on several ranks: rank 0 sends commands, and all ranks run them.

A message is a command for a cache, in words of int32:

    OPEN    cache, the number of its model, blocks, block size, and of recurrent states the slots of requests,
            checkpoints, places for a tree's nodes
    CLOSE   cache
    PASS    cache, whether logits come with it, whether it goes on with the next PASS (runtime/stages.py),
            taps, requests, the tapped layers, and of each request
            start, rows, logits from, blocks, nodes (-1: text alone), slot of its states, checkpoint that it
            begins with (-1: none), checkpoints to write, the tokens, the blocks, the parents, and of each
            checkpoint its end and slot
    LOGITS  cache, rows, and what the output layer reads of them
    MOVE    cache, positions, their slots, and the slots that theirs become; the same for places of nodes
    FIGURES 0; each rank answers with the seconds that it computed, exchanged and waited

Each pipeline stage runs its layers and sends its rows to the next. The last one sends rows with logits back
to the first, which makes the logits. A stage sends the inputs of its tapped layers to rank 0.

Rank 0 alone schedules, drafts, verifies and ends requests, so ranks cannot disagree. A follower validates
every message: one that does not fit its cache, its vocabulary or its own length ends the follower before any
of it runs.
"""

import hashlib
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specinfer.errors import PeerLostError
from specinfer.hub.model_files import hash_of
from specinfer.models.config import ModelConfig
from specinfer.models.language_model import LanguageModel, PassOutput, check_taps
from specinfer.models.ranges import PipelineStage
from specinfer.models.shard import Shard
from specinfer.plan import StateCheckpoint, StateCounts, StateUse
from specinfer.runtime.batch import Rows
from specinfer.runtime.cost_curve import code_hash
from specinfer.runtime.stages import StagedPasses, StagePart
from specinfer.runtime.state_cache import ONE_TEXT
from specinfer.transport.group import Group
from specinfer.version import VERSION

_OPEN, _CLOSE, _PASS, _LOGITS, _MOVE, _TIMES = range(1, 7)
_MAX_CACHES: Final = 64
_MAX_SLOTS: Final = 1 << 31
_MAX_ROWS: Final = 1 << 16
_MAX_STATES: Final = 1 << 16


class Open(NamedTuple):
    """Make a cache."""

    cache: int
    model: int  # 0: the target; then the shared drafts
    blocks: int
    block_size: int
    states: StateCounts = ONE_TEXT


class Close(NamedTuple):
    """Drop a cache."""

    cache: int


class Pass(NamedTuple):
    """Run rows; make logits with the pass or on demand, also of its earlier parts."""

    cache: int
    logits: bool
    more: bool
    taps: list[int]
    rows: list[Rows]


class Logits(NamedTuple):
    """Make logits of rows, given as the output layer's input."""

    cache: int
    rows: int
    bits: NDArray[np.int32]


class Moves(NamedTuple):
    """Copy K and V of slots to others, and inputs of recurrences from some places to others."""

    cache: int
    sources: list[int]
    targets: list[int]
    node_sources: list[int]
    node_targets: list[int]


class ReportTimes(NamedTuple):
    """Report the seconds of passes by activity."""


Command = Open | Close | Pass | Logits | Moves | ReportTimes


def opening_message(cache: int, model: int, blocks: int, block_size: int, states: StateCounts) -> bytes:
    """OPEN: make a cache for a model."""
    return array("i", [_OPEN, cache, model, blocks, block_size, *states]).tobytes()


def closing_message(cache: int) -> bytes:
    """CLOSE: drop a cache."""
    return array("i", [_CLOSE, cache]).tobytes()


def passing_message(
    cache: int,
    rows: Sequence[Rows],
    block_size: int,
    *,
    logits: bool,
    more: bool = False,
    taps: Sequence[int] = (),
) -> bytes:
    """PASS: run rows; includes the blocks of a table that the rows reach."""
    words = array("i", [_PASS, cache, logits, more, len(taps), len(rows), *taps])
    for part in rows:
        n, parents, states = len(part.token_ids), part.parents, part.states
        source = states.source
        begins = -1 if source is None or source.end != part.start else source.slot
        reached = -(-(part.start + n) // block_size)
        table = part.block_table[:reached]
        words.extend((part.start, n, part.logits_from, len(table), -1 if parents is None else len(parents)))
        words.extend((states.slot, begins, len(states.saves)))
        words.extend(part.token_ids)
        words.extend(table)
        words.extend(parents or ())
        for one in states.saves:
            words.extend((one.end, one.slot))
    return words.tobytes()


def logits_message(cache: int, hidden_RD: Tensor) -> bytes:
    """LOGITS: make the logits of rows of an earlier pass."""
    bits = hidden_RD.contiguous().view(torch.int32).numpy().tobytes()
    return array("i", [_LOGITS, cache, len(hidden_RD)]).tobytes() + bits


def moving_message(cache: int, *places: Sequence[int]) -> bytes:
    """MOVE: copy K and V of slots, and inputs of recurrences; `places` are the fields of Moves."""
    words = [_MOVE, cache]
    for sources, targets in zip(places[::2], places[1::2], strict=True):
        words += [len(sources), *sources, *targets]
    return array("i", words).tobytes()


def reporting_message() -> bytes:
    """TIMES: report the seconds of passes by activity."""
    return array("i", [_TIMES, 0]).tobytes()


class MessageReader:
    """Decodes and validates messages."""

    def __init__(self, configs: Sequence[ModelConfig], dtype: torch.dtype) -> None:
        """Make a reader; `configs` are those of the shared models, by their numbers."""
        self._configs = configs
        self._dtype = dtype
        self._words: NDArray[np.int32] = np.empty(0, np.int32)
        self._at = 0

    def read(self, message: bytes, caches: Mapping[int, Open]) -> Command:
        """Return a message's command; raises ValueError if it is invalid or does not fit these caches."""
        if len(message) % 4:
            raise ValueError(f"a message has {len(message)} bytes; allowed: whole words of 4")
        self._words, self._at = np.frombuffer(message, np.int32), 0
        kind, cache = self._number(_OPEN, _TIMES), self._number(0, (1 << 31) - 1)
        if kind == _OPEN:
            if cache in caches or len(caches) >= _MAX_CACHES:
                raise ValueError(f"cache {cache} is there, or too many are")
            model, blocks = self._number(0, len(self._configs) - 1), self._number(1, _MAX_SLOTS - 1)
            size, slots = self._number(1, _MAX_SLOTS // blocks), self._number(1, _MAX_STATES)
            states = StateCounts(slots, self._number(0, _MAX_STATES), self._number(1, _MAX_ROWS))
            found: Command = Open(cache, model, blocks, size, states)
        elif kind == _TIMES:
            found = ReportTimes()
        elif cache not in caches:
            raise ValueError(f"there is no cache {cache}")
        elif kind == _CLOSE:
            found = Close(cache)
        elif kind == _PASS:
            layers = self._configs[caches[cache].model].stage.count
            logits, more = (bool(self._number(0, 1)) for _ in range(2))
            taps, requests = self._number(0, layers + 1), self._number(0, _MAX_ROWS)
            tapped = self._list(taps, 0, layers)
            found = Pass(cache, logits, more, tapped, [self._rows(caches[cache]) for _ in range(requests)])
        elif kind == _LOGITS:
            width = self._configs[caches[cache].model].hidden_size * self._dtype.itemsize // 4  # words
            rows = self._number(0, _MAX_ROWS)
            found = Logits(cache, rows, self._take(rows * width))
        else:
            opened, lists = caches[cache], list[list[int]]()
            for slots in (opened.blocks * opened.block_size, opened.states.slots * opened.states.nodes):
                number = self._number(0, slots)
                lists += [self._list(number, 0, slots - 1) for _ in range(2)]
            found = Moves(cache, *lists)
        if self._at != len(self._words):
            raise ValueError(f"a message has {len(self._words) - self._at} trailing words")
        return found

    def _rows(self, cache: Open) -> Rows:
        config = self._configs[cache.model]
        start, n = self._number(0, config.max_context), self._number(0, _MAX_ROWS)
        logits_from = self._number(0, n)
        blocks, nodes = self._number(0, cache.blocks), self._number(-1, _MAX_ROWS)
        if start + n > blocks * cache.block_size:
            raise ValueError(f"{blocks} blocks of {cache.block_size} for {start + n} positions")
        slots, checkpoints, _ = cache.states
        last = slots + checkpoints - 1
        slot, source, saves = self._number(0, slots - 1), self._number(-1, last), self._number(0, checkpoints)
        tokens = self._list(n, 0, config.vocab_size - 1)
        table = self._list(blocks, 0, cache.blocks - 1)
        parents = self._list(nodes, -1, nodes - 1) if nodes >= 0 else None
        begins = None if source < 0 else StateCheckpoint(source, start)
        ends = [(self._number(1, config.max_context), self._number(slots, last)) for _ in range(saves)]
        states = StateUse(slot, begins, tuple(StateCheckpoint(to, end) for end, to in ends))
        rows = Rows(tokens, start, table, logits_from, parents, states=states)
        if parents is None:
            return rows
        if not parents or parents[0] != -1 or not all(0 <= one < i for i, one in enumerate(parents[1:], 1)):
            raise ValueError("parents are no tree whose nodes come behind theirs")
        if nodes > start + n:
            raise ValueError(f"a tree of {nodes} nodes that ends at position {start + n - 1}")
        return rows

    def _number(self, low: int, high: int) -> int:
        found = int(self._take(1)[0])
        if not low <= found <= high:
            raise ValueError(f"a message has {found} where {low} to {high} are allowed")
        return found

    def _list(self, number: int, low: int, high: int) -> list[int]:
        found = self._take(number)
        if number and not low <= int(found.min()) <= int(found.max()) <= high:
            raise ValueError(f"a message has {found.min()} .. {found.max()}; allowed: {low} .. {high}")
        numbers: list[int] = found.tolist()
        return numbers

    def _take(self, number: int) -> NDArray[np.int32]:
        if self._at + number > len(self._words):
            raise ValueError(f"a message of {len(self._words)} words ends before its {self._at + number}th")
        self._at += number
        return self._words[self._at - number : self._at]


def widths_of(model: LanguageModel, group: Group) -> list[int]:
    """Return the number of logits that each rank of the first stage makes."""
    shards = [Shard(place, group.width) for place in range(group.width)]
    return [len(shard.vocab(model.config.vocab_size)) for shard in shards]


class Leader:
    """Rank 0's side of one cache: sends each operation to the followers before it runs."""

    def __init__(self, passes: StagedPasses, *, blocks: int, block_size: int, states: StateCounts) -> None:
        """Make the followers' caches, of the same sizes; they are dropped some time after this object."""
        self._passes = passes
        self._group = group = passes.group
        self._model = model = passes.model
        self._block_size = block_size
        self._widths = widths_of(model, group)
        self._cache = next(group.cache_numbers)
        self._stages = passes.stages
        self._send(opening_message(self._cache, model.number, blocks, block_size, states))
        # Only recorded, as a finalizer may run in any thread, in the middle of a message.
        weakref.finalize(self, group.dropped_caches.append, (self._cache, self._stages)).atexit = False

    def read(
        self,
        rows: Sequence[Rows],
        part_of: Callable[[Sequence[Rows], Sequence[int]], StagePart],
        taps: Sequence[int],
        *,
        max_logits: int,
    ) -> PassOutput:
        """Run a pass over these rows; `part_of` makes this rank's part of some of them, with its own taps.

        If at most `max_logits` rows have logits, these are made with the pass.
        """
        stage, group = self._model.config.stage, self._group
        check_taps(taps, PipelineStage(0, stage.count, stage.count))
        elsewhere = taps if self._stages > 1 else ()  # its own are local
        parts = [part_of(some, stage.taps(taps)) for some in self._passes.cut(rows)]
        chosen = sum(part.num_chosen for part in parts)
        logits = 0 < chosen <= max_logits
        with self._collective():
            with group.times.passing():
                for behind, part in zip(reversed(range(len(parts))), parts, strict=True):
                    how = {"logits": logits and not behind, "more": behind > 0}
                    self._send(
                        passing_message(self._cache, part.rows, self._block_size, taps=elsewhere, **how)
                    )
                    found = self._passes.run(part, more=behind > 0)
                if elsewhere:
                    count = sum(part.num_rows for part in parts)
                    found = found._replace(tapped_TND=self._tapped(found.tapped_TND, taps, count))
                if logits:
                    found = found._replace(logits_RV=self._whole(found))
            # If rows came back, all stages have ended the pass; else an answer may take as long as the pass.
            if chosen and self._stages == group.stages and group.times.due:
                group.broadcast(reporting_message(), group.stages)
                group.read_times()
            return found

    def _tapped(self, own_TND: Tensor | None, taps: Sequence[int], rows: int) -> Tensor:
        """Return the taps of all stages, in the order of `taps`."""
        group, size = self._group, self._model.config.hidden_size
        parts = [] if own_TND is None else [own_TND]
        order = self._model.config.stage.taps(taps)
        for number, (first, behind) in enumerate(pairwise(group.bounds)):
            if number and (own := PipelineStage(first, behind, group.bounds[-1]).taps(taps)):
                like = torch.empty(rows, len(own), size, dtype=self._model.dtype)
                parts.append(group.reply(number * group.width, like, self._passes.patience))
                order += own
        return torch.cat(parts, 1)[:, [order.index(tap) for tap in taps]].contiguous()

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return the logits of rows of an earlier pass, [R, V]."""
        message = logits_message(self._cache, hidden_RD)
        with self._collective(), self._group.times.passing():
            self._send(message, stages=1)
            return self._whole(PassOutput(hidden_RD))

    def move(self, *places: Sequence[int]) -> None:
        """Make the other ranks copy what `moving_message` says; the caller does so on this rank."""
        if any(places):
            with self._collective(), self._group.times.passing():
                self._send(moving_message(self._cache, *places))

    def _whole(self, read: PassOutput) -> Tensor:
        own = self._model.logits(read.hidden_RD) if read.logits_RV is None else read.logits_RV
        return self._group.gather(own, self._widths)

    def _send(self, message: bytes, stages: int | None = None) -> None:
        group = self._group
        with group.lock:
            while group.dropped_caches:
                cache, among = group.dropped_caches.popleft()
                group.broadcast(closing_message(cache), among)
            group.broadcast(message, stages or self._stages)

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Run the block as a collective operation; an exception in it ends the group."""
        with self._group.lock:
            try:
                yield
            except PeerLostError as error:
                raise self._group.shut_down() from error
            except BaseException as error:
                self._group.shut_down(f"rank 0 has failed in the middle of a pass ({error!r})")
                raise


def identity_of(model: LanguageModel, path: Path, kind: str, group: Group) -> dict[str, str]:
    """Return the properties that all ranks of a group must share, by name."""
    library = model.kernels.library
    return {
        "version": VERSION,
        "code": code_hash(),
        "PyTorch": torch.__version__,
        "kernels": "PyTorch's" if library is None else hashlib.sha256(library.path.read_bytes()).hexdigest(),
        "kind of CPU": "" if library is None else library.level.name,
        "attention": type(model.kernels.attention).__name__,
        "model file": hash_of(path),
        "quantization": kind,
        "dtype": str(model.dtype),
        "KV cache": str(model.kernels.kv_dtype(model.dtype)),
        "number of ranks": str(group.size),
        "layers of its stages": str(list(group.bounds)),
        "sum_parts": str([one and one.shares for one in (model.config.part.o, model.config.part.down)]),
    }
