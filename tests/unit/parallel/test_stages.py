"""Models of every family in pipeline stages, whose ranks are threads here: the bits of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from specinfer import SamplingParams
from specinfer.errors import PeerLostError
from specinfer.heads.checkpoint import load_head, open_head
from specinfer.kernels.choice import guessing
from specinfer.models.language_model import LanguageModel
from specinfer.models.weights import load_model, open_model
from specinfer.runtime.batch import Rows
from specinfer.runtime.executor import ModelRunner
from specinfer.speculation_config import Quantization
from tests.heads import eagle_config, write_any
from tests.kernels import NAMES, kernels
from tests.parity.families import save_random
from tests.ranks import CPU, llm_of, ranks_of, whole_model
from tests.tiny_models import write_similar_llama, write_tiny_llama
from tests.unit.parallel.test_texts import FAMILIES, SHAPE, said

pytestmark = pytest.mark.usefixtures("own_cache")
PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [9], [40, 41, 42, 40, 41, 42, 40, 41], [5, 6]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=10),
    SamplingParams(temperature=0.8, seed=5, max_tokens=10),
]
LAYOUTS = [(2, 2), (3, 3), (4, 2)]  # ranks, stages


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_taps_are_those_of_one_process(
    family: str, name: Literal["torch", "native"], tmp_path: Path
) -> None:
    path, chosen = tmp_path / "model", kernels(name)
    save_random(family, path, tied=family in ("gemma3", "opt"), **FAMILIES[family])
    dtype = torch.bfloat16 if name == "native" else torch.float32
    layers = open_model(path).config.num_layers
    taps = (layers, 0, layers - 1, 1)
    kinds: list[tuple[Quantization, int, int]] = [
        *((kind, stages, stages) for kind in ("none", "int4", "int8") for stages in (2, 3)),
        *((kind, 4, 2) for kind in ("none", "int4", "int8")),
    ]
    for kind, size, stages in kinds:
        want = said(whole_model(path, chosen, tmp_path, dtype, kind), taps)
        how: dict[str, Any] = {"dtype": dtype, "quantization": kind, "stages": stages}
        with ranks_of(path, size, chosen, tmp_path, **how) as model:
            found = said(model, taps)
            assert all(map(torch.equal, found, want)), (kind, size, stages)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "model", tokenizer=True, num_layers=4, **SHAPE)


@pytest.mark.parametrize(("size", "stages"), LAYOUTS)
def test_texts_are_those_of_one_process_whoever_guesses(
    llama: Path, size: int, stages: int, tmp_path: Path
) -> None:
    native = kernels("native")
    similar = write_similar_llama(llama, tmp_path / "similar", noise=0.1)
    draft = load_model(similar, dtype=torch.float32, device=CPU, kernels=guessing(native))
    opened = open_model(llama)
    head_folder = open_head(write_any(eagle_config(own_head=False), tmp_path / "head"), opened)

    def texts(target: LanguageModel, who: str, **options: Any) -> list[tuple[int, ...]]:
        head = None
        if who == "head":
            head = load_head(head_folder, opened, target, kernels=guessing(native))
        drafts = {"draft": {"draft": draft}, "head": {"head": head}}.get(who)
        llm = llm_of(target, llama, drafts, lookup=who == "lookups", tree_size="fixed", **options)
        found = [tuple(out.token_ids) for params in PARAMS for out in llm.generate(PROMPTS, params)]
        llm.close()
        return found

    want = texts(whole_model(llama, native, tmp_path), "nobody")
    with ranks_of(llama, size, native, tmp_path, whole_table=True, stages=stages) as target:
        for who in ("nobody", "lookups", "draft", "head"):
            assert texts(target, who) == want, who
        assert texts(target, "draft", max_batch_size=1, max_step_tokens=32) == want


@pytest.mark.parametrize(("size", "stages"), LAYOUTS)
def test_logits_that_are_asked_for_later_are_made_by_the_first_stage(
    llama: Path, size: int, stages: int, tmp_path: Path
) -> None:
    def rows_of(model: LanguageModel) -> list[Tensor]:
        runner = ModelRunner(model, num_blocks=3, block_size=32)
        silent = runner.launch([Rows([*range(20)], 0, [0], 20)])
        assert silent.at_once == 0
        flight = runner.launch(
            [Rows([*range(64)] + [7] * 9, 0, [0, 1, 2], 0)], likelihoods=lambda: [1.0] * 73
        )
        return [torch.from_numpy(flight.row(row)) for row in (72, 0, 40)]

    want = rows_of(whole_model(llama, kernels("native"), tmp_path))
    with ranks_of(llama, size, kernels("native"), tmp_path, stages=stages) as model:
        assert all(map(torch.equal, rows_of(model), want))


def test_a_layer_that_is_not_there_cannot_be_tapped(llama: Path, tmp_path: Path) -> None:
    with ranks_of(llama, 2, kernels("native"), tmp_path, stages=2) as model:
        runner = ModelRunner(model, num_blocks=1, block_size=8)
        with pytest.raises(ValueError, match=r"got taps \[5\]; allowed: 0 .. 4"):
            runner.launch([Rows((3, 1), 0, [0], 0)], taps=(5,))
        assert runner.forward([Rows((3,), 0, [0], 0)]).shape == (1, 64)


def test_a_stage_has_its_layers_alone(llama: Path, tmp_path: Path) -> None:
    with ranks_of(llama, 2, kernels("native"), tmp_path, stages=2) as model:
        assert model.config.num_layers == 2
        assert len(ModelRunner(model, num_blocks=1, block_size=8).cache.keys) == 2


@pytest.mark.parametrize("fault", ["embed", "later"])
def test_a_pass_that_fails_in_a_stage_ends_the_group(
    llama: Path, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Tensor:
        raise MemoryError("none is left")

    with ranks_of(llama, 3, kernels("native"), tmp_path, stages=3) as model:
        runner = ModelRunner(model, num_blocks=1, block_size=8)
        assert runner.forward([Rows((3,), 0, [0], 0)]).shape == (1, 64)
        group = model.group
        assert group is not None
        if fault == "embed":
            monkeypatch.setattr(model, "read", fail)
            with pytest.raises(MemoryError):
                runner.forward([Rows((3,), 0, [0], 0)])
        else:
            monkeypatch.setattr(group, "hand_on", lambda *_: group.lose("it is lost"))
            with pytest.raises(PeerLostError):
                runner.forward([Rows((3,), 0, [0], 0)])
        with pytest.raises(PeerLostError):
            runner.forward([Rows((3,), 0, [0], 0)])
