"""Where an engine's memory goes: which layers stay, which are streamed, which draft is worth its bytes.

    a pass     the streamed layers' bytes over the disk's rate
    a step     a pass, and the levels of the draft's tree
    tokens     one a pass without guesses; with a draft as many as its tree makes

The choice weighs expectations, as nothing was guessed yet: what a draft's guesses are worth is learned later,
and costs at most what the guard lets it cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Final, NamedTuple

import torch

from specinfer.config import EngineConfig
from specinfer.errors import CapacityError, ConfigError, ModelFileError
from specinfer.kernels.bandwidth import Bandwidth
from specinfer.kernels.choice import Kernels
from specinfer.kernels.disk import DiskRate, StreamSource, about, gigabytes, measure
from specinfer.kernels.layout import int8_bytes
from specinfer.models.config import ModelConfig
from specinfer.models.placement import Placement
from specinfer.models.prepared import PreparedFile, prepared_path
from specinfer.models.streamed import layer_records
from specinfer.models.weights import OpenModel, estimate_bytes, layer_bytes, prepare
from specinfer.progress import Progress
from specinfer.runtime.flight import MOST_BYTES
from specinfer.runtime.kv_cache import KvCache, free_bytes, gib, process_bytes
from specinfer.speculation_config import MAX_DEPTH_STREAMED, SELF, Quantization

_SAMPLE: Final = 1 << 27  # bytes that are read to learn how fast memory is
_SLACK: Final = 1 << 26  # bytes that libraries take meanwhile
_BUFFERS: Final = 2  # of layers, where nobody guesses beside a pass
_WORTH: Final = 0.9  # of the best speed, for which there may be more room
# The acceptance probability of a level's first guess until something is known, as measured on Alpaca.
_TWIN_RATE: Final = 0.9
_OTHER_RATE: Final = 0.75


class Room(NamedTuple):
    """What a streamed engine has room for besides weights."""

    positions: int  # of each KV cache
    rows: int  # of a pass
    buffers: int  # of layers: while a draft works, two may be filled


# The more the better; the last one is for what fits with no other.
ROOMS: Final = (
    Room(8192, 512, 3),
    Room(4096, 512, 3),
    Room(2048, 256, 3),
    Room(2048, 128, 2),
    Room(1024, 128, 2),
)


@dataclass(frozen=True, slots=True)
class Guessers:
    """The drafts of a streamed model, as far as memory and time are concerned."""

    names: tuple[str, ...] = ()
    weights: int = 0  # bytes in memory
    reads: int = 0  # bytes that a level reads
    caches: Sequence[tuple[ModelConfig, torch.dtype]] = ()  # of models with a KV cache
    rate: float = _OTHER_RATE  # acceptance probability of a level's first guess
    shares_head: bool = False  # a twin that makes logits by its target's output layer


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What stays in memory, what is streamed, and what that is expected to bring."""

    placement: Placement
    guessers: Guessers
    room: Room
    kv_cache: int  # bytes
    disk: DiskRate
    bandwidth: float  # bytes of memory that are read in a second
    prepared: PreparedFile  # which is streamed

    @property
    def pass_seconds(self) -> float:
        """A pass of one row: what is streamed comes while the rest is computed."""
        placement = self.placement
        return max(placement.seconds(self.disk.bytes_per_second), sum(placement.layers) / self.bandwidth)

    @property
    def plain_speed(self) -> float:
        """Tokens per second that are expected without guesses."""
        return 1 / self.pass_seconds

    @property
    def speed(self) -> float:
        """Tokens per second that are expected with the drafts: of trees that are chains, the best length."""
        if not self.guessers.names:
            return self.plain_speed
        level, rate = self.guessers.reads / self.bandwidth, self.guessers.rate
        tokens = [(1 - rate ** (depth + 1)) / (1 - rate) for depth in range(MAX_DEPTH_STREAMED + 1)]
        return max(made / (self.pass_seconds + depth * level) for depth, made in enumerate(tokens))

    def __str__(self) -> str:
        """What was decided and why, in a line."""
        parts = [self.placement.summary(self.disk, self.prepared.path.parent)]
        speeds = f"about {about(self.plain_speed)} tokens/s without guesses"
        if names := self.guessers.names:
            told = ["its own twin in fewer bits" if name == SELF else name for name in names]
            parts.append(f"draft: {' and '.join(told)}, {gigabytes(self.guessers.weights)}")
            speeds += f" and {about(self.speed)} with, expected"
        return "; ".join([*parts, speeds])


@dataclass(frozen=True, slots=True)
class Wanted:
    """The models that memory is planned for, as far as they are known before any weight is read."""

    name: str  # of the target
    target: OpenModel
    quantization: Quantization
    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    drafts: Mapping[str, int]  # bytes of the weights of those that are named, by what they are called
    guessers: Sequence[Guessers]  # sets of drafts to choose from, where layers are streamed
    reads_table: bool  # whether a draft reads the target's embedding table
    here: int | None = None  # bytes of the target's weights on this host; None: all of them

    @property
    def weights(self) -> int:
        """Bytes of the target's weights."""
        if self.here is not None:
            return self.here
        return estimate_bytes(self.target, self.dtype, self.kernels, self.quantization)

    @property
    def output_bytes(self) -> int:
        """Bytes of the target's output layer."""
        config = self.target.config
        if self.quantization == "none":
            return config.vocab_size * config.embedding_size * self.dtype.itemsize
        return int8_bytes(config.vocab_size, config.embedding_size)

    def twins(self) -> list[Guessers]:
        """The target itself in int4: with an output layer of its own, and with the target's."""
        own = guessing_bytes(self.target, self.dtype, self.kernels, "int4")
        config = self.target.config
        layers = own - int8_bytes(config.vocab_size, config.embedding_size)
        caches = [(config, self.dtype)]
        return [
            Guessers((SELF,), own, own, caches, _TWIN_RATE),
            Guessers((SELF,), layers, layers + self.output_bytes, caches, _TWIN_RATE, shares_head=True),
        ]

    def fixed(self, process: int) -> dict[str, int]:
        """Bytes by name of what a streamed target needs in memory whatever guesses for it.

        `process` is what this process took before.
        """
        config = self.target.config
        table = config.vocab_size * config.embedding_size * self.dtype.itemsize
        vectors = sum(math.prod(shape) for shape in self.target.shapes.values() if len(shape) == 1)
        return {
            "this process": process,
            "output layer": self.output_bytes,
            "embeddings": table if self.reads_table else 0,
            "norms and biases": vectors * self.dtype.itemsize,
        }

    def prepare(self, folder: Path | None, progress: Progress) -> PreparedFile:
        """The target's prepared file, in `folder` or the user's cache, made where there is none."""
        return prepare(
            self.target,
            dtype=self.dtype,
            kernels=self.kernels,
            quantization=self.quantization,
            cache=folder,
            progress=progress,
            name=self.name,
        )

    def ways(self, memory: int, process: int, layers: Sequence[int], config: EngineConfig) -> list[Way]:
        """What fits into memory with layers of so many bytes; raises CapacityError where nothing does."""
        fixed, ways = self.fixed(process), list[Way]()
        refused: list[tuple[int, CapacityError]] = []  # with the bytes of what there is in any case
        asked = config.scheduler.max_step_tokens, config.speculation.max_nodes
        rows = max([number for number in asked if isinstance(number, int)], default=0)
        for guessers in self.guessers:
            fits = False
            for room in ROOMS:
                if fits and room is ROOMS[-1]:
                    break
                room = room._replace(rows=max(rows, room.rows))
                models = [(self.target.config, self.dtype), *guessers.caches]
                caches = config.cache.memory or cache_bytes(models, room.positions)
                parts = {
                    **fixed,
                    "drafts": guessers.weights,
                    "activations": activation_bytes(self.target.config, self.dtype, room.rows),
                    "KV caches": caches,
                }
                try:
                    buffers = room.buffers if guessers.names else _BUFFERS
                    placement = Placement.within(memory, parts, layers, buffers=buffers)
                except CapacityError as error:
                    refused.append((sum(parts.values()), error))
                    continue
                ways.append(Way(guessers, room, caches, placement))
                fits = True
        if not ways:
            raise min(refused, key=itemgetter(0))[1]
        return ways


class Way(NamedTuple):
    """A way to use memory."""

    guessers: Guessers
    room: Room
    caches: int  # bytes of KV caches
    placement: Placement


def plan_memory(wanted: Wanted, config: EngineConfig, progress: Progress) -> MemoryPlan | None:
    """The plan for a target some of whose layers are streamed; None where all of them stay.

    Makes the prepared file where there is none. Raises CapacityError where memory does not suffice,
    ConfigError where layers cannot be streamed, ModelError where the file cannot be made.
    """
    memory, speculation = allowed_bytes(config.memory, wanted.device), config.speculation
    process = process_bytes()  # now: a start that makes the file comes to the plan of later ones
    free = memory - process
    total = wanted.weights + sum(wanted.drafts.values())
    if config.offload == "never":
        if total > free:
            raise CapacityError(_refusal(wanted, config, memory, free))
        return None
    room = ROOMS[2]  # for one text or two
    model = wanted.target.config, wanted.dtype
    models = [model, *(wanted.guessers[0].caches if speculation.drafts else ())]
    caches = config.cache.memory or cache_bytes(models, room.positions)
    if total + caches + activation_bytes(*model, room.rows) <= free:
        return None
    if wanted.device.type != "cpu" or wanted.kernels.library is None:
        raise ConfigError(
            f"offload is {config.offload!r} and {wanted.name} does not fit into memory; layers are streamed "
            f"for native kernels on a CPU, and this is {wanted.device} with PyTorch's: choose a smaller model"
        )
    # Nothing is written where nothing fits.
    wanted.ways(memory, process, layer_bytes(wanted.target, wanted.dtype, wanted.quantization), config)
    prepared = wanted.prepare(offload_folder(config), progress)
    layers = [prepared.records[name].length for name in layer_records(prepared)]
    disk = measure(StreamSource(prepared.path))
    bandwidth = Bandwidth(wanted.kernels.library, _SAMPLE).usual()
    plans = [
        MemoryPlan(placement, guessers, room, caches, disk, bandwidth, prepared)
        for guessers, room, caches, placement in wanted.ways(memory, process, layers, config)
    ]
    return chosen(plans)


def chosen(plans: Sequence[MemoryPlan]) -> MemoryPlan:
    """The plan with the most room, of those that are about as fast as the fastest."""
    enough = _WORTH * max(plan.speed for plan in plans)
    return max(plans, key=lambda plan: (plan.speed >= enough, plan.room, plan.speed))


def offload_folder(config: EngineConfig) -> Path | None:
    """Where prepared files of streamed models lie; None: in the user's cache."""
    return None if config.offload_folder is None else Path(config.offload_folder).expanduser()


def _refusal(wanted: Wanted, config: EngineConfig, memory: int, free: int) -> str:
    """What is lacking, and what streaming would take in its place."""
    parts = {wanted.name: wanted.weights, **wanted.drafts}
    told = " + ".join(f"{name} {gib(size)}" for name, size in parts.items())
    text = (
        f"the weights need {told} = {gib(sum(parts.values()))}, but {gib(free)} of memory are free on "
        f"{wanted.device}; choose a smaller model, fewer drafts, or free some memory"
    )
    if wanted.device.type != "cpu" or wanted.kernels.library is None:
        return text
    path = wanted.target.path
    file = next(iter(sorted(path.glob("*.safetensors"))), path) if path.is_dir() else path
    try:
        layers = layer_bytes(wanted.target, wanted.dtype, wanted.quantization)
        ways = wanted.ways(memory, memory - free, layers, config)
        disk = measure(StreamSource(file))
    except (CapacityError, ModelFileError):
        return text  # not even so
    placement = min((way.placement for way in ways), key=lambda one: one.streamed_bytes)
    folder = prepared_path(path, "", wanted.dtype, offload_folder(config)).parent
    return f"{text}; or --offload auto: {placement.summary(disk, folder)}"


def allowed_bytes(memory: int | None, device: torch.device) -> int:
    """The memory that the process may take, all in all; `memory` is what the caller allows it.

    Raises CapacityError where the machine, or the process's cgroup, has less, ConfigError for a GPU.
    """
    most = process_bytes() + free_bytes(device)
    if memory is None:
        return most
    if device.type != "cpu":
        raise ConfigError(f"memory bounds what a CPU's engine takes, and this is {device}; leave it out")
    if memory > most:
        raise CapacityError(
            f"memory is {gib(memory)}, and this process can have {gib(most)} here; lower it, or free some"
        )
    return memory


def activation_bytes(config: ModelConfig, dtype: torch.dtype, rows: int) -> int:
    """What a pass of so many rows takes besides weights and KV caches, about."""
    widest = config.hidden_size * 6 + config.intermediate_size * 4 + config.num_heads * config.head_dim * 4
    return rows * widest * max(2, dtype.itemsize) + MOST_BYTES + _SLACK


def cache_bytes(models: Sequence[tuple[ModelConfig, torch.dtype]], positions: int) -> int:
    """What KV caches of these models take with so many positions, or four of their contexts."""
    most = 4 * min(config.max_context for config, _ in models)
    return min(positions, most) * sum(
        KvCache.bytes_per_slot(one.num_layers, one.num_kv_heads, one.head_dim, dtype) for one, dtype in models
    )


def guessing_bytes(model: OpenModel, dtype: torch.dtype, kernels: Kernels, kind: Quantization) -> int:
    """What a draft's weights take in memory where its embeddings are read from the disk."""
    config = model.config
    return (
        estimate_bytes(model, dtype, kernels, kind)
        - config.vocab_size * config.embedding_size * dtype.itemsize
    )
