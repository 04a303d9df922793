"""Which layers stay and which stream: the sum, how they are spread, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.errors import CapacityError
from specinfer.kernels.disk import DiskRate
from specinfer.models.config import Experts
from specinfer.models.placement import ExpertMemory, Placement

GIB = 1 << 30
DISK = DiskRate(1, 1 << 24, 1.4e9, direct=True)

sizes = st.lists(st.integers(1, 20), min_size=1, max_size=16)
parts = st.dictionaries(st.sampled_from(["process", "drafts", "KV cache"]), st.integers(0, 30))
buffer_counts = st.sampled_from([1, 2, 3])


def least(fixed: dict[str, int], layers: list[int], buffers: int) -> int:
    """The smallest memory that is not refused, by trying."""
    memory = 0
    while True:
        try:
            Placement.within(memory, fixed, layers, buffers=buffers)
        except CapacityError:
            memory += 1
        else:
            return memory


def test_a_buffer_has_room_for_the_longest_layer_that_streams() -> None:
    # Buffers for the long one would take more than it does itself.
    placement = Placement.within(79, {}, [40, 10, 10, 10, 10])
    assert placement.pinned == (0, 2)
    assert placement.buffer_bytes == 20


def test_the_refusal_shows_the_sum() -> None:
    fixed = {"process": GIB // 2, "draft": GIB, "KV cache": 0, "output layer": GIB // 4}
    with pytest.raises(CapacityError) as caught:
        Placement.within(GIB * 7 // 4, fixed, [GIB // 8] * 28)
    assert str(caught.value) == (
        "the model needs at least process 0.50 GiB + draft 1.00 GiB + output layer 0.25 GiB + "
        "2 layer buffers 0.25 GiB = 2.00 GiB, but may take 1.75 GiB; raise --memory, or choose a "
        "smaller draft, kv_cache_memory or quantization"
    )


@given(sizes, parts, buffer_counts, st.integers(0, 2000))
def test_parts_are_the_whole(layers: list[int], fixed: dict[str, int], buffers: int, more: int) -> None:
    memory = least(fixed, layers, buffers) + more
    placement = Placement.within(memory, fixed, layers, buffers=buffers)
    assert sorted((*placement.pinned, *placement.streamed)) == list(range(len(layers)))
    pinned = placement.resident_bytes - sum(fixed.values()) - placement.buffer_bytes
    assert pinned + placement.streamed_bytes == sum(layers)
    assert placement.resident_bytes <= memory
    assert (placement.buffers == 0) == (not placement.streamed)
    assert placement.buffer_bytes >= placement.buffers * max(
        (layers[number] for number in placement.streamed), default=0
    )


@given(sizes, buffer_counts)
def test_more_memory_never_streams_more(layers: list[int], buffers: int) -> None:
    begin = least({}, layers, buffers)
    streamed = [
        Placement.within(memory, {}, layers, buffers=buffers).streamed_bytes
        for memory in range(begin, sum(layers) + 1)
    ]
    assert streamed == sorted(streamed, reverse=True)
    whole = Placement.within(sum(layers), {}, layers, buffers=buffers)
    assert (whole.streamed, whole.seconds(10)) == ((), 0)


@given(st.integers(4, 60), st.integers(0, 60))
def test_distances_between_layers_that_stream_differ_by_one_at_most(count: int, spare: int) -> None:
    streamed = Placement.within(2 + min(spare, count - 3), {}, [1] * count).streamed
    around = [*streamed, streamed[0] + count]
    gaps = {after - before for before, after in pairwise(around)}
    assert max(gaps) - min(gaps) <= 1


def test_the_line_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    placement = Placement.within(11 * 94_000_000, {}, [94_000_000] * 28)
    assert placement.summary(DISK, Path("/home/me/.cache")) == (
        "19 of 28 layers streamed, 1.8 GB a pass at 1.4 GB/s from ~/.cache, about 1.3 s a pass"
    )
    assert " from /scratch, " in placement.summary(DISK, Path("/scratch"))
    assert Placement.within(4, {}, [1] * 4).summary(DISK, Path("/scratch")) == "all 4 layers kept in memory"


def test_experts_have_what_layers_leave() -> None:
    sizes = ExpertMemory(Experts(8, 2, 64, normalized=True), layers=3, record=100)
    fixed, layers = {"this process": 50}, [10, 20, 30]
    with pytest.raises(CapacityError, match=r"experts of a layer"):
        Placement.with_experts(909, fixed, layers, sizes)
    for memory, slots in ((910, 8), (1009, 8), (1010, 9), (2509, 23), (2510, 24), (9999, 24)):
        found = Placement.with_experts(memory, fixed, layers, sizes)
        assert (found.experts.slots, found.resident_bytes) == (slots, 110 + 100 * slots)
    half = replace(sizes, slots=12)
    assert half.active_bytes(1) == 600  # two experts of each layer
    assert half.read_bytes(1) == 300
    assert half.active_bytes(2) == pytest.approx(300 * (8 - 8 * 0.75**2))
    assert replace(sizes, slots=24).read_bytes(5) == 0
