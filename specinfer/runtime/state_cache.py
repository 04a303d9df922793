"""StateCache: recurrent states of a model's texts by slot; and the number of slots that fit into memory."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import torch

from specinfer.errors import CapacityError, IntegrityError, ensure
from specinfer.kernels.states import ZERO, StateMemory, StatePass, StateRows
from specinfer.models.config import ModelConfig
from specinfer.plan import StateCheckpoint, StateCounts, StateUse
from specinfer.runtime.batch import Rows
from specinfer.runtime.kv_cache import gib, move_places, zeros

_MIN_CHECKPOINTS: Final = 2
MAX_CHECKPOINTS: Final = 256
_FLOAT: Final = 4  # bytes
Caches = Sequence[tuple[ModelConfig, torch.dtype]]  # the models of an engine, and the dtypes of their KV
ONE_TEXT: Final = StateCounts()
LEAST: Final = StateCounts(1, _MIN_CHECKPOINTS)  # of an engine


class StateCache:
    """The states of one model with recurrent layers, and the inputs of the last trees.

    A slot that a pass writes is unknown until the pass has run. So after a pass that failed, a text begins at
    position 0 or with a checkpoint.
    """

    def __init__(self, config: ModelConfig, counts: StateCounts, device: torch.device) -> None:
        assert config.recurrence is not None, "the model has states"
        self.counts = counts
        layers, sizes = len(config.recurrent_layers), config.recurrence
        slots, nodes = counts.slots + counts.checkpoints, counts.nodes
        self.memory = StateMemory(
            zeros((layers, slots, sizes.state_floats), torch.float32, device),
            zeros((layers, counts.slots, nodes, sizes.input_floats), torch.float32, device),
        )
        self._applied: dict[int, int] = {}  # tokens of the text that a request's slot has
        self._keys: dict[int, bytes] = {}  # keys of the checkpoints' texts
        self._planned: dict[int, int] = {}  # `applied` after the planned parts of the present pass

    def begin(self) -> None:
        """Begin a pass, whose parts are planned in order before or while they run."""
        self._planned.clear()

    def plan(self, parts: Sequence[Rows]) -> tuple[StatePass, AbstractContextManager[None]]:
        """Return the visits of these rows, and a context that runs their pass; it is entered once.

        Raises IntegrityError if their states are not here.
        """
        visits, planned, keys = StateRows(), dict[int, int](), dict[int, bytes]()
        slots = [part.states.slot for part in parts]
        ensure(len(set(slots)) == len(slots), f"requests share slots of states: {slots}")
        begins = [(part.states.source, part.start) for part in parts]
        read = {one.slot for one, start in begins if one is not None and one.end == start}
        first = 0
        for part in parts:
            use, count = part.states, len(part.token_ids)
            source, applied = self._source(use, part.start)
            root = part.start + count - (1 if part.parents is None else len(part.parents))
            replayed = min(part.start, root + 1) - applied
            nodes = 0 if part.parents is None else len(part.parents) - 1
            ensure(
                0 <= replayed <= self.counts.nodes and nodes <= self.counts.nodes,
                f"states of {applied} tokens for a text at {part.start} and a tree of {nodes} nodes",
            )
            # The scheduler may have given away meanwhile what a draft begins with, or makes late.
            saves = [one for one in use.saves if applied < one.end <= root + 1]
            saves = [one for one in saves if one.slot not in read and one.slot not in keys]
            self._planned[use.slot] = planned[use.slot] = visits.add(
                slot=use.slot,
                source=source,
                applied=applied,
                start=part.start,
                first_row=first,
                rows=count,
                parents=part.parents,
                saves=[(one.end, one.slot) for one in saves],
            )
            keys |= {one.slot: one.key for one in saves}
            first += count
        return StatePass(self.memory, visits), self._running(planned, keys)

    @contextmanager
    def _running(self, applied: dict[int, int], keys: dict[int, bytes]) -> Iterator[None]:
        """Run a pass that writes these slots: they are unknown until it has ended without an exception."""
        for slot in applied:
            self._applied.pop(slot, None)
        for slot in keys:
            self._keys.pop(slot, None)
        yield
        self._applied |= applied
        self._keys |= keys

    def _source(self, use: StateUse, start: int) -> tuple[int, int]:
        """Return the slot that a text is read from, and the tokens that it has."""
        if start == 0:
            return ZERO, 0
        if use.source is not None and use.source.end == start:
            ensure(self.holds(use.source), f"slot {use.source.slot} has not the checkpoint of {start} tokens")
            return use.source.slot, start
        applied = self._planned.get(use.slot, self._applied.get(use.slot))
        if applied is None:
            raise IntegrityError(f"slot {use.slot} has no states for a text at {start}")
        return use.slot, applied

    def holds(self, checkpoint: StateCheckpoint) -> bool:
        """Return whether the checkpoint's slot has its text's states."""
        return self._keys.get(checkpoint.slot) == checkpoint.key

    @property
    def slot_bytes(self) -> int:
        """Bytes of a checkpoint."""
        return self.memory.states_LSF[:, :1].nbytes

    def read_slot(self, slot: int) -> bytearray:
        """Return a copy of a slot's states in every layer."""
        data = bytearray(self.slot_bytes)
        torch.frombuffer(data, dtype=torch.float32).copy_(self.memory.states_LSF[:, slot].flatten())
        return data

    def write_slot(self, checkpoint: StateCheckpoint, data: bytearray) -> None:
        """Write what `read_slot` returned to the slot of a checkpoint."""
        ensure(len(data) == self.slot_bytes, f"{len(data)} bytes for a checkpoint")
        states_LF = self.memory.states_LSF[:, checkpoint.slot]
        states_LF.copy_(torch.frombuffer(data, dtype=torch.float32).view(states_LF.shape))
        self._keys[checkpoint.slot] = checkpoint.key

    def reaches(self, slot: int, position: int) -> bool:
        """Return whether a text in this slot can go on at a position."""
        applied = self._applied.get(slot)
        return applied is not None and applied <= position <= applied + self.counts.nodes

    def places(self, slot: int, positions: Sequence[int]) -> list[int]:
        """Return the places of a tree's nodes among those of all rings, by their cache positions."""
        applied, nodes = self._applied[slot], self.counts.nodes
        ensure(
            all(applied <= position < applied + nodes for position in positions),
            f"nodes at {[*positions]} with states of {applied} tokens and {nodes} places",
        )
        return [slot * nodes + position - applied for position in positions]

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the inputs of nodes from some places to others; all are read before any is written."""
        move_places(self.memory.rings_LRNF.flatten(1, 2), 1, sources, targets)


def state_bytes(models: Caches, counts: StateCounts) -> int:
    """Return the bytes of the states of all these models together."""
    slot, checkpoint = _sizes(models, counts.nodes)
    return counts.slots * slot + counts.checkpoints * checkpoint


def state_counts(models: Caches, wanted: StateCounts, budget: int, where: str, text: int = 0) -> StateCounts:
    """Return slots in half of the caches' `budget`, and checkpoints in a quarter, at most as in `wanted`.

    Before that, the K and V of the longest text get their `text` bytes, or half of the budget if they do not
    fit beside the states of one request. Raises CapacityError if not even those fit. Errors name the device
    or host `where`.
    """
    slot, checkpoint = _sizes(models, wanted.nodes)
    if not slot:
        return wanted
    least = min(wanted.checkpoints, _MIN_CHECKPOINTS)
    rest = budget - (text if text <= budget - slot - least * checkpoint else budget // 2)
    slots = max(1, min(wanted.slots, rest // 2 // slot))
    room = min(rest // 4, (rest - slots * slot) // 2) // checkpoint
    found = StateCounts(slots, max(least, min(wanted.checkpoints, room)), wanted.nodes)
    if (needed := state_bytes(models, found)) > budget:
        raise CapacityError(
            f"the recurrent states of one request and of {least} checkpoints take {gib(needed)}, but caches "
            f"may take {gib(max(0, budget))} on {where}; raise kv_cache_memory or memory, free some memory, "
            "or choose a smaller tree"
        )
    return found


def _sizes(models: Caches, nodes: int) -> tuple[int, int]:
    """Return the bytes of a request's slot and of a checkpoint, of all models together."""
    slot = checkpoint = 0
    for config, _ in models:
        if (sizes := config.recurrence) is not None:
            floats = _FLOAT * len(config.recurrent_layers)
            slot += floats * (sizes.state_floats + nodes * sizes.input_floats)
            checkpoint += floats * sizes.state_floats
    return slot, checkpoint
