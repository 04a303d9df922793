"""A policy trace: texts, the drafts' proposals at every position, and the costs of passes and stages.

Under the coupled rule, and greedily, a text does not depend on the proposals. So a trace determines the
result of any policy on these texts without a model (engine.py). Model-free speculators propose again during a
replay, so a trace does not keep their proposals.

On disk it is one NumPy .npz file: named arrays and a JSON header, without pickles.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.replay.guess_trie import GuessTrie
from specinfer.config import new_names
from specinfer.errors import ConfigError, UserError
from specinfer.files import NewFile
from specinfer.heads.config import BlockRows
from specinfer.runtime.cost_curve import CostCurve
from specinfer.sampling_params import SamplingParams
from specinfer.speculation_config import SpeculationConfig

DEPTH: Final = 8  # min number of recorded levels of draft trees
VERSION: Final = 3
_READ: Final = (2, 3)  # versions; 2 has no heads
LARGEST: Final = 4 << 30  # max bytes of all arrays
_UNSAID: Final = SpeculationConfig(lookup=False)  # defaults for fields that a file omits
_FORMAT: Final = "specinfer policy trace"
# Kept request parameters: those that speculators, their limits and text ends depend on.
KEPT_PARAMS: Final = (
    *("temperature", "top_k", "top_p", "min_p", "max_tokens", "min_tokens", "ignore_eos", "stop_token_ids"),
)
# Exceptions from reading an invalid file.
_DAMAGED: Final = (
    *(ValueError, TypeError, EOFError, MemoryError, NotImplementedError, RuntimeError, RecursionError),
    *(OverflowError, AttributeError, zipfile.BadZipFile, zlib.error, OSError),
)
_ARRAYS: Final = tuple(f.name for f in fields(GuessTrie))


@dataclass(frozen=True, slots=True)
class RecordedText:
    """One answer: prompt, output, and the parameters that proposals depend on."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    params: SamplingParams
    seed: int
    prediction: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class RecordedDraft:
    """One draft's proposals along all texts, and the costs of its passes.

    A head's sites of a root form one tree, grown best first; every smaller tree is a part of it.
    """

    model: str
    max_context: int
    curve: CostCurve
    guesses: GuessTrie
    # rows -> number of passes, seconds
    measured: Mapping[int, tuple[int, float]] = field(default_factory=dict)
    head: BlockRows | None = None  # block heads only; None: a draft model


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEngine:
    """Limits of the engine that wrote the texts; they determine its plans."""

    vocab: int
    max_context: int
    max_step_tokens: int
    block_size: int
    prefix_reuse: bool
    ending: tuple[int, ...]  # token ids that end a text, unless a request ignores them


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Trace:
    """Texts of one target with one set of drafts."""

    model: str
    engine: RecordedEngine
    speculation: SpeculationConfig  # with the recorded speculators, shapes and limits
    texts: tuple[RecordedText, ...]
    drafts: Mapping[str, RecordedDraft]  # by speculator name, in the order they run
    curve: CostCurve  # of the target
    stages: Mapping[str, float]  # mean seconds of each stage of a step without speculation
    likeliest: NDArray[np.float32]  # [places, 2]: the target's two highest log-probabilities; NaN: unknown
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def starts(self) -> list[int]:
        """Index of each text's first output token among those of all texts, and the total at the end."""
        return [0, *accumulate(len(text.output) for text in self.texts)]

    @property
    def places(self) -> int:
        """Output tokens of all texts."""
        return self.starts[-1]


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace to `path`, whole or not at all; raises ConfigError if that fails."""
    parts = [part for text in trace.texts for part in (text.prompt, text.output, text.prediction)]
    arrays: dict[str, NDArray[Any]] = {
        "head": np.frombuffer(json.dumps(_head(trace)).encode(), dtype=np.uint8),
        "tokens": np.array([token for part in parts for token in part], dtype=np.int32),
        "lengths": np.array([len(part) for part in parts], dtype=np.int32).reshape(-1, 3),
        "likeliest": trace.likeliest,
    }
    for number, draft in enumerate(trace.drafts.values()):
        arrays |= {f"draft{number}.{name}": getattr(draft.guesses, name) for name in _ARRAYS}
    packed = io.BytesIO()
    np.savez_compressed(packed, allow_pickle=False, **arrays)
    try:
        with NewFile(path, 0o644) as new:
            new.write(packed.getbuffer())
            new.keep()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def read_trace(path: Path) -> Trace:
    """Read a trace; raises UserError if the file is no trace, damaged or inconsistent."""
    try:
        if (size := path.stat().st_size) > LARGEST:
            raise UserError(f"{path} has {size} bytes; allowed: {LARGEST}")
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    try:
        return _trace(_arrays(data))
    except KeyError as error:
        reason = f"it lacks {error}"
    except _DAMAGED as error:
        reason = " ".join(str(error).split())
    raise UserError(f"{path} is not a policy trace: {reason}; give a file that `policy_traces` wrote")


def _head(trace: Trace) -> dict[str, Any]:
    speculation = {
        f.name: str(value) if f.name == "expansion" else value
        for f in fields(SpeculationConfig)
        if (value := getattr(trace.speculation, f.name)) != getattr(_UNSAID, f.name)
    }
    return {
        "format": _FORMAT,
        "version": VERSION,
        "model": trace.model,
        "engine": asdict(trace.engine),
        "speculation": speculation,
        "curve": _points(trace.curve),
        "stages": dict(trace.stages),
        "requests": [
            {"seed": text.seed, "params": {name: getattr(text.params, name) for name in KEPT_PARAMS}}
            for text in trace.texts
        ],
        "drafts": [
            {
                "name": name,
                "model": draft.model,
                "max_context": draft.max_context,
                "curve": _points(draft.curve),
                "measured": [[rows, *seen] for rows, seen in sorted(draft.measured.items())],
                **({} if draft.head is None else {"head": asdict(draft.head)}),
            }
            for name, draft in trace.drafts.items()
        ],
        "provenance": dict(trace.provenance),
    }


def _points(curve: CostCurve) -> list[list[float]]:
    return [[*pair] for pair in zip(curve.rows, curve.at_rows, strict=True)]


def _arrays(data: bytes) -> dict[str, NDArray[Any]]:
    """Read the arrays of an .npz file; each has its entry's size, and all have at most LARGEST bytes."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        entries = file.infolist()
        if (size := sum(entry.file_size for entry in entries)) > LARGEST:
            raise ValueError(f"it holds {size} bytes; allowed: {LARGEST}")
        return {entry.filename.removesuffix(".npy"): _array(file, entry) for entry in entries}


def _array(file: zipfile.ZipFile, entry: zipfile.ZipInfo) -> NDArray[Any]:
    with file.open(entry) as data:
        if np.lib.format.read_magic(data) != (1, 0):
            raise ValueError(f"{entry.filename} has an unknown header")
        shape, fortran, kind = np.lib.format.read_array_header_1_0(data)
        if fortran or kind.hasobject or kind.byteorder == ">":
            raise ValueError(f"{entry.filename} is not a plain array")
        raw = data.read()
    if math.prod(shape) * kind.itemsize != len(raw):
        raise ValueError(f"{entry.filename} has another length than its entry")
    return np.frombuffer(raw, dtype=kind).reshape(shape)


def _trace(arrays: Mapping[str, NDArray[Any]]) -> Trace:
    head = json.loads(arrays["head"].tobytes())
    if not isinstance(head, dict) or head.get("format") != _FORMAT:
        raise ValueError("its header lacks the format name")
    if head["version"] not in _READ:
        raise ValueError(f"it is of version {head['version']}, this specinfer reads {_READ[0]} to {VERSION}")
    facts = {**head["engine"], "ending": tuple(head["engine"]["ending"])}
    engine = RecordedEngine(**facts)
    texts = _texts(arrays, head["requests"], engine)
    places = sum(len(text.output) for text in texts)
    likeliest = _typed(arrays, "likeliest", np.float32)
    if likeliest.shape != (places, 2):
        raise ValueError("likeliest has not two values for each output token")
    drafts = {}
    for number, draft in enumerate(head["drafts"]):
        guesses = _guesses(arrays, number, places, engine.vocab)
        measured = {int(rows): (int(passes), float(seconds)) for rows, passes, seconds in draft["measured"]}
        drafts[str(draft["name"])] = RecordedDraft(
            str(draft["model"]),
            int(draft["max_context"]),
            _curve(draft["curve"]),
            guesses,
            measured,
            _block(draft["head"]) if "head" in draft else None,
        )
    stages = {str(stage): float(seconds) for stage, seconds in head["stages"].items()}
    if not all(0 <= seconds < math.inf for seconds in stages.values()):
        raise ValueError("a stage has an invalid number of seconds")
    return Trace(
        model=str(head["model"]),
        engine=engine,
        speculation=replace(_UNSAID, **new_names(head["speculation"])),
        texts=texts,
        drafts=drafts,
        curve=_curve(head["curve"]),
        stages=stages,
        likeliest=likeliest,
        provenance=dict(head["provenance"]),
    )


def _block(facts: Mapping[str, Any]) -> BlockRows:
    block = BlockRows(
        block_size=int(facts["block_size"]),
        skipped=int(facts["skipped"]),
        causal=bool(facts["causal"]),
        reads_last=bool(facts["reads_last"]),
    )
    if not 0 <= block.skipped < block.block_size:
        raise ValueError(f"a block of {block.block_size} rows skips {block.skipped}")
    return block


def _texts(
    arrays: Mapping[str, NDArray[Any]], requests: list[Any], engine: RecordedEngine
) -> tuple[RecordedText, ...]:
    tokens, lengths = _typed(arrays, "tokens", np.int32), _typed(arrays, "lengths", np.int32)
    if (
        lengths.shape != (len(requests), 3)
        or (lengths < 0).any()
        or lengths.sum(dtype=np.int64) != len(tokens)
    ):
        raise ValueError("the lengths of its texts do not add up")
    if (lengths[:, :2] < 1).any():
        raise ValueError("a prompt or an output is empty")
    if ((tokens < 0) | (tokens >= engine.vocab)).any():
        raise ValueError(f"a text has an id outside [0, {engine.vocab})")
    ends = np.cumsum(lengths).tolist()
    parts = [tuple(tokens[start:end].tolist()) for start, end in zip([0, *ends], ends, strict=False)]
    return tuple(
        RecordedText(
            prompt=parts[3 * i],
            output=parts[3 * i + 1],
            prediction=parts[3 * i + 2],
            params=SamplingParams(**{name: request["params"][name] for name in KEPT_PARAMS}),
            seed=int(request["seed"]),
        )
        for i, request in enumerate(requests)
    )


def _guesses(arrays: Mapping[str, NDArray[Any]], number: int, places: int, vocab: int) -> GuessTrie:
    kinds = dict.fromkeys(_ARRAYS, np.int32) | {
        "first": np.int64,
        "evidence": np.float64,
        "confidences": np.float64,
    }
    found = {name: _typed(arrays, f"draft{number}.{name}", kinds[name]) for name in _ARRAYS}
    if any(values.ndim != 1 + (name == "evidence") for name, values in found.items()):
        raise ValueError("an array of guesses has another shape")
    guesses = GuessTrie(**found)
    if wrong := guesses.complaint(places, vocab):
        raise ValueError(wrong)
    return guesses


def _typed(arrays: Mapping[str, NDArray[Any]], name: str, kind: Any) -> NDArray[Any]:
    if arrays[name].dtype != kind:
        raise ValueError(f"{name} is of {arrays[name].dtype}, not {np.dtype(kind)}")
    return arrays[name]


def _curve(points: Any) -> CostCurve:
    rows, seconds = [int(point[0]) for point in points], [float(point[1]) for point in points]
    rising = all(a < b for a, b in pairwise(rows)) and sorted(seconds) == seconds
    if len(rows) < 2 or rows[0] < 1 or not rising or not 0 < seconds[0] <= seconds[-1] < math.inf:
        raise ValueError("a cost curve does not rise")
    return CostCurve(tuple(rows), tuple(seconds))
