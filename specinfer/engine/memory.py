"""Plan the memory of an engine: the layers that stay, those that are streamed, and the draft.

    a pass     the streamed layers' bytes over the disk's rate
    a step     a pass, and the levels of the draft's tree
    tokens     one per pass without guesses; with a draft the expected tokens of its tree

The plan uses prior acceptance probabilities. The real ones are learned later, and the guard bounds the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Final, NamedTuple

import torch

from specinfer.config import EngineConfig
from specinfer.engine.drafts import FoundModel
from specinfer.engine.hardware import Hardware
from specinfer.errors import CapacityError, ModelFileError
from specinfer.kernels.choice import Kernels
from specinfer.kernels.disk import Bandwidth, DiskRate, StreamSource, about, gigabytes, measure
from specinfer.kernels.layout import int8_bytes
from specinfer.kernels.recurrence_config import input_rows
from specinfer.models.config import ModelConfig
from specinfer.models.expert_stream import expert_records
from specinfer.models.open_model import OpenModel
from specinfer.models.placement import ExpertMemory, Placement
from specinfer.models.prepared import PreparedFile, prepared_path
from specinfer.models.streamed import layer_records
from specinfer.models.weight_sizes import estimate_bytes, expert_sizes, layer_bytes, table_bytes
from specinfer.progress import Progress
from specinfer.runtime.flight import MAX_BYTES
from specinfer.runtime.kv_cache import address_space_left, bytes_per_block, free_bytes, gib, process_bytes
from specinfer.runtime.state_cache import LEAST, Caches, state_bytes
from specinfer.speculation_config import MAX_DEPTH_STREAMED, SELF, Quantization, SpeculationConfig
from specinfer.support import Feature, check_support

_SAMPLE: Final = 1 << 27  # bytes read to measure the memory bandwidth
_SLACK: Final = 1 << 26  # bytes reserved for libraries
_BUFFERS: Final = 2  # layer buffers without a draft
_FAST_ENOUGH: Final = 0.9  # part of the best speed that is enough for wider limits
# Prior acceptance probability of a level's first guess, as measured on Alpaca.
_SELF_RATE: Final = 0.9
_OTHER_RATE: Final = 0.75


class StreamLimits(NamedTuple):
    """Limits of a streamed engine that take memory besides weights."""

    positions: int  # positions of each KV cache
    rows: int  # maximum rows of a pass
    buffers: int  # layer buffers; while a draft runs, two may be filled


# In falling order of preference; the last one is used if no other fits.
STREAM_LIMITS: Final = (
    StreamLimits(8192, 512, 3),
    StreamLimits(4096, 512, 3),
    StreamLimits(2048, 256, 3),
    StreamLimits(2048, 128, 2),
    StreamLimits(1024, 128, 2),
)


@dataclass(frozen=True, slots=True)
class DraftSet:
    """Memory and time of the drafts of a streamed model."""

    names: tuple[str, ...] = ()
    weights: int = 0  # bytes in memory
    reads: int = 0  # bytes that a level reads
    caches: Sequence[tuple[ModelConfig, torch.dtype]] = ()  # models with a KV cache
    rate: float = _OTHER_RATE  # acceptance probability of a level's first guess
    shares_head: bool = False  # True if a `self` draft uses the target's output layer


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Layers in memory, streamed layers, drafts, and the expected speed."""

    placement: Placement
    drafts: DraftSet
    limits: StreamLimits
    kv_cache: int  # bytes
    disk: DiskRate
    bandwidth: float  # bytes of memory read per second
    prepared: PreparedFile  # the streamed file

    def pass_seconds(self, rows: int = 1) -> float:
        """Seconds of a pass of `rows` rows; streaming of layers overlaps with computing.

        Experts are read after the router has chosen them, so their layer waits.
        """
        placement, rate, experts = self.placement, self.disk.bytes_per_second, self.placement.experts
        if experts is None:
            return max(placement.seconds(rate), sum(placement.layers) / self.bandwidth)
        computed = sum(placement.layers) + experts.active_bytes(rows)
        return experts.read_bytes(rows) / rate + computed / self.bandwidth

    @property
    def plain_speed(self) -> float:
        """Expected tokens per second without guesses."""
        return 1 / self.pass_seconds()

    @property
    def speed(self) -> float:
        """Expected tokens per second with the drafts, for chains of the best length."""
        if not self.drafts.names:
            return self.plain_speed
        level, rate = self.drafts.reads / self.bandwidth, self.drafts.rate
        tokens = [(1 - rate ** (depth + 1)) / (1 - rate) for depth in range(MAX_DEPTH_STREAMED + 1)]
        return max(made / (self.pass_seconds(depth + 1) + depth * level) for depth, made in enumerate(tokens))

    def __str__(self) -> str:
        """Return the decision and its reason, in a line."""
        parts = [self.placement.summary(self.disk, self.prepared.path.parent)]
        speeds = f"about {about(self.plain_speed)} tokens/s without guesses"
        if names := self.drafts.names:
            shown = ["the target itself in fewer bits" if name == SELF else name for name in names]
            parts.append(f"draft: {' and '.join(shown)}, {gigabytes(self.drafts.weights)}")
            speeds += f" and {about(self.speed)} with, expected"
        return "; ".join([*parts, speeds])


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """The models to plan memory for, before any weight is read."""

    target: FoundModel
    quantization: Quantization
    hardware: Hardware
    draft_weights: Mapping[str, int]  # bytes of the weights of named drafts
    draft_sets: Sequence[DraftSet]  # sets of drafts to choose from, if layers are streamed
    reads_table: bool  # True if a draft reads the target's embedding table
    local_weights: int | None = None  # bytes of the target's weights on this host; None: all of them
    adapters: int = 0  # maximum bytes of the target's adapters in memory

    @property
    def weights(self) -> int:
        """Bytes of the target's weights."""
        if self.local_weights is not None:
            return self.local_weights
        size = self.target.weight_bytes(self.hardware.dtype, self.hardware.kernels, self.quantization)
        if self.reads_table:  # a head reads all of a table that passes leave in the file
            size += self._table_bytes - table_bytes(self.target.model, self.hardware.dtype, self.quantization)
        return size

    @property
    def cache(self) -> tuple[ModelConfig, torch.dtype]:
        """The target, with the dtype of its KV cache."""
        return self.target.config, self.hardware.kernels.kv_dtype(self.hardware.dtype)

    @property
    def _table_bytes(self) -> int:
        return table_bytes(self.target.model, self.hardware.dtype, "none")

    @property
    def output_bytes(self) -> int:
        """Bytes of the target's output layer."""
        config = self.target.config
        if self.quantization == "none":
            return config.vocab_size * config.hidden_size * self.hardware.dtype.itemsize
        return int8_bytes(config.vocab_size, config.hidden_size)

    def self_drafts(self, adapter: int = 0) -> list[DraftSet]:
        """Return the `self` drafts in int4: with its own output layer, and with the target's.

        `adapter` is the bytes of the draft's adapter.
        """
        own = draft_bytes(self.target.model, self.hardware.dtype, self.hardware.kernels, "int4") + adapter
        config = self.target.config
        layers = own - int8_bytes(config.vocab_size, config.hidden_size)
        caches = [(config, self.hardware.dtype)]
        return [
            DraftSet((SELF,), own, own, caches, _SELF_RATE),
            DraftSet((SELF,), layers, layers + self.output_bytes, caches, _SELF_RATE, shares_head=True),
        ]

    def fixed(self, process: int) -> dict[str, int]:
        """Return the bytes, by name, that a streamed target needs in memory with any drafts.

        `process` is the memory that this process has used so far.
        """
        vectors = sum(math.prod(shape) for shape in self.target.model.shapes.values() if len(shape) == 1)
        return {
            "this process": process,
            "output layer": self.output_bytes,
            "embeddings": self._table_bytes if self.reads_table else 0,
            "norms and biases": vectors * self.hardware.dtype.itemsize,
            "adapters": self.adapters,
        }

    def sizes(self, prepared: PreparedFile | None = None) -> Sizes:
        """Sizes of the target's layers, from its prepared file or estimated before there is one."""
        experts = expert_sizes(self.target.model, self.hardware.dtype, self.quantization)
        if prepared is not None:
            layers = [prepared.records[name].length for name in layer_records(prepared)]
            if experts is not None:
                longest = max(prepared.records[name].length for name in expert_records(prepared))
                experts = replace(experts, record=longest)
            return Sizes(layers, experts)
        layers = layer_bytes(self.target.model, self.hardware.dtype, self.quantization)
        if experts is not None:
            dense, of_experts = experts.experts.dense_layers, experts.experts.count * experts.record
            layers = [size if n in dense else max(0, size - of_experts) for n, size in enumerate(layers)]
        return Sizes(layers, experts)

    def candidates(
        self, memory: int, process: int, sizes: Sizes, config: EngineConfig
    ) -> list[tuple[DraftSet, StreamLimits, int, Placement]]:
        """Return all plans that fit into memory for these layer sizes; raises CapacityError if none does.

        Each has its drafts, its limits, the bytes of its KV caches, and the placement of the target.
        """
        fixed, candidates = self.fixed(process), list[tuple[DraftSet, StreamLimits, int, Placement]]()
        refused: list[tuple[int, CapacityError]] = []  # with the bytes needed in any case
        speculation = config.speculation
        asked = config.scheduler.max_step_tokens, speculation.max_nodes
        rows = max([number for number in asked if isinstance(number, int)], default=0)
        for drafts in self.draft_sets:
            fits = False
            for limits in STREAM_LIMITS:
                if fits and limits is STREAM_LIMITS[-1]:
                    break
                limits = limits._replace(rows=max(rows, limits.rows))
                models = [self.cache, *drafts.caches]
                caches = config.cache.memory or cache_bytes(models, limits.positions, speculation)
                parts = {
                    **fixed,
                    "drafts": drafts.weights,
                    "activations": activation_bytes(self.target.config, self.hardware.dtype, limits.rows),
                    "KV caches": caches,
                }
                try:
                    placement = sizes.placed(memory, parts, limits.buffers if drafts.names else _BUFFERS)
                except CapacityError as error:
                    refused.append((sum(parts.values()), error))
                    continue
                candidates.append((drafts, limits, caches, placement))
                fits = True
        if not candidates:
            raise min(refused, key=itemgetter(0))[1]
        return candidates


class Sizes(NamedTuple):
    """Bytes of a target's layers; those of a mixture are without its experts."""

    layers: Sequence[int]
    experts: ExpertMemory | None

    def placed(self, memory: int, fixed: Mapping[str, int], buffers: int) -> Placement:
        """Return the layers or experts that fit beside the fixed memory; raises CapacityError if none do."""
        if self.experts is not None:
            return Placement.with_experts(memory, fixed, self.layers, self.experts)
        return Placement.within(memory, fixed, self.layers, buffers=buffers)


def plan_memory(needs: MemoryNeeds, config: EngineConfig, progress: Progress) -> MemoryPlan | None:
    """Return the plan for a target with streamed layers, or None if all layers stay in memory.

    Makes the prepared file if it is missing. Raises CapacityError if memory does not suffice, ConfigError if
    layers cannot be streamed, ModelError if the file cannot be made.
    """
    device, dtype, kernels, _ = needs.hardware
    memory, speculation = allowed_bytes(config.memory, device), config.speculation
    # Measured now, so that a start that makes the file gets the same plan as later ones.
    process = process_bytes()
    free = memory - process
    total = needs.weights + sum(needs.draft_weights.values()) + needs.adapters
    if config.offload == "never":
        if total > free:
            raise CapacityError(_lack_of_memory(needs, config, memory, free))
        return None
    limits = STREAM_LIMITS[2]  # for one or two requests
    model = needs.target.config, dtype
    models = [needs.cache, *(needs.draft_sets[0].caches if speculation.drafts else ())]
    caches = config.cache.memory or cache_bytes(models, limits.positions, speculation)
    if total + caches + activation_bytes(*model, limits.rows) <= free:
        return None
    library = kernels.library
    if library is None:
        name = needs.target.files.name
        check_support({Feature.STREAMED: f"{config.offload!r} and {name}", Feature.TORCH: device})
    # No file is written if no plan fits.
    needs.candidates(memory, process, needs.sizes(), config)
    prepared = needs.target.prepare(needs.hardware, needs.quantization, offload_folder(config), progress)
    disk = measure(StreamSource(prepared.path))
    assert library is not None, "streamed layers have native kernels"
    bandwidth = Bandwidth(library, _SAMPLE).median()
    plans = [
        MemoryPlan(placement, drafts, limits, caches, disk, bandwidth, prepared)
        for drafts, limits, caches, placement in needs.candidates(
            memory, process, needs.sizes(prepared), config
        )
    ]
    return best_plan(plans)


def best_plan(plans: Sequence[MemoryPlan]) -> MemoryPlan:
    """Return the plan with the widest limits among those that are about as fast as the fastest."""
    enough = _FAST_ENOUGH * max(plan.speed for plan in plans)
    return max(plans, key=lambda plan: (plan.speed >= enough, plan.limits, plan.speed))


def offload_folder(config: EngineConfig) -> Path | None:
    """Return the folder of prepared files of streamed models; None: the user's cache."""
    return None if config.offload_folder is None else Path(config.offload_folder).expanduser()


def _lack_of_memory(needs: MemoryNeeds, config: EngineConfig, memory: int, free: int) -> str:
    """Return the message for a lack of memory, with the alternative of streaming."""
    target, (device, dtype, kernels, _) = needs.target, needs.hardware
    parts = {target.files.name: needs.weights, **needs.draft_weights}
    advice = "choose a smaller model, fewer drafts"
    if needs.adapters:
        parts["adapters"] = needs.adapters
    if config.memory is not None:
        model, (positions, rows, _) = (target.config, dtype), STREAM_LIMITS[-1]
        models = [needs.cache, *(needs.draft_sets[0].caches if needs.draft_sets else ())]
        caches = cache_bytes(models, positions, config.speculation)
        parts["this process"] = memory - free
        parts["a small context"] = activation_bytes(*model, rows) + 2 * caches
    sizes = " + ".join(f"{name} {gib(size)}" for name, size in parts.items())
    if config.memory is not None:
        least = f"{-(-sum(parts.values()) >> 20)}MB"
        text = f"--memory (memory) is {gib(memory)}, and {least} are needed: {sizes}; raise it, or {advice}"
    else:
        limit = "" if address_space_left() is None else ", or raise the limit of `ulimit -v`"
        text = (
            f"the weights need {sizes} = {gib(sum(parts.values()))}, but {gib(free)} of memory are free on "
            f"{device}; {advice}, or free some memory{limit}"
        )
    if device.type != "cpu" or kernels.library is None:
        return text
    path = target.model.path
    file = next(iter(sorted(path.glob("*.safetensors"))), path) if path.is_dir() else path
    try:
        candidates = needs.candidates(memory, memory - free, needs.sizes(), config)
        disk = measure(StreamSource(file))
    except (CapacityError, ModelFileError):
        return text  # streaming would not fit, either
    placement = min((placement for *_, placement in candidates), key=lambda one: one.streamed_bytes)
    folder = prepared_path(path, "", dtype, offload_folder(config)).parent
    return f"{text}; or --offload auto: {placement.summary(disk, folder)}"


def allowed_bytes(memory: int | None, device: torch.device) -> int:
    """Return the bytes that the whole process may take; `memory` is the option.

    Raises CapacityError if the machine or the process's cgroup has less.
    """
    most = process_bytes() + free_bytes(device)
    if memory is None:
        return most
    if memory > most:
        raise CapacityError(
            f"memory is {gib(memory)}, and this process can have {gib(most)} here; lower it, or free some"
        )
    return memory


def activation_bytes(config: ModelConfig, dtype: torch.dtype, rows: int) -> int:
    """Return about the bytes that a pass of `rows` rows takes besides weights and KV caches."""
    widest = config.hidden_size * 6 + config.intermediate_size * 4 + config.num_heads * config.head_dim * 4
    floats = 0
    if (r := config.recurrence) is not None:  # its inputs and outputs are float32
        widest += sum(input_rows(r).values())
        floats = r.channels + r.heads * r.value_size
    return rows * (widest * max(2, dtype.itemsize) + 4 * floats) + MAX_BYTES + _SLACK


def cache_bytes(models: Caches, positions: int, speculation: SpeculationConfig) -> int:
    """Return the bytes of caches of these models with `positions` each, at most four contexts.

    Recurrent states are those of one request and of as few checkpoints as may be.
    """
    most = 4 * min(config.max_context for config, _ in models)
    nodes = LEAST.nodes if speculation.max_nodes == "auto" else speculation.node_limit
    return bytes_per_block(models, min(positions, most)) + state_bytes(models, LEAST._replace(nodes=nodes))


def draft_bytes(model: OpenModel, dtype: torch.dtype, kernels: Kernels, kind: Quantization) -> int:
    """Return the bytes of a draft's weights in memory if its embeddings are read from the disk."""
    return estimate_bytes(model, dtype, kernels, kind) - table_bytes(model, dtype, kind)
