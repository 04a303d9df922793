"""Drafts with adapters: the text is unchanged, and guesses are those of the merged model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from specinfer import LLM, LoRARequest, SamplingParams
from specinfer.errors import ConfigError
from specinfer.models.adapters.peft_folder import PeftFolder
from specinfer.models.open_model import open_model
from specinfer.request import RequestOutput
from tests.adapters import merge, write_adapter
from tests.engines import ENGINE
from tests.kernels import NAMES, kernels
from tests.tiny_models import write_tiny_llama
from tests.unit.engine.offloading import noted_needs

pytestmark = pytest.mark.usefixtures("own_cache")  # of quantized weights

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [9], [*range(5, 25)]]
GREEDY = SamplingParams(temperature=0, max_tokens=17, ignore_eos=True)
RANDOM = SamplingParams(temperature=1, seed=5, max_tokens=17, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model "base", an adapter "one" of it, and "merged", which is both."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny_llama(folder / "base", tokenizer=True)
    write_adapter(folder / "one", folder / "base", rank=4, alpha=8, seed=1)
    merge(folder / "base", folder / "one", folder / "merged", scale=2)
    return folder


def open_llm(folder: Path, model: str = "merged", **options: Any) -> LLM:
    shape = {"expansion": (1, 1, 1)} if options.get("drafts") else {}
    return LLM(folder / model, **{**ENGINE, **shape, **options})


def accepted(outputs: list[RequestOutput]) -> int:
    return sum(output.figures.accepted_by.get("draft", 0) for output in outputs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_a_draft_with_its_adapter_is_the_merged_model(
    folder: Path, name: Literal["torch", "native"], params: SamplingParams
) -> None:
    kernels(name)
    drafts = {"drafts": (str(folder / "base"),), "kernels": name}
    with open_llm(folder, kernels=name) as llm:
        want = [one.token_ids for one in llm.generate(PROMPTS, params)]
    counts = []
    for lora in ((), (str(folder / "one"),)):
        with open_llm(folder, **drafts, draft_lora=lora) as llm:
            outputs = llm.generate(PROMPTS, params)
            assert [one.token_ids for one in outputs] == want
            counts.append(accepted(outputs))
    most = len(PROMPTS) * 12  # a prompt's pass gives 1 token, and each of 4 trees 3 nodes and 1
    assert counts[0] < most // 2
    assert counts[1] == most


def test_a_self_draft_guesses_for_requests_with_an_adapter(folder: Path) -> None:
    asked = LoRARequest("one", 1, folder / "one")
    counts = []
    for lora in ((), folder / "one"):
        with open_llm(folder, "base", drafts="self", draft_quantization="int8", draft_lora=lora) as llm:
            outputs = llm.generate(PROMPTS, GREEDY, lora_request=asked)
            counts.append(accepted(outputs))
    with open_llm(folder, "base") as llm:
        want = llm.generate(PROMPTS, GREEDY, lora_request=asked)
    assert [one.token_ids for one in outputs] == [one.token_ids for one in want]
    assert counts[1] > 2 * counts[0]


@pytest.mark.parametrize("draft", ["self", "base"])
def test_the_drafts_of_a_streamed_target_have_its_bytes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, draft: str
) -> None:
    seen = noted_needs(monkeypatch)
    drafts = {"drafts": draft if draft == "self" else folder / draft, "draft_quantization": "int4"}
    for lora in ((), folder / "one"):
        open_llm(folder, "base", **drafts, draft_lora=lora).close()
    adapter = PeftFolder("one", folder / "one", open_model(folder / "base").config).bytes(torch.int8)

    without, beside = seen
    assert adapter > 0
    assert len(beside.draft_sets) == (2 if draft == "self" else 1)
    for one, two in zip(without.draft_sets, beside.draft_sets, strict=True):
        assert (two.weights - one.weights, two.reads - one.reads) == (adapter, adapter)
    assert sum(beside.draft_weights.values()) - sum(without.draft_weights.values()) == adapter


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafts": (), "draft_lora": "one"}, "draft_lora is .*, and no draft model is named"),
        ({"draft_lora": ""}, r"draft_lora is .*''.*; allowed: folders, each a non-empty string"),
        ({"draft_lora": ("one", "draft=one")}, "draft_lora names two adapters of draft"),
        (
            {"drafts": ("base", "base"), "draft_lora": "one"},
            "draft_lora is 'one', and the drafts are draft1, draft2; allowed: NAME=FOLDER",
        ),
        (
            {"drafts": ("base", "base"), "draft_lora": {"draft3": "one"}},
            "draft_lora is 'draft3=one', and the drafts are draft1, draft2",
        ),
    ],
)
def test_what_names_no_draft_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=message):
        open_llm(folder, **{"drafts": ("base",), **options})


def test_beside_ranks_the_first_process_has_the_draft(folder: Path) -> None:
    with open_llm(folder) as llm:
        want = [one.token_ids for one in llm.generate(PROMPTS, GREEDY)]
    drafts = {"drafts": folder / "base", "draft_lora": folder / "one"}
    with open_llm(folder, **drafts, pipeline_parallel=2) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    assert [one.token_ids for one in outputs] == want
    assert accepted(outputs) == len(PROMPTS) * 12
