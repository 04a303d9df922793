"""Tiny models whose layers are streamed from the disk, however much memory there is."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM, SamplingParams
from specinfer.config import EngineConfig
from specinfer.engine import models as loading
from specinfer.engine.memory import STREAM_LIMITS, MemoryNeeds, MemoryPlan, offload_folder
from specinfer.kernels.disk import DiskRate
from specinfer.models.placement import Placement
from specinfer.models.streamed import layer_records
from specinfer.progress import NoProgress, Progress
from tests.engines import ENGINE, assert_idle

PROMPTS = [[9, 8, 7, 6], [3] * 20, [50, 2]]
PARAMS = SamplingParams(max_tokens=24, temperature=0.8, seed=4)
DISK = DiskRate(readers=2, piece=4096, bytes_per_second=1e9, direct=True)


@dataclass(frozen=True)
class Planned:
    """Stands for `plan_memory`: these layers are streamed, with the named drafts or a self_draft."""

    layers: tuple[int, ...] | None = None  # None: all
    buffers: int = 2
    self_draft: bool = False
    slots: int = 0  # for experts of a mixture, all of whose layers stay

    def __call__(self, needs: MemoryNeeds, config: EngineConfig, progress: Progress) -> MemoryPlan:
        prepared = needs.target.prepare(needs.hardware, needs.quantization, offload_folder(config), progress)
        sizes = [prepared.records[name].length for name in layer_records(prepared)]
        layers = self.layers if self.layers is not None else tuple(range(len(sizes)))
        placement = Placement(1 << 40, {}, sizes, self.buffers, layers)
        if (experts := needs.sizes(prepared).experts) is not None:
            placement = Placement(1 << 40, {}, sizes, 0, (), replace(experts, slots=self.slots))
        drafts = needs.draft_sets[-1 if self.self_draft else 0]
        return MemoryPlan(placement, drafts, STREAM_LIMITS[-1], 1 << 22, DISK, 1e10, prepared)


def streamed(
    model: Path, monkeypatch: pytest.MonkeyPatch, plan: Planned | None = None, **options: Any
) -> LLM:
    """An LLM over a folder, whose layers are streamed as `plan` says."""
    with monkeypatch.context() as patch:
        patch.setattr(loading, "plan_memory", plan or Planned())
        config = {**ENGINE, "kernels": "native", "offload": "auto", "max_nodes": 16, "max_step_tokens": 64}
        llm = LLM(model, progress=NoProgress(), **{**config, **options})
    assert llm.models.target.stream is not None
    return llm


def resident(model: Path, **options: Any) -> LLM:
    """The same with all layers in memory."""
    return LLM(model, progress=NoProgress(), **{**ENGINE, "kernels": "native", **options})


def threads(but: Collection[threading.Thread] = ()) -> list[str]:
    """Names of the threads that read weights or run passes, but for some."""
    names = [thread.name for thread in threading.enumerate() if thread not in but]
    return [name for name in names if name.startswith(("specinfer-reader", "pass"))]


def until(holds: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


def texts(llm: LLM) -> list[tuple[int, ...]]:
    outputs = llm.generate(PROMPTS, PARAMS)
    assert [output.error for output in outputs if output.error] == []
    assert_idle(llm)
    return [output.token_ids for output in outputs]


def wanted(model: Path) -> list[tuple[int, ...]]:
    with resident(model) as llm:
        return texts(llm)


def prepared_file(llm: LLM) -> Path:
    plan = llm.models.plan
    return plan.prepared.path


def fails(number: int) -> Callable[..., Any]:
    def fail(*args: object, **more: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def noted_needs(monkeypatch: pytest.MonkeyPatch) -> list[MemoryNeeds]:
    """Note what memory is planned for, and plan nothing: all weights stay in memory."""
    noted: list[MemoryNeeds] = []
    monkeypatch.setattr(loading, "plan_memory", lambda needs, *_: noted.append(needs))
    return noted
