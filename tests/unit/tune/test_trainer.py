"""Steps of a training, by themselves."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specinfer.tune.dataset import TrainingSet
from specinfer.tune.draft import Kind
from specinfer.tune.head_draft import BlockKind, EagleKind, MtpKind
from specinfer.tune.prompts import read_prompts
from specinfer.tune.small_model import SsmKind
from specinfer.tune.trainer import Trainer
from specinfer.tune.tuning import Tuning
from tests.unit.tune.conftest import ticking, tuning_of

KINDS: dict[str, Kind] = {
    "block": BlockKind(depth=4, vocabulary=48, markov_rank=8),
    "eagle": EagleKind(depth=3, vocabulary=48),
    "mtp": MtpKind(depth=3),
    "ssm": SsmKind(layers=1),
}


@pytest.fixture
def threads() -> Iterator[None]:
    """Torch's own, set back behind the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_parts_learn_the_same(target: Path, prompts: Path, tmp_path: Path, threads: None, kind: Kind) -> None:
    tuning = Tuning(tuning_of(target, tmp_path / "draft", kind=kind), clock=ticking())
    tuning._collect(read_prompts([prompts]))
    dataset = TrainingSet(tuning._corpus)
    trainers: dict[int, Trainer] = {}
    gradients: dict[int, list[torch.Tensor]] = {}
    for cores in (1, 2, 3):
        torch.set_num_threads(cores)
        trainer = trainers[cores] = tuning._training(dataset, []).trainer
        assert trainer._workers.count == cores
        trainer.step(dataset, 1.0)
        gradients[cores] = [p.grad.clone() for p in trainer.draft.module.parameters() if p.grad is not None]
        assert torch.get_num_threads() == cores
    largest = max(float(one.abs().max()) for one in gradients[1])
    for cores in (2, 3):
        for whole, summed in zip(gradients[1], gradients[cores], strict=True):
            torch.testing.assert_close(summed, whole, atol=1e-2 * largest, rtol=0)
        assert trainers[cores].state.loss == pytest.approx(trainers[1].state.loss, rel=1e-3)
        assert trainers[cores].state.blocks == trainers[1].state.blocks
