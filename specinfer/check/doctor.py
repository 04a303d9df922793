"""Facts about the machine, its kernels, disk and pass costs, for `specinfer doctor`."""

import contextlib
import math
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import psutil
import torch
from torch import Tensor

from specinfer.check.kernel_faults import kernel_fault
from specinfer.config import EngineConfig
from specinfer.engine.models import load_models
from specinfer.errors import ConfigError, ModelFileError
from specinfer.files import cache_dir
from specinfer.hub import resolve
from specinfer.kernels.attention import NativeAttention
from specinfer.kernels.build import packaged_library
from specinfer.kernels.disk import Bandwidth, DiskRate, StreamSource, gigabytes, measure, seconds
from specinfer.kernels.library import Library, RefusedLevel, find_best
from specinfer.kernels.machine import (
    LEVELS,
    VARIABLE,
    Level,
    allowed_cpus,
    architecture,
    cgroup_cpus,
    cpu_features,
    cpu_name,
    levels_here,
    thread_count,
    usable_cores,
)
from specinfer.models.language_model import LanguageModel
from specinfer.models.open_model import open_model
from specinfer.models.weight_sizes import estimate_bytes, expert_bytes, table_bytes
from specinfer.plan import StateCheckpoint, StateCounts, StateUse
from specinfer.progress import Progress
from specinfer.report.provenance import versions
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.runtime.kv_cache import SHARE_OF_FREE, bytes_per_block, free_bytes, process_bytes
from specinfer.runtime.runner import ModelRunner
from specinfer.runtime.state_cache import state_bytes
from specinfer.speculation_config import Quantization

TEXT: Final = 200  # tokens in the cache before a timed pass
PASSES: Final = 9  # timed passes; the median is reported
BLOCK: Final = 16  # cache positions
TRIAL: Final = 256_000_000  # min bytes of the file that a disk is timed with
_WRITE: Final = 1 << 24  # bytes per write
_GAIN: Final = 0.1  # min part of a pass's bytes that an int8 KV cache saves
# they determine the kernels and the number of threads
VARIABLES: Final = (VARIABLE, "OMP_NUM_THREADS", "CXX")

Standing = Literal["used", "not needed", "refused", "not selected", "not on this CPU"]


@dataclass(frozen=True, slots=True)
class LevelFact:
    """A kernel level of this architecture, and whether it is used."""

    name: str
    words: str  # its instruction sets, for users
    standing: Standing
    reason: str | None  # None if `standing` is the whole reason


@dataclass(frozen=True, slots=True)
class FoundKernels:
    """The kernel library in use, if any; `runs` is "nothing" if SPECINFER_CPU is invalid."""

    library: Library | None
    refused: tuple[RefusedLevel, ...]  # better levels, not used
    fault: str | None  # the reason for `library` None
    runs: Literal["native", "torch", "nothing"]


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Facts about this machine and specinfer's use of it."""

    versions: dict[str, str]
    system: str
    cpu: str
    architecture: str
    kernels: Literal["native", "torch", "nothing"]  # torch: PyTorch fallbacks
    kernels_fault: str | None  # the reason for not using native kernels
    wrong_result: str | None  # the first of the native kernels, compared with PyTorch
    library: str | None
    library_from: Literal["wheel", "cache"] | None  # cache: compiled on this machine
    levels: tuple[LevelFact, ...]  # best first
    variables: dict[str, str]  # those of VARIABLES that are set
    threads: int
    usable_cores: int  # allowed physical cores, limited by the quota
    physical_cores: int | None  # all physical cores; None if the system does not report them
    allowed_cpus: int  # logical CPUs in the process's affinity
    cgroup_cpus: float | None  # CPU quota; None without a limit
    memory_bytes_per_second: float | None  # streaming rate; None without native kernels


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """Rate at which layers would stream from a folder."""

    folder: str
    file: str | None  # existing file that was read; None if a temporary one was written
    rate: DiskRate | None
    fault: str | None  # the reason for `rate` None


@dataclass(frozen=True, slots=True)
class PassCost:
    """Cost of a one-node pass after some text, compared with the time to read its bytes."""

    model: str
    quantization: Quantization
    dtype: str
    attention: Literal["native", "torch"]
    text: int  # tokens
    milliseconds: float
    prompt_milliseconds: float  # time of the pass over the text
    memory: int  # bytes that the process grew by, for weights and the pass
    bytes: int  # bytes that the pass must read
    # in a mixture: experts read per node and layer, experts per layer
    experts: tuple[int, int] | None
    times_floor: float | None  # multiple of the time to stream the bytes; None if the bandwidth is unknown
    int8_cache_pays: tuple[str, ...]  # when `kv_cache_dtype` int8 would pay


def find_kernels(progress: Progress | None = None) -> FoundKernels:
    """Find the kernels for this machine, compile them if necessary and set their number of threads.

    Does not raise: missing kernels are reported in the result.
    """
    try:
        library, refused = find_best(progress)
    except ConfigError as error:  # an invalid SPECINFER_CPU; no model would be loaded
        return FoundKernels(None, (), str(error), "nothing")
    if library is not None:
        library.set_threads(thread_count())
        return FoundKernels(library, tuple(refused), None, "native")
    fault = refused[-1].reason if refused else "this CPU has none of the levels there are kernels for"
    return FoundKernels(None, tuple(refused), fault, "torch")


def machine_facts(found: FoundKernels, bandwidth: Bandwidth | None) -> MachineFacts:
    """Collect facts about this machine; compare its kernels, and measure `bandwidth` unless it is None."""
    library = found.library
    packaged = library is not None and library.path == packaged_library(library.level)
    return MachineFacts(
        versions=versions(),
        system=platform.platform(),
        cpu=cpu_name(),
        architecture=architecture(),
        kernels=found.runs,
        kernels_fault=found.fault,
        wrong_result=None if library is None else kernel_fault(library),
        library=None if library is None else str(library.path),
        library_from=None if library is None else "wheel" if packaged else "cache",
        levels=tuple(level_facts(None if library is None else library.level, found.refused)),
        variables={name: os.environ[name] for name in VARIABLES if os.environ.get(name)},
        threads=thread_count(),
        usable_cores=usable_cores(),
        physical_cores=psutil.cpu_count(logical=False),
        allowed_cpus=len(allowed_cpus()),
        cgroup_cpus=cgroup_cpus(),
        memory_bytes_per_second=None if bandwidth is None else bandwidth.median(),
    )


def disk_facts(folder: Path) -> DiskFacts:
    """Measure the streaming rate of `folder`; errors are reported in the result.

    Reads a large existing file, or writes a temporary one of TRIAL bytes, which takes a second or two.
    """
    file: str | None = None
    try:
        if (found := _large_file(folder)) is not None:
            file = found.name
            return DiskFacts(str(folder), file, measure(StreamSource(found)), None)
        place = next(path for path in (folder, *folder.parents) if path.exists())
        if (free := shutil.disk_usage(place).free) < TRIAL:
            fault = f"a trial takes {gigabytes(TRIAL)}, and {gigabytes(free)} are free"
            return DiskFacts(str(folder), None, None, fault)
        with tempfile.NamedTemporaryFile(dir=place, prefix="doctor.", suffix=".partial") as trial:
            written = os.urandom(min(_WRITE, TRIAL))  # some disks compress zeros
            for _ in range(-(-TRIAL // len(written))):
                trial.write(written)
            trial.flush()
            os.fsync(trial.fileno())
            return DiskFacts(str(folder), None, measure(StreamSource(Path(trial.name))), None)
    except OSError as error:
        return DiskFacts(str(folder), file, None, f"no file can be made there: {error.strerror}")
    except ModelFileError as error:
        return DiskFacts(str(folder), file, None, str(error))


def _large_file(folder: Path) -> Path | None:
    """Return the largest model file in a folder or in the cache on its disk, or None without a large one."""
    sizes: dict[Path, int] = {}
    with contextlib.suppress(OSError):
        device = folder.stat().st_dev
        for path in (*folder.glob("*.safetensors"), *cache_dir().glob("models/*/*.gguf")):
            with contextlib.suppress(OSError):  # a file may be deleted meanwhile or not be readable
                if (found := path.stat()).st_dev == device and os.access(path, os.R_OK):
                    sizes[path] = found.st_size
    return max((path for path in sizes if sizes[path] >= TRIAL), key=sizes.__getitem__, default=None)


def level_facts(used: Level | None, refused: Sequence[RefusedLevel]) -> list[LevelFact]:
    """Return the standing of each level of this architecture, best first."""
    reasons = {fault.level: fault.reason for fault in refused}
    allowed: tuple[Level, ...] = ()
    unselected = f"{VARIABLE} is {os.environ.get(VARIABLE)!r}"
    try:
        allowed = levels_here()
    except ConfigError:
        unselected += ", which this CPU does not support"

    def fact(level: Level) -> tuple[Standing, str | None]:
        if missing := level.needs - cpu_features():
            return "not on this CPU", f"it lacks {', '.join(sorted(missing))}"
        if level in reasons:
            return "refused", reasons[level]
        if level == used:
            return "used", None
        return ("not needed", None) if level in allowed else ("not selected", unselected)

    here = [level for level in reversed(LEVELS) if level.architecture == architecture()]
    return [LevelFact(level.name, level.words, *fact(level)) for level in here]


def pass_cost(
    config: EngineConfig, bandwidth: Bandwidth | None, progress: Progress | None = None
) -> PassCost:
    """Load the config's target and time a one-node pass; raises as `load_models`."""
    before = process_bytes()
    models = load_models(config, progress)
    target, kind = models.target, models.quantization
    text = min(TEXT, target.config.max_context - 1)
    size = pass_bytes(resolve(config.model).path, target, kind, text)
    tree_pass(target, text, 1)()
    started = time.perf_counter()
    call, mixture = tree_pass(target, text, 1), target.config.experts
    prompt_seconds = time.perf_counter() - started
    times = None
    if bandwidth is None:
        milliseconds = 1e3 * statistics.median(seconds(call) for _ in range(PASSES))
    else:
        milliseconds, times = bandwidth.compare(call, size, PASSES)
    return PassCost(
        model=config.model,
        quantization=kind,
        dtype=str(target.dtype).removeprefix("torch."),
        attention="native" if isinstance(target.kernels.attention, NativeAttention) else "torch",
        text=text,
        milliseconds=milliseconds,
        prompt_milliseconds=1e3 * prompt_seconds,
        memory=max(0, process_bytes() - before),
        bytes=size,
        experts=None if mixture is None else (mixture.per_token, mixture.count),
        times_floor=times,
        int8_cache_pays=tuple(int8_cache_pays(target, size, free_bytes(target.device))),
    )


def int8_cache_pays(model: LanguageModel, read: int, free: int) -> Iterator[str]:
    """Yield when a KV cache in int8 pays: for long texts, and for those that do not fit exactly.

    `read` are the bytes of a pass over a short text; int8 pays if it saves a tenth of a pass's bytes. Windows
    bound these bytes, so only the memory counts for models that have them.
    """
    longest = model.config.max_context
    exact, rounded = (bytes_per_block([(model.config, kind)], 1) for kind in (model.dtype, torch.int8))
    windows = any(window is not None for window in model.config.layer_windows)
    gain = exact - rounded - _GAIN * exact
    if not windows and gain > 0 and (least := math.ceil(_GAIN * read / gain)) <= longest:
        yield f"for texts of {least} tokens or more"
    if (fitting := int(SHARE_OF_FREE * free) // max(1, exact)) < longest:
        yield f"for texts of more than {fitting} tokens, which do not fit into half of the free memory"


def pass_bytes(path: Path, model: LanguageModel, quantization: Quantization, text: int) -> int:
    """Return the bytes that a one-node pass after `text` tokens must read: matrices, K and V.

    Counts one read and one write of recurrent states. Leaves out embeddings, since the pass reads only a few
    rows, and experts that the node does not use. `path` is the model's file or folder.
    """
    config = model.config
    opened = open_model(path)
    size = estimate_bytes(opened, model.dtype, model.kernels, quantization)
    # Without native or quantized products, tied embeddings are also the output layer, stored once.
    if quantization != "none" or model.kernels.library is not None or not config.tie_embeddings:
        size -= table_bytes(opened, model.dtype, quantization)
    if (experts := config.experts) is not None:
        left = experts.count - experts.per_token
        size -= expert_bytes(opened, model.dtype, quantization) * left // experts.count
    models = [(config, model.kernels.kv_dtype(model.dtype))]
    return size + bytes_per_block(models, text) + state_bytes(models, StateCounts(0, 2))


def tree_pass(model: LanguageModel, text: int, nodes: int) -> Callable[[], Tensor]:
    """Return a function that runs a binary tree of nodes after `text` cached tokens, with all logits."""
    blocks = -(-(text + nodes) // BLOCK)
    counts, begin = StateCounts(1, 1, nodes), StateCheckpoint(1, text)
    runner = ModelRunner(model, num_blocks=blocks, block_size=BLOCK, states=counts)
    table, vocab = list(range(blocks)), model.config.vocab_size
    rows = chain_rows([token % vocab for token in range(text)], 0, table, logits=True)
    runner.forward([replace(rows, states=StateUse(0, None, (begin,)))])
    parents = [-1, *((node - 1) // 2 for node in range(1, nodes))]
    tree = [(node + 1) % vocab for node in range(nodes)]
    use = StateUse(0, begin)  # each pass begins with the text's states
    return lambda: runner.forward([Rows(tree, text, table, 0, parents, states=use)])
