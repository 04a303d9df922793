"""What a forward pass costs against the number of its rows: measured once, kept on disk.

On a machine bound by memory 16 rows cost what one costs, on one bound by arithmetic they cost several times
as much; most are bound by the one for few rows and by the other for many. So it is measured, at a few sizes,
and read off between them. Beyond the largest size it goes on as it ended, so sizes are added until it rises.

Whatever else runs on the machine only adds time. So the quickest of some passes counts, and a size that
lies above the line between its neighbours was disturbed: the curve is the lower hull of what was measured.

Of a mixture of experts 16 rows read the weights of several times as many experts as one row, and the 16 next
ones add few: seconds rise steeply first. There lines are drawn over the experts that rows touch, as expected.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
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

_SIZES: Final = (1, 16, 4, 64, 2, 8, 32, 128)  # rows; a slow model is measured at the first few
_FEWEST: Final = 2  # sizes that are measured however long they take
_SECONDS: Final = 2.0  # for all these together, about
_LARGER: Final = (32, 64, 128, 256, 512, 1024, 2048)  # rows; measured behind them, in this order
_LARGER_SECONDS: Final = 0.25  # for these together, for each 512 rows that a pass may have
_FLAT: Final = 1.5  # times a pass of one row; a curve that ends below does not show yet what rows cost
_ROUNDS: Final = 5
_WORTH_KEEPING: Final = 0.2  # seconds; what is measured quicker is measured at every start
_FAR: Final = 1 << 20  # rows; beyond the last size the curve goes on as it ended
_OF_A_ROW: Final = 0.01  # seconds of a row's arithmetic, over those of reading its experts, at the least
_CODE: Final = (
    "attention",
    "heads",
    "kernels",
    "models",
    "parallel",
    "runtime",
)  # the packages a pass runs through

Key = Mapping[str, str]


class TimedModel(Protocol):
    """A model whose passes are timed."""

    @property
    def config(self) -> ModelConfig:
        """What the model is."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights, activations and logits."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        ...

    @property
    def kernels(self) -> Kernels:
        """What computes between the products; whoever runs a model brings attention from here."""
        ...


class Timed(Protocol):
    """A model with its cache, as far as a pass's seconds are concerned."""

    @property
    def model(self) -> TimedModel:
        """What runs."""
        ...

    def probe(self, rows: int, *, every_row: bool) -> None:
        """One pass of so many rows as a step makes it, in the cache's first slots."""
        ...


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds of one pass by its rows: straight from size to size, never falling; no rows cost nothing."""

    rows: tuple[int, ...]  # ascending, at least two
    at_rows: tuple[float, ...]  # seconds of a pass of that size, rising ever faster unless there are experts

    @classmethod
    def through(cls, measured: Mapping[int, float], experts: Experts | None = None) -> CostCurve:
        """The lower hull of what passes took, seconds by rows, of at least two sizes.

        That of a mixture is one over `experts` touched, and bends at powers of two between the sizes as well.
        """
        if experts is not None:
            powers = (1 << n for n in range(max(measured).bit_length()))
            sizes = sorted({*measured, *(rows for rows in powers if rows > min(measured))})
            weights = dict(zip(sizes, _weighed(experts, sizes), strict=True))
            hull = _lower_hull({weights[rows]: taken for rows, taken in measured.items()})
            places, taken = [place for place, _ in hull], [seconds for _, seconds in hull]
            return cls(tuple(sizes), tuple(np.interp([*weights.values()], places, taken).tolist()))
        return cls(*map(tuple, zip(*_lower_hull(measured), strict=True)))

    def at_least(self, least: float) -> CostCurve:
        """The curve of passes that take `least` seconds or more each, as those that wait for their weights.

        It bends where this one crosses them.
        """
        if least <= self.at_rows[0]:
            return self
        rows, seconds = self.corners()
        behind = next((n for n, taken in enumerate(seconds) if taken > least), None)
        if behind is None:
            return CostCurve(self.rows, (least,) * len(self.rows))
        before = rows[behind - 1], seconds[behind - 1]
        crossing = before[0] + math.ceil(
            (least - before[1]) / _slope(before, (rows[behind], seconds[behind]))
        )
        sizes = sorted({1, max(1, crossing - 1), crossing, crossing + 64, *self.rows})
        return CostCurve(tuple(sizes), tuple(max(least, taken) for taken in self.seconds(sizes).tolist()))

    def __add__(self, other: CostCurve) -> CostCurve:
        """The curve of a pass of each, one behind the other."""
        sizes = sorted({*self.rows, *other.rows})
        return CostCurve(tuple(sizes), tuple((self.seconds(sizes) + other.seconds(sizes)).tolist()))

    def seconds(self, rows: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds of passes of so many rows, in the shape of `rows`."""
        return np.asarray(np.interp(rows, *self.corners()))

    def table(self, most: int) -> list[float]:
        """Seconds of passes of 0, 1, ... `most` rows."""
        seconds: list[float] = self.seconds(np.arange(most + 1)).tolist()
        return seconds

    def expected(self, rows: int) -> float:
        """Seconds of one pass of so many rows."""
        return float(self.seconds([rows])[0])

    def corners(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Rows and seconds where the curve bends: from no rows on, and as far as it is ever asked."""
        last, before = (self.rows[-1], self.at_rows[-1]), (self.rows[-2], self.at_rows[-2])
        far = last[1] + _slope(before, last) * (_FAR - last[0])
        return (0, *self.rows, _FAR), (0.0, *self.at_rows, far)


_Place = TypeVar("_Place", int, float)


def _lower_hull(measured: Mapping[_Place, float]) -> list[tuple[_Place, float]]:
    """Points of the lower hull, ascending; one that is lower shows that those before it were disturbed."""
    hull: list[tuple[_Place, float]] = []
    quickest = math.inf
    for place in sorted(measured, reverse=True):
        quickest = min(quickest, measured[place])
        point = (place, quickest)
        while len(hull) >= 2 and _slope(point, hull[-1]) > _slope(hull[-1], hull[-2]):
            hull.pop()
        hull.append(point)
    return hull[::-1]


def _weighed(experts: Experts, sizes: Sequence[int]) -> list[float]:
    """What passes of so many rows read, in units of one row's experts, and a little for their arithmetic."""
    return [experts.touched(rows) / experts.per_token + _OF_A_ROW * rows for rows in sizes]


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
    folder: Path | None = None,
    progress: Progress | None = None,
) -> CostCurve:
    """The curve of this model on this machine, measured now or before.

    Curves are kept in `folder`, by default in the user's cache. `max_rows` is the most rows a pass will have
    and the cache has room for, `variant` is part of the key: quantization and head size. `every_row` says
    that the logits of all rows are asked for, as a draft does, and not the likeliest first (flight.py).
    `behind` is a model that has a pass before each: a small one's weights stay in the machine's caches while
    it is measured, and in a step they are swept out. A curve that is measured in no time is kept only if
    `keep` says so.
    Writes into the cache's first slots, which nobody may use yet. A folder that cannot be written costs the
    next start its time, no more.
    """
    if behind is not None:
        variant += ", behind a pass of its target"
    key = _key(runner.model, max_rows, variant, every_row)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    file = (folder or cache_dir() / "curves") / f"{digest}.json"
    curve = _read(file, key)
    if curve is None:
        began = time.perf_counter()
        curve = measure(runner, max_rows=max_rows, every_row=every_row, behind=behind, progress=progress)
        if keep or time.perf_counter() - began > _WORTH_KEEPING:
            kept_curve = {"key": key, "rows": curve.rows, "seconds": curve.at_rows}
            write_whole(file, json.dumps(kept_curve, indent=1))
    return curve


def measure(
    runner: Timed,
    *,
    max_rows: int,
    every_row: bool = False,
    behind: Timed | None = None,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> CostCurve:
    """Time passes of a few sizes up to `max_rows` rows, round after round.

    Writes into the first slots of the cache. Takes two seconds or three, a small model's milliseconds: a size
    is measured again until it has had its share of the time. Sizes beyond these are measured once, while
    there is time for them; and as long as the curve is flat in any case, each in about twice the last one's
    time at most: rows would seem to be free for ever.
    """
    show = progress or NoProgress()
    sizes = [size for size in _SIZES if size <= max(_FEWEST, max_rows)]
    larger = [size for size in _LARGER if size <= max_rows]
    share, experts = _SECONDS / len(sizes), runner.model.config.experts
    spent = dict.fromkeys(sizes, 0.0)
    quickest: dict[int, float] = {}
    passes = _ROUNDS * len(sizes) + len(larger)
    show.start(passes, "measuring what a pass costs (once per model and machine)", "passes")

    def measured(size: int) -> float:
        began = clock()
        if behind is not None:
            behind.probe(1, every_row=False)
        seconds = _pass_seconds(runner, size, every_row, clock)
        quickest[size] = min(seconds, quickest.get(size, math.inf))
        return clock() - began

    try:
        _pass_seconds(runner, _FEWEST, every_row, clock)  # the first pass of all is slow
        for size in _ROUNDS * sizes:
            late = sum(spent.values()) > _SECONDS and len(quickest) >= _FEWEST
            if not late and spent[size] < share:
                spent[size] += measured(size)
            show.advance(1)
        left = _LARGER_SECONDS * max_rows / 512
        for size in larger:
            if size > (last := max(quickest)):
                flat = quickest[last] < _FLAT * quickest[1]
                if flat or CostCurve.through(quickest, experts).expected(size) <= left:
                    left -= measured(size)
            show.advance(1)
    finally:
        show.finish()
    return CostCurve.through(quickest, experts)


def _pass_seconds(runner: Timed, rows: int, every_row: bool, clock: Callable[[], float]) -> float:
    """One pass as a step makes it: from lists to logits in host memory, which waits for a GPU."""
    began = clock()
    runner.probe(rows, every_row=every_row)
    return clock() - began


def _key(model: TimedModel, max_rows: int, variant: str, every_row: bool) -> dict[str, str]:
    """Everything a pass's time depends on. The values of the weights are not among it."""
    kernels = model.kernels
    return {
        "model": hashlib.sha256(repr(model.config).encode()).hexdigest(),
        "dtype": str(model.dtype),
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
    """What computes there: a GPU's name, or how many CPUs of which kind."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{len(allowed_cpus())} x {cpu_name()}"


@cache
def code_hash() -> str:
    """A hash of the code a pass runs through: a faster kernel has another curve."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for package in _CODE:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h"):
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _read(file: Path, key: Key) -> CostCurve | None:
    """The curve of a file, if it is whole and of that key."""
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
        rows, seconds = tuple(found["rows"]), tuple(found["seconds"])
        if found["key"] != key or len(rows) != len(seconds) or not _plausible(rows, seconds):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return CostCurve(rows, seconds)


def _plausible(rows: Sequence[object], seconds: Sequence[object]) -> bool:
    counts = [r for r in rows if type(r) is int and r >= 1]
    times = [s for s in seconds if type(s) is float and 0 < s < math.inf]
    whole = len(counts) == len(rows) >= _FEWEST and len(times) == len(seconds)
    return whole and all(a < b for a, b in pairwise(counts)) and all(a <= b for a, b in pairwise(times))
