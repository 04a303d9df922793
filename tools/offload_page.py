"""Write the computed table of docs/offloading.md from memory plans: python tools/offload_page.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from specinfer.engine.memory import _SELF_RATE, STREAM_LIMITS, DraftSet, MemoryPlan
from specinfer.errors import CapacityError
from specinfer.kernels.disk import DiskRate, about
from specinfer.kernels.layout import int4_bytes, int8_bytes
from specinfer.models.placement import Placement
from specinfer.speculation_config import SELF

PAGE = Path(__file__).resolve().parents[1] / "docs" / "offloading.md"
BANDWIDTH = 20e9  # bytes of memory that two cores of a desktop or a small server read in a second
DISKS = (0.2, 0.5, 1.5, 3.0, 7.0)  # GB/s
SHARES = (0.25, 0.5, 0.75)  # memory for drafts, buffers and layers, as a share of the layers' bytes


class Shape(NamedTuple):
    """Sizes of a model that determine its bytes."""

    layers: int
    hidden: int
    inner: int
    kv: int
    vocab: int

    def matrices(self) -> list[tuple[int, int]]:
        """Return the (outputs, inputs) of each matrix of a layer."""
        return [
            (self.hidden + 2 * self.kv, self.hidden),
            (self.hidden, self.hidden),
            (2 * self.inner, self.hidden),
            (self.hidden, self.inner),
        ]

    def in_int4(self) -> int:
        """Return the bytes of all layers in int4."""
        return self.layers * sum(int4_bytes(*matrix) for matrix in self.matrices())


TARGET = Shape(28, 3584, 18944, 512, 152064)  # Qwen2.5-7B
SMALL = Shape(24, 896, 4864, 128, 151936)  # Qwen2.5-0.5B


def draft_sets() -> dict[str, list[DraftSet]]:
    """Return the compared drafts by name; a draft with several forms is as fast as its fastest."""
    own = TARGET.in_int4()
    table = int8_bytes(TARGET.vocab, TARGET.hidden)
    shared = 2 * TARGET.vocab * TARGET.hidden
    small = SMALL.in_int4() + int8_bytes(SMALL.vocab, SMALL.hidden)
    copy = ((SELF,), own + table, own + table, (), _SELF_RATE)
    sharing = ((SELF,), own, own + shared, (), _SELF_RATE, True)
    return {
        "none": [DraftSet()],
        "0.5B": [DraftSet(("0.5B",), small, small)],
        "self": [DraftSet(*copy), DraftSet(*sharing)],
    }


def speed(share: float, rate: float, drafts: list[DraftSet]) -> float | None:
    """Return the plan's expected tokens per second, or None if the model does not fit."""
    layers = [2 * sum(channels * inner for channels, inner in TARGET.matrices())] * TARGET.layers
    found = []
    for one in drafts:
        try:
            placement = Placement.within(
                int(share * sum(layers)),
                {"drafts": one.weights},
                layers,
                buffers=STREAM_LIMITS[0].buffers if one.names else 2,
            )
        except CapacityError:
            continue
        disk = DiskRate(1, 1 << 24, rate * 1e9, True)
        plan = MemoryPlan(placement, one, STREAM_LIMITS[0], 0, disk, BANDWIDTH, cast("Any", None))
        found.append(plan.speed)
    return max(found, default=None)


def table() -> str:
    """Return the Markdown table."""
    names = draft_sets()
    head = [f"{share:.0%}, {name}" for share in SHARES for name in names]
    rows = [f"| disk | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    for rate in DISKS:
        cells = []
        for share in SHARES:
            speeds = [speed(share, rate, drafts) for drafts in names.values()]
            best = max(one for one in speeds if one is not None)
            for one in speeds:
                text = "-" if one is None else about(one)
                cells.append(f"**{text}**" if one == best else text)
        rows.append(f"| {rate:g} GB/s | {' | '.join(cells)} |")
    return "\n".join(rows)


def written(page: str) -> str:
    """Return the page with a new table; raises ValueError if the page has no place for it."""
    begin, end = "<!-- computed: tools/offload_page.py -->\n", "<!-- end -->"
    before, after = page.split(begin)
    return before + begin + table() + "\n" + after[after.index(end) :]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
