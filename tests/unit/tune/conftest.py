"""A tiny target, prompts for it, and tunings with fixed costs and a fixed clock."""

import json
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from specinfer.config import EngineConfig
from specinfer.engine.costs import Curves
from specinfer.engine.drafts import draft_names
from specinfer.llm import LLM
from specinfer.progress import Progress
from specinfer.request import RequestOutput
from specinfer.runtime.cost_curve import CostCurve
from specinfer.sampling_params import SamplingParams
from specinfer.tune.head_draft import BlockKind
from specinfer.tune.prompts import read_prompts
from specinfer.tune.selection import TuneResult
from specinfer.tune.small_model import SsmKind
from specinfer.tune.trainer import TrainConfig
from specinfer.tune.tuning import TuneConfig, Tuning
from tests.tiny_models import write_tiny_llama

Clock = Callable[[], float]
SSM = SsmKind(layers=1, depth=3)
BLOCK = BlockKind(depth=3, vocabulary=48, markov_rank=8)
SHAPE = BlockKind(depth=4, vocabulary=48, markov_rank=8)
TARGET = CostCurve((1, 16), (0.010, 0.012))


def ticking(seconds: float = 1.0) -> Clock:
    """Return a clock that advances by `seconds` at each reading."""
    ticks = count()
    return lambda: seconds * next(ticks)


def cheap(config: EngineConfig, drafts: Sequence[Path], progress: Progress) -> Curves:
    """Return costs with drafts that cost a tenth of their target."""
    names = draft_names(tuple(str(draft) for draft in drafts))
    return Curves(TARGET, dict.fromkeys(names, CostCurve((1, 16), (0.001, 0.0012))))


def tuning(config: TuneConfig, clock: Clock) -> tuple[Tuning, list[str]]:
    """Return a tuning with fixed costs, and its log lines."""
    lines: list[str] = []
    return Tuning(config, clock=clock, say=lines.append, costs=cheap), lines


def run(config: TuneConfig, prompts: Path, clock: Clock | None = None) -> tuple[TuneResult, list[str]]:
    """Run a tuning with fixed costs on a ticking clock; return its result and its log lines."""
    begun, lines = tuning(config, clock or ticking())
    return begun.run(read_prompts([prompts]), [prompts.name]), lines


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tune") / "target", num_layers=3, tokenizer=True)


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts"), [f"{n} * {n + 1}" for n in range(40)])


def write_prompts(folder: Path, texts: list[str]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def engine(target: Path, **options: Any) -> EngineConfig:
    small = {"dtype": "float32", "kv_cache_memory": 1 << 24, "max_context": 64, "lookup": False}
    return EngineConfig.from_options(str(target), {**small, **options})


def outputs_with(
    draft: Path, target: Path, prompts: Sequence[str] = ("2 * 3", "7 * 8")
) -> list[RequestOutput]:
    """Return the answers of a target with a draft; asserts that they are those without it."""
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=3)
    config = engine(target)
    with LLM(config) as plain, LLM(config, drafts=[str(draft)], tree_size="fixed") as drafted:
        assert drafted.models.foreign == {}
        expected = [output.token_ids for output in plain.generate(list(prompts), params)]
        outputs = drafted.generate(list(prompts), params)
    assert [output.token_ids for output in outputs] == expected
    return outputs


def tuning_of(target: Path, out: Path, **changes: Any) -> TuneConfig:
    """Return a config for one minute of the clock `ticking`; a third of it is for collecting."""
    options: dict[str, Any] = {"minutes": 1.0, "chat": False, "max_tokens": 20, "kind": SHAPE}
    options["training"] = TrainConfig(rate=5e-3, shortlist=32)
    return TuneConfig(target=engine(target), out=out, **(options | changes))


@pytest.fixture(scope="module")
def tuned(target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tuned head, which tests must not change."""
    out = tmp_path_factory.mktemp("tuned") / "head"
    run(tuning_of(target, out, minutes=4.0), prompts)
    return out


class KilledError(Exception):
    """The process was killed."""


def dies_at(steps: int) -> Clock:
    """Return a clock that raises KilledError after `steps` readings."""
    clock, left = ticking(), iter(range(steps))

    def tick() -> float:
        if next(left, None) is None:
            raise KilledError
        return clock()

    return tick
