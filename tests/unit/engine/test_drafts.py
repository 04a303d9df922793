"""Drafts by name: the automatic one, the starts without it, and a pool that stands for its members."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import pytest
import torch

from specinfer.config import EngineConfig
from specinfer.engine import models as loading
from specinfer.engine.automatic_draft import automatic_drafts
from specinfer.engine.drafts import with_pool_members
from specinfer.engine.loader import Loader
from specinfer.errors import ConfigError, ModelError
from specinfer.hub import resolve
from specinfer.hub.known_drafts import local_drafts
from specinfer.hub.model_files import write_pool
from specinfer.llm import LLM
from specinfer.models.adapters.peft_folder import PeftFolder
from specinfer.models.open_model import open_model
from specinfer.request import LoRARequest, RequestOutput
from specinfer.sampling_params import SamplingParams
from specinfer.speculation_config import SpeculationConfig
from tests.adapters import merge, write_adapter
from tests.drafts_table import write_known_pair
from tests.engines import ENGINE
from tests.kernels import NAMES, kernels
from tests.shown import Lines
from tests.spies import spied
from tests.tiny_models import write_byte_tokenizer, write_similar_llama, write_tiny_llama
from tests.unit.engine.offloading import Planned, noted_needs

pytestmark = pytest.mark.usefixtures("own_cache")  # of quantized weights
PROMPT = list(range(3, 30))


def started(target: Path, **options: object) -> tuple[LLM, str]:
    """An LLM with an automatic draft, and the lines of its start."""
    show = Lines()
    given = {**ENGINE, "kernels": "torch", "drafts": "auto", **options}
    return LLM(str(target), progress=show, **given), "\n".join(show.lines)  # type: ignore[arg-type]


def text(llm: LLM, **params: object) -> list[int]:
    [output] = llm.generate([PROMPT], SamplingParams(max_tokens=24, ignore_eos=True, **params))  # type: ignore[arg-type]
    return list(output.token_ids)


def reverse_tokens(folder: Path) -> None:
    """Give a model of 64 tokens a tokenizer that has them in another order."""
    write_byte_tokenizer(folder, 64)
    file = json.loads((folder / "tokenizer.json").read_text())
    vocab = file["model"]["vocab"]
    file["model"]["vocab"] = dict(zip(vocab, reversed(vocab.values()), strict=True))
    (folder / "tokenizer.json").write_text(json.dumps(file))


def test_a_draft_beside_the_model_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = write_known_pair(tmp_path, monkeypatch)
    llm, said = started(target)
    assert llm.config.speculation.drafts == (str(draft),)
    assert "Tiny-4L: its draft is Tiny-1L (" in said
    assert "beside the model); --no-draft leaves it out" in said
    assert [*llm.models.drafts] == ["draft"]
    plain, said = started(target, drafts=())
    assert (plain.config.speculation.drafts, said) == ((), "")
    for params in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 5}):
        assert text(llm, **params) == text(plain, **params), params
    assert llm.variant(drafts=()).models.drafts == {}


def test_a_draft_of_no_use_is_left_out_with_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = write_known_pair(tmp_path, monkeypatch)
    whole = (draft / "model.safetensors").read_bytes()

    def cut() -> None:
        (draft / "model.safetensors").write_bytes(whole[:-100])

    def other_tokens() -> None:
        (draft / "model.safetensors").write_bytes(whole)
        reverse_tokens(draft)

    for damage, word in ((cut, "model.safetensors is truncated"), (other_tokens, "another vocabulary")):
        damage()
        llm, said = started(target)
        assert (llm.config.speculation.drafts, llm.models.drafts) == ((), {}), word
        assert "the automatic draft is left out: " in said, said
        assert word in said, said
        text(llm)
    cut()
    with pytest.raises(ModelError, match="is truncated"):
        LLM(str(target), drafts=(str(draft),), kernels="torch", **ENGINE)  # type: ignore[arg-type]


def test_a_draft_with_a_fault_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = write_known_pair(tmp_path, monkeypatch)
    reads = spied(monkeypatch, Loader, "target", lambda loader, found, *_, **__: found.files.name)
    monkeypatch.setattr(Loader, "draft", Mock(side_effect=ModelError("torn weights")))
    llm, said = started(target)
    assert (llm.config.speculation.drafts, llm.models.drafts, reads) == ((), {}, [str(target)])
    assert "the automatic draft is left out: torn weights" in said
    text(llm)
    with pytest.raises(ModelError, match="torn weights"):
        started(target, drafts=(str(draft),))


def test_a_fault_beside_streamed_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels("native")
    target, draft = write_known_pair(tmp_path, monkeypatch)
    native = {"kernels": "native", "max_nodes": 16, "max_step_tokens": 64}
    llm, _ = started(target, **native, drafts=())
    with llm:
        expected = text(llm, temperature=0.0)
    # Only a head of the package is automatic there.
    monkeypatch.setattr("specinfer.engine.automatic_draft.heads_of", lambda _: (str(draft),))
    monkeypatch.setattr(loading, "plan_memory", Planned())
    plans = spied(monkeypatch, loading, "plan_memory", lambda needs, config, _: config.speculation.drafts)
    monkeypatch.setattr(Loader, "draft", Mock(side_effect=ModelError("torn weights")))
    options = {**native, "offload": "auto", "offload_folder": tmp_path / "disk"}
    llm, said = started(target, **options)
    with llm:
        assert (llm.config.speculation.drafts, llm.models.drafts) == ((), {})
        assert plans == [(str(draft),), ()]
        assert llm.models.target.stream is not None
        assert "the automatic draft is left out: torn weights" in said
        assert text(llm, temperature=0.0) == expected
    with pytest.raises(ModelError, match="torn weights"):
        started(target, **options, drafts=(str(draft),))


def test_memory_of_the_cache_is_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = write_known_pair(tmp_path, monkeypatch)
    monkeypatch.setattr("specinfer.engine.found_models.free_bytes", lambda *_: 10_000_000)
    for cache, drafts in ((1_000_000, (str(draft),)), (9_900_000, ())):
        llm, said = started(target, kv_cache_memory=cache)
        assert llm.config.speculation.drafts == drafts, (cache, said)


def test_lines_for_a_missing_or_a_large_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = write_known_pair(tmp_path, monkeypatch)
    config, files, lines = EngineConfig(model=str(target)), resolve(str(target)), list[str]()
    assert automatic_drafts(config, files, 1 << 30, lines.append) == (str(draft),)
    assert automatic_drafts(config, files, 50_000, lines.append) == ()
    assert "does not fit into half of the 50.0 kB that are free" in lines.pop()
    large = draft.parent / "Tiny-1L-large"
    large.mkdir()
    for file in draft.iterdir():
        (large / file.name).write_bytes(file.read_bytes() + b" " * 64)
    monkeypatch.setattr(
        "specinfer.engine.automatic_draft.local_drafts", lambda files: [*reversed(local_drafts(files))]
    )
    small, more = (one.bytes for one in local_drafts(files))
    assert automatic_drafts(config, files, 2 * more, lines.append) == (str(large),)
    assert automatic_drafts(config, files, 2 * small, lines.append) == (str(draft),), "the first that fits"
    assert automatic_drafts(config, files, 2 * small, lines.append, own_head=small) == ("mtp",)
    assert automatic_drafts(config, files, 2 * small - 2, lines.append, own_head=small) == ()
    assert "no draft; the MTP head in its own files does not fit into half of the" in lines.pop()
    ranks = config.with_options({"tensor_parallel": 2})
    assert automatic_drafts(ranks, files, 2 * small, lines.append, own_head=small) == (str(draft),)
    lines.clear()
    shutil.rmtree(large)
    for options in ({"max_nodes": 1}, {"offload": "auto"}):
        other = config.with_options(options)
        assert automatic_drafts(other, files, 1 << 30, pytest.fail, own_head=1) == (), options
    draft.rename(tmp_path.parent / f"{tmp_path.name}-away")
    assert automatic_drafts(config, files, 1 << 30, lines.append) == ()
    assert lines[-1] == (
        "Tiny-4L: nobody/Tiny-1L (70.0 kB) can be its draft; "
        f"`specinfer pull {target} --with-draft` fetches it"
    )
    head = EngineConfig(model="smollm2-135m")
    assert automatic_drafts(head, files, 0, pytest.fail) == ("smollm2-135m-head",)


def test_auto_is_the_only_name() -> None:
    assert SpeculationConfig(drafts="auto").drafts == ("auto",)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="drafts is auto, small; allowed with 'auto': no other name"):
        SpeculationConfig(drafts=("auto", "small"))


OPTIONS = {**ENGINE, "max_context": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a pool of two small models for it."""
    folder = tmp_path_factory.mktemp("pools")
    target = write_tiny_llama(folder / "target", tokenizer=True, eos_token_id=63)  # which grammars need
    for number in (1, 2):
        write_similar_llama(target, folder / "pool" / f"member{number}", noise=0.3, seed=number)
    write_pool(folder / "pool", ["member1", "member2"])
    return folder


def config(folder: Path, *drafts: str) -> EngineConfig:
    return EngineConfig.from_options(str(folder / "target"), {**OPTIONS, "drafts": drafts})


def test_members_stand_where_their_pool_stood(folder: Path) -> None:
    other = str(folder / "target")
    wanted = config(folder, other, str(folder / "pool"))
    members = [str(folder / "pool" / f"member{number}") for number in (1, 2)]
    assert with_pool_members(wanted).speculation.drafts == (other, *members)
    plain = config(folder, other)
    assert with_pool_members(plain) == plain


def test_the_text_is_the_same_with_a_pool(folder: Path) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=4, regex="[0-9*/ ]{24}")
    with LLM(config(folder)) as plain, LLM(config(folder, str(folder / "pool"))) as pooled:
        expected = [one.token_ids for one in plain.generate(["2 * 3", "10 / 5"], params)]
        outputs = pooled.generate(["2 * 3", "10 / 5"], params)
        figures = [one.figures for one in outputs]
        alone = pooled.variant(drafts=[str(folder / "pool" / "member2")])
        again = [one.token_ids for one in alone.generate(["2 * 3", "10 / 5"], params)]
        both = pooled.variant(drafts=[str(folder / "pool")])
        assert both.config.speculation.drafts == pooled.config.speculation.drafts
    assert [one.token_ids for one in outputs] == expected == again
    for name in ("draft1", "draft2"):
        assert sum(one.accepted_by.get(name, 0) for one in figures) > 0


# Drafts with adapters: the text is unchanged, and guesses are those of the merged model.


PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [9], [*range(5, 25)]]
GREEDY = SamplingParams(temperature=0, max_tokens=17, ignore_eos=True)
RANDOM = SamplingParams(temperature=1, seed=5, max_tokens=17, ignore_eos=True)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model "base", an adapter "one" of it, and "merged", which is both."""
    adapted = tmp_path_factory.mktemp("models")
    write_tiny_llama(adapted / "base", tokenizer=True)
    write_adapter(adapted / "one", adapted / "base", rank=4, alpha=8, seed=1)
    merge(adapted / "base", adapted / "one", adapted / "merged", scale=2)
    return adapted


def open_llm(adapted: Path, model: str = "merged", **options: Any) -> LLM:
    shape = {"expansion": (1, 1, 1)} if options.get("drafts") else {}
    return LLM(adapted / model, **{**ENGINE, **shape, **options})


def accepted(outputs: list[RequestOutput]) -> int:
    return sum(output.figures.accepted_by.get("draft", 0) for output in outputs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_an_adapted_draft(adapted: Path, name: Literal["torch", "native"], params: SamplingParams) -> None:
    kernels(name)
    drafts = {"drafts": (str(adapted / "base"),), "kernels": name}
    with open_llm(adapted, kernels=name) as llm:
        want = [one.token_ids for one in llm.generate(PROMPTS, params)]
    counts = []
    for lora in ((), (str(adapted / "one"),)):
        with open_llm(adapted, **drafts, draft_lora=lora) as llm:
            outputs = llm.generate(PROMPTS, params)
            assert [one.token_ids for one in outputs] == want
            counts.append(accepted(outputs))
    most = len(PROMPTS) * 12  # a prompt's pass gives 1 token, and each of 4 trees 3 nodes and 1
    assert counts[0] < most // 2
    assert counts[1] == most


def test_a_self_draft_guesses_for_requests_with_an_adapter(adapted: Path) -> None:
    asked = LoRARequest("one", 1, adapted / "one")
    counts = []
    for lora in ((), adapted / "one"):
        with open_llm(adapted, "base", drafts="self", draft_quantization="int8", draft_lora=lora) as llm:
            outputs = llm.generate(PROMPTS, GREEDY, lora_request=asked)
            counts.append(accepted(outputs))
    with open_llm(adapted, "base") as llm:
        want = llm.generate(PROMPTS, GREEDY, lora_request=asked)
    assert [one.token_ids for one in outputs] == [one.token_ids for one in want]
    assert counts[1] > 2 * counts[0]


@pytest.mark.parametrize("draft", ["self", "base"])
def test_a_plan_has_the_adapters_bytes(adapted: Path, monkeypatch: pytest.MonkeyPatch, draft: str) -> None:
    seen = noted_needs(monkeypatch)
    drafts = {"drafts": draft if draft == "self" else adapted / draft, "draft_quantization": "int4"}
    for lora in ((), adapted / "one"):
        open_llm(adapted, "base", **drafts, draft_lora=lora).close()
    adapter = PeftFolder("one", adapted / "one", open_model(adapted / "base").config).bytes(torch.int8)

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
    adapted: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(adapted)
    with pytest.raises(ConfigError, match=message):
        open_llm(adapted, **{"drafts": ("base",), **options})


def test_beside_ranks_the_first_process_has_the_draft(adapted: Path) -> None:
    with open_llm(adapted) as llm:
        want = [one.token_ids for one in llm.generate(PROMPTS, GREEDY)]
    drafts = {"drafts": adapted / "base", "draft_lora": adapted / "one"}
    with open_llm(adapted, **drafts, pipeline_parallel=2) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    assert [one.token_ids for one in outputs] == want
    assert accepted(outputs) == len(PROMPTS) * 12
