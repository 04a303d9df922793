"""CostCurve: seconds of a forward pass by its number of rows, measured once and cached on disk.

On a machine bound by memory bandwidth 16 rows cost as much as one; on one bound by arithmetic they cost
several times as much. Most are bound by the former for few rows and by the latter for many. So passes of a
few sizes are measured, with linear interpolation between them. Beyond the largest size the last slope
continues, so sizes are added until the curve rises.

Other load on the machine only adds time. So the fastest of several passes counts, and a size above the line
between its neighbours was disturbed: the curve is the lower hull of the measurements.

A first start has no time for all of this: `stop` ends a measurement early, and its curve is rough. The engine
uses it, corrected by its steps (cost_model.py), and so do later starts, until an engine has measured the
whole curve in an idle moment.

In a mixture of experts 16 rows read the weights of several times as many experts as one row, and the next 16
rows add fewer: seconds rise steeply at first. There the interpolation is linear in the expected number of
experts read.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from specinfer.files import cache_dir, write_whole
from specinfer.kernels.choice import Kernels
from specinfer.kernels.machine import allowed_cpus, cpu_name
from specinfer.models.config import Experts, ModelConfig
from specinfer.progress import NoProgress, Progress

# Rows, in order of measurement; a slow model only gets the first few.
_SIZES: Final = (1, 16, 4, 64, 2, 8, 32, 128)
_MIN_SIZES: Final = 2  # minimum number of sizes
_SECONDS: Final = 2.0  # for all of these together, about
_LARGER: Final = (32, 64, 128, 256, 512, 1024, 2048)  # rows; measured after these, in this order
_LARGER_SECONDS: Final = 0.25  # for these together, per 512 rows of the largest pass
_FLAT: Final = 1.5  # multiple of one row's pass; a curve that ends below does not show the cost of rows
_ROUNDS: Final = 5
_MIN_CACHED: Final = 0.2  # seconds; a faster measurement is repeated at every start
_FAR: Final = 1 << 20  # rows; end of the extrapolation
_OF_A_ROW: Final = 0.01  # minimum arithmetic time of a row relative to reading its experts
# Packages with the code of a pass.
_CODE: Final = (
    "attention",
    "heads",
    "kernels",
    "models",
    "parallel",
    "runtime",
    "transport",
)

Key = Mapping[str, str]
Stop = Callable[[float], bool]  # gets the seconds since a measurement began


def never(_: float) -> bool:
    """Do not end a measurement early."""
    return False


class TimedModel(Protocol):
    """A model whose passes are timed."""

    config: ModelConfig
    dtype: torch.dtype  # of weights, activations and logits
    device: torch.device  # of the weights
    kernels: Kernels  # that compute the layers' operations and attention


class Timed(Protocol):
    """A model with its cache, for measuring passes."""

    @property
    def model(self) -> TimedModel:
        """The model."""

    def probe(self, rows: int, *, every_row: bool) -> None:
        """Run one pass of `rows` rows like a step's, in the cache's first slots."""


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds of one pass by its rows: piecewise linear, monotonic, and 0 for no rows."""

    rows: tuple[int, ...]  # ascending, at least two
    at_rows: tuple[float, ...]  # seconds of a pass of each size; convex, except for mixtures of experts
    rough: bool = False  # True if its measurement was ended early

    @classmethod
    def through(
        cls, measured: Mapping[int, float], experts: Experts | None = None, *, rough: bool = False
    ) -> CostCurve:
        """Return the lower hull of measured seconds by rows, for at least two sizes.

        For a mixture the hull is over the number of `experts` read, with further corners at powers of two.
        """
        if experts is not None:
            powers = (1 << n for n in range(max(measured).bit_length()))
            sizes = sorted({*measured, *(rows for rows in powers if rows > min(measured))})
            # The experts that a pass of each size reads, in units of one row's, plus a little per row.
            weights = {rows: experts.active(rows) / experts.per_token + _OF_A_ROW * rows for rows in sizes}
            hull = _lower_hull({weights[rows]: taken for rows, taken in measured.items()})
            places, taken = [place for place, _ in hull], [seconds for _, seconds in hull]
            return cls(tuple(sizes), tuple(np.interp([*weights.values()], places, taken).tolist()), rough)
        rows, at_rows = zip(*_lower_hull(measured), strict=True)
        return cls(rows, at_rows, rough)

    def at_least(self, min_seconds: float) -> CostCurve:
        """Return the curve of passes that take at least `min_seconds`, as with streamed weights.

        It has a corner where this curve crosses that value.
        """
        if min_seconds <= self.at_rows[0]:
            return self
        rows, seconds = self.corners()
        if min_seconds >= seconds[-1]:
            return CostCurve(self.rows, (min_seconds,) * len(self.rows))
        crossing = math.ceil(np.interp(min_seconds, seconds, rows))
        sizes = sorted({1, max(1, crossing - 1), crossing, crossing + 64, *self.rows})
        return CostCurve(
            tuple(sizes), tuple(max(min_seconds, taken) for taken in self.seconds(sizes).tolist())
        )

    def __add__(self, other: CostCurve) -> CostCurve:
        """Return the curve of both passes in sequence."""
        sizes = sorted({*self.rows, *other.rows})
        return CostCurve(tuple(sizes), tuple((self.seconds(sizes) + other.seconds(sizes)).tolist()))

    def seconds(self, rows: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds of passes of `rows` rows, in the shape of `rows`."""
        return np.asarray(np.interp(rows, *self.corners()))

    def table(self, rows: int) -> list[float]:
        """Return the seconds of passes of 0, 1, ... `rows` rows."""
        seconds: list[float] = self.seconds(np.arange(rows + 1)).tolist()
        return seconds

    def expected(self, rows: int) -> float:
        """Return the seconds of one pass of `rows` rows."""
        return float(self.seconds([rows])[0])

    def corners(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Rows and seconds of the curve's corners, from 0 rows to the end of the extrapolation."""
        last, before = (self.rows[-1], self.at_rows[-1]), (self.rows[-2], self.at_rows[-2])
        far = last[1] + _slope(before, last) * (_FAR - last[0])
        return (0, *self.rows, _FAR), (0.0, *self.at_rows, far)


_Size = TypeVar("_Size", int, float)


def _lower_hull(measured: Mapping[_Size, float]) -> list[tuple[_Size, float]]:
    """Return the points of the lower hull, ascending; points above it were disturbed measurements."""
    hull: list[tuple[_Size, float]] = []
    quickest = math.inf
    for place in sorted(measured, reverse=True):
        quickest = min(quickest, measured[place])
        point = (place, quickest)
        while len(hull) >= 2 and _slope(point, hull[-1]) > _slope(hull[-1], hull[-2]):
            hull.pop()
        hull.append(point)
    return hull[::-1]


def _slope(left: tuple[float, float], right: tuple[float, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


def cost_curve(
    runner: Timed,
    *,
    max_rows: int,
    variant: str,
    every_row: bool = False,
    keep: bool = False,
    behind: Timed | None = None,
    progress: Progress | None = None,
    stop: Stop = never,
) -> CostCurve:
    """Return the cost curve of a model on this machine, measured now or read from the user's cache.

    Overwrites the first slots of the model's cache, which must be unused. If the user's cache cannot be
    written, the next start measures again.

    Args:
        runner: the model with its cache.
        max_rows: rows of the largest pass; the cache must have room for them.
        variant: part of the key: quantization and the size of the output layer.
        every_row: True if the logits of all rows are read, as by a draft, not the likeliest first.
        behind: a model that runs a pass before each. A small model's weights stay in the CPU caches while it
            is measured alone, but not in a step.
        keep: True to cache also a curve that takes little time to measure.
        stop: as for `measure`; a rough curve is read from the cache if `stop` is true at once.
    """
    if behind is not None:
        variant += ", behind a pass of its target"
    key = _key(runner.model, max_rows, variant, every_row)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    file = cache_dir() / "curves" / f"{digest}.json"
    curve = _read(file, key)
    if curve is None or (curve.rough and not stop(math.inf)):
        began = time.perf_counter()
        curve = measure(
            runner, max_rows=max_rows, every_row=every_row, behind=behind, progress=progress, stop=stop
        )
        if keep or time.perf_counter() - began > _MIN_CACHED:
            kept_curve = {"key": key, "rows": curve.rows, "seconds": curve.at_rows, "rough": curve.rough}
            write_whole(file, json.dumps(kept_curve, indent=1))
    return curve


def measure(
    runner: Timed,
    *,
    max_rows: int,
    every_row: bool = False,
    behind: Timed | None = None,
    progress: Progress | None = None,
    stop: Stop = never,
) -> CostCurve:
    """Measure passes of a few sizes up to `max_rows` rows, in rounds.

    Overwrites the first slots of the cache. Takes two or three seconds, and milliseconds for a small model: a
    size is measured again until its part of the time is used. Larger sizes are measured once while time
    remains. They are also measured while the curve is flat, each within about twice the time of the one
    before, as rows would otherwise seem to be free. `stop` gets the seconds so far before each pass but the
    first ones, and ends the measurement by True: the curve is rough then.
    """
    show = progress or NoProgress()
    sizes = [size for size in _SIZES if size <= max(_MIN_SIZES, max_rows)]
    larger = [size for size in _LARGER if size <= max_rows]
    share, experts = _SECONDS / len(sizes), runner.model.config.experts
    spent = dict.fromkeys(sizes, 0.0)
    quickest: dict[int, float] = {}
    passes, began, rough = _ROUNDS * len(sizes) + len(larger), time.perf_counter(), False
    show.start(passes, "measuring what a pass costs (once per model and machine)", "passes")

    def measured(size: int) -> float:
        began = alone = time.perf_counter()
        if behind is not None:
            behind.probe(1, every_row=False)
            alone = time.perf_counter()
        runner.probe(size, every_row=every_row)
        ended = time.perf_counter()
        quickest[size] = min(ended - alone, quickest.get(size, math.inf))
        return ended - began

    try:
        runner.probe(_MIN_SIZES, every_row=every_row)  # warm-up, as the first pass is slow
        for size in _ROUNDS * sizes:
            if rough := len(quickest) >= _MIN_SIZES and stop(time.perf_counter() - began):
                break
            late = sum(spent.values()) > _SECONDS and len(quickest) >= _MIN_SIZES
            if not late and spent[size] < share:
                spent[size] += measured(size)
            show.advance(1)
        left = _LARGER_SECONDS * max_rows / 512
        for size in larger:
            if rough := rough or stop(time.perf_counter() - began):
                break
            if size > (last := max(quickest)):
                flat = quickest[last] < _FLAT * quickest[1]
                if flat or CostCurve.through(quickest, experts).expected(size) <= left:
                    left -= measured(size)
            show.advance(1)
    finally:
        show.finish()
    return CostCurve.through(quickest, experts, rough=rough)


def _key(model: TimedModel, max_rows: int, variant: str, every_row: bool) -> dict[str, str]:
    """Return everything that the time of a pass depends on, which excludes the values of weights."""
    kernels = model.kernels
    return {
        "model": hashlib.sha256(repr(model.config).encode()).hexdigest(),
        "dtype": str(model.dtype),
        "KV cache": str(kernels.kv_dtype(model.dtype)),
        "variant": variant,
        "logits": "all" if every_row else "likeliest",
        "kernels": ", ".join(type(part).__name__ for part in (kernels.ops, kernels.attention)),
        "use": str(kernels.products.use),
        "level": "" if kernels.library is None else kernels.library.level.name,
        "max_rows": str(min(max_rows, max(_LARGER))),
        "device": device_name(model.device),
        "threads": str(torch.get_num_threads() if kernels.library is None else kernels.library.threads()),
        "torch": torch.__version__,
        "code": code_hash(),
    }


def device_name(device: torch.device) -> str:
    """Return a GPU's name, or the number and the name of the CPUs."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{len(allowed_cpus())} x {cpu_name()}"


@cache
def code_hash() -> str:
    """Return a hash of the code of a pass, as a changed kernel has another curve."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for package in _CODE:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h"):
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _read(file: Path, key: Key) -> CostCurve | None:
    """Return the curve of a file, or None if there is none with this key; files are written whole."""
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
        if found["key"] != key:
            return None
        return CostCurve(tuple(found["rows"]), tuple(found["seconds"]), found["rough"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
