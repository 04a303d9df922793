"""Ranks of one model as threads of one process, which connect and exchange like processes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from specinfer import SamplingParams
from specinfer.config import EngineConfig
from specinfer.engine.models import Models
from specinfer.errors import PeerLostError
from specinfer.kernels.choice import Kernels
from specinfer.llm import LLM
from specinfer.models.language_model import LanguageModel
from specinfer.models.open_model import open_model
from specinfer.models.shard import Layout, Shard
from specinfer.models.weights import load_model
from specinfer.parallel.follower import follow
from specinfer.speculation_config import Quantization
from specinfer.tokenizer import Tokenizer
from specinfer.transport.group import Group
from specinfer.transport.link import Link
from tests.engines import ENGINE

CPU = torch.device("cpu")
PARTS = 8  # of sums of floats
PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [9], [40, 41, 42, 40, 41, 42, 40, 41]]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=12)
INT8 = {**ENGINE, "quantization": "int8"}


def token_ids_of(llm: LLM) -> list[list[int]]:
    return [list(out.token_ids) for params in (GREEDY, SAMPLED) for out in llm.generate(PROMPTS, params)]


def followers(engine: int | None = None, module: str = "specinfer.parallel.follower") -> list[psutil.Process]:
    """Return the running ranks that a process started, by default this one; `module` is the one they run.

    A zombie, maybe another test's engine, has no command line.
    """

    def follows(one: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):
            return module in one.cmdline()
        return False

    return [one for one in psutil.Process(engine).children() if follows(one)]


def soon(holds: Callable[[], object], seconds: float = 30.0) -> bool:
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    return bool(holds())


def await_no_followers() -> None:
    """Wait for the ends of this process's ranks; a failure shows those that are left."""
    soon(lambda: not followers())
    assert [one.as_dict(["pid", "status", "cmdline", "create_time"]) for one in followers()] == []


def parts_of(quantization: Quantization, width: int) -> int:
    """Return the number of parts that sums have with `width` ranks."""
    return 1 if quantization == "int8" or width == 1 else PARTS


def whole_model(
    path: Path,
    kernels: Kernels,
    cache: Path,
    dtype: torch.dtype = torch.float32,
    quantization: Quantization = "int8",
    width: int = 2,
) -> LanguageModel:
    """Load the model in one process, with sums in as many parts as `width` ranks use."""
    opened = open_model(path)
    return load_model(
        opened,
        dtype=dtype,
        device=CPU,
        kernels=kernels,
        quantization=quantization,
        cache=cache,
        part=Shard(0, 1, parts_of(quantization, width)).of(opened.config),
    )


@contextmanager
def ranks_of(
    path: Path,
    size: int,
    kernels: Kernels,
    cache: Path,
    *,
    dtype: torch.dtype = torch.float32,
    quantization: Quantization = "int8",
    whole_table: bool = False,
    stages: int = 1,
) -> Iterator[LanguageModel]:
    """Yield rank 0's part of a model; the other ranks run in threads until the block ends."""
    opened, width = open_model(path), size // stages
    layout = Layout.of(width, stages, [1] * opened.config.num_layers, 0, parts_of(quantization, width))
    pairs = [socket.socketpair() for _ in range(1, size)]
    links = [[Link(ours) for ours, _ in pairs], *([Link(its)] for _, its in pairs)]
    groups = [Group(rank, size, links[rank], bounds=layout.bounds) for rank in range(size)]
    models = [
        load_model(
            opened,
            dtype=dtype,
            device=CPU,
            kernels=kernels,
            quantization=quantization,
            cache=cache,
            part=layout.part(rank, opened.config, whole_table=whole_table),
            group=group,
        )
        for rank, group in enumerate(groups)
    ]
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(Group.connect, groups))
        following = [
            pool.submit(follow, group, [model]) for group, model in zip(groups[1:], models[1:], strict=True)
        ]
        try:
            yield models[0]
        finally:
            groups[0].close()
            for one in following:
                with suppress(PeerLostError):  # a test may end a rank
                    one.result(30)


def llm_of(target: LanguageModel, path: Path, drafts: dict[str, Any] | None = None, **options: Any) -> LLM:
    """Return an engine over this target and these drafts."""
    named = drafts or {}
    config = EngineConfig.from_options(str(path), {**ENGINE, "drafts": tuple(named), **options})
    return LLM.from_models(config, Models(target, Tokenizer.load(path), dict(named)))
