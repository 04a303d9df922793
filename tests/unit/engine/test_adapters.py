"""Requests with adapters and without in one engine: each says what it says alone, guesses or not."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from specinfer import LLM, LoRARequest, SamplingParams
from specinfer.engine import memory
from specinfer.engine import models as loading
from specinfer.engine.loader import Loader
from specinfer.errors import CapacityError, ConfigError, ModelError, RequestError
from specinfer.kernels.low_rank import Adapter
from specinfer.models.adapters.peft_folder import PeftFolder
from specinfer.request import FinishReason, RequestOutput
from specinfer.runtime import executor
from specinfer.runtime.kv_cache import gib
from tests.adapters import merge, write_adapter
from tests.engines import ENGINE, assert_idle, engine_of
from tests.kernels import NAMES, kernels
from tests.spies import spied
from tests.tiny_models import write_pair
from tests.unit.engine.offloading import noted_needs

pytestmark = pytest.mark.usefixtures("own_cache")  # of quantized weights

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]  # 18 tokens: 4 blocks of 4, and 2
PROMPTS = [PROMPT, [9], list(range(5, 25)), [7, 7, 7, 7], PROMPT, PROMPT[:9]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=0)
RANDOM = SamplingParams(temperature=1, seed=5, max_tokens=12, logprobs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a draft, and adapters "one", "other" and "third" of the target."""
    folder = write_pair(tmp_path_factory.mktemp("models"))
    write_adapter(folder / "one", folder / "target", rank=4, alpha=8, seed=1)
    write_adapter(
        folder / "other", folder / "target", rank=7, alpha=9, seed=2, targets=["q_proj", "down_proj"]
    )
    write_adapter(folder / "third", folder / "target", rank=1, alpha=2, seed=3, use_rslora=True)
    return folder


def lora(folder: Path, name: str | None) -> LoRARequest | None:
    return (
        None if name is None else LoRARequest(name, 1 + ("one", "other", "third").index(name), folder / name)
    )


def said(outputs: list[RequestOutput]) -> list[tuple[Any, ...]]:
    """Tokens and how likely each was, to the bit."""
    return [(out.token_ids, out.logprobs) for out in outputs]


def open_llm(folder: Path, **options: Any) -> LLM:
    return LLM(folder / "target", **{**ENGINE, **options})


@pytest.mark.parametrize("name", NAMES)
def test_a_text_is_the_merged_models(folder: Path, tmp_path: Path, name: Literal["torch", "native"]) -> None:
    kernels(name)
    merged = merge(folder / "target", folder / "one", tmp_path / "merged", scale=2)
    with open_llm(folder, kernels=name) as llm, LLM(merged, **ENGINE, kernels=name) as other:
        for params in (GREEDY, RANDOM):
            ours = llm.generate(PROMPTS, params, lora_request=lora(folder, "one"))
            theirs = other.generate(PROMPTS, params)
            assert [out.token_ids for out in ours] == [out.token_ids for out in theirs]
            for one, two in zip(ours, theirs, strict=True):
                found, want = (
                    torch.tensor([[logprob.logprob for logprob in at.values()] for at in out.logprobs or ()])
                    for out in (one, two)
                )
                torch.testing.assert_close(found, want, atol=1e-3, rtol=1e-3)
            assert [out.token_ids for out in ours] != [out.token_ids for out in llm.generate(PROMPTS, params)]


FORMATS = [
    ("native", "int8", "bfloat16"),
    pytest.param("native", "none", "float32", marks=pytest.mark.thorough),
    pytest.param("native", "int4", "bfloat16", marks=pytest.mark.thorough),
    pytest.param("torch", "int8", "float32", marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("name", "quantization", "dtype"), FORMATS)
def test_mixed_batches(folder: Path, name: Literal["torch", "native"], quantization: str, dtype: str) -> None:
    kernels(name)
    mixed = ["one", None, "other", "one", "third", None]
    options = {"kernels": name, "quantization": quantization, "dtype": dtype}
    adapters = [lora(folder, one) for one in mixed]
    alone, plain = [], []
    for params in (GREEDY, RANDOM):
        with open_llm(folder, **options, prefix_reuse=False) as llm:
            for prompt, adapter in zip(PROMPTS, adapters, strict=True):
                alone += said(llm.generate([prompt], params, lora_request=adapter))
        with open_llm(folder, **options) as llm:  # without adapters
            plain += said(llm.generate(PROMPTS, params))
    for more in (
        {},
        {"lookup": True, "max_nodes": 8},
        {"drafts": (str(folder / "draft"),), "expansion": (2, 2, 1)},
        {"max_step_tokens": 7, "max_batch_size": 4},
    ):
        with open_llm(folder, **options, **more) as llm:
            found = [said(llm.generate(PROMPTS, each, lora_request=adapters)) for each in (GREEDY, RANDOM)]
            assert [*found[0], *found[1]] == alone, more
            assert_idle(llm)
    without = [place for place, adapter in enumerate([*mixed, *mixed]) if adapter is None]
    assert [alone[place] for place in without] == [plain[place] for place in without]
    assert all(alone[place] != plain[place] for place in (0, 2, 3, 6, 8, 9))


def test_a_prefix_is_found_by_the_same_adapter_alone(folder: Path) -> None:
    with open_llm(folder, block_size=4) as llm:
        names = [None, "one", "other", "one", None, "other"]
        found = [llm.generate([PROMPT], GREEDY, lora_request=lora(folder, name))[0] for name in names]
        assert [out.cached_tokens for out in found] == [0, 0, 0, 17, 17, 17]
        assert said([found[1], found[2], found[0]]) == said([found[3], found[5], found[4]])


def test_more_adapters_than_fit_take_turns(folder: Path) -> None:
    mixed = ["one", "other", None, "third", "other", "one"]
    adapters = [lora(folder, one) for one in mixed]
    with open_llm(folder) as llm:
        want = said(llm.generate(PROMPTS, RANDOM, lora_request=adapters))
    for most in (1, 2):
        with open_llm(folder, max_loras=most) as llm:
            together: list[set[str | None]] = []
            shelf = llm.models.adapters
            engine = engine_of(llm)
            llm.on_step = lambda names, engine=engine, together=together: together.append(  # type: ignore[misc]
                {engine._requests[name].sequence.request.adapter for name in names} - {None}
            )
            assert said(llm.generate(PROMPTS, RANDOM, lora_request=adapters)) == want
            assert max(map(len, together)) == most
            assert len(shelf._resident) == most
            assert_idle(llm)


def test_an_adapter_that_is_gone_ends_its_requests_alone(folder: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "sql", folder / "target", seed=4)
    options = {"lora": {"one": folder / "one", "sql": tmp_path / "sql"}, "max_loras": 1}
    with open_llm(folder, **options) as llm:
        (tmp_path / "sql" / "adapter_model.safetensors").unlink()
        want = said(llm.generate(PROMPTS[:2], GREEDY))
        found = llm.generate([*PROMPTS[:2], PROMPT], GREEDY, lora_request=[None, None, LoRARequest("sql", 7)])
        assert said(found[:2]) == want
        assert found[2].finish_reason is FinishReason.ERROR
        assert "adapter_model.safetensors" in str(found[2].error)
        assert said(llm.generate([PROMPT], GREEDY, lora_request=LoRARequest("one", 1)))
        assert_idle(llm)


def test_reading_an_adapter_stops_no_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a request names a new one, or one that was replaced."""
    read, reads, may_read = PeftFolder.load, threading.Event(), threading.Event()

    def slow(self: PeftFolder, *given: Any) -> Adapter:
        if self.name == "other":
            reads.set()
            assert may_read.wait(60)
        return read(self, *given)

    one, other = lora(folder, "one"), lora(folder, "other")
    with open_llm(folder) as llm:
        want = said(llm.generate([PROMPT], RANDOM, lora_request=other))
    monkeypatch.setattr(PeftFolder, "load", slow)
    named = {"one": folder / "one", "other": folder / "other"}
    for options in ({"lora": {"one": folder / "one"}}, {"lora": named, "max_loras": 1}):
        with open_llm(folder, **options) as llm, ThreadPoolExecutor(1) as pool:
            reads.clear(), may_read.clear()
            waits = pool.submit(llm.generate, [PROMPT], RANDOM, lora_request=other)
            assert reads.wait(60), options
            for _ in range(2):
                plain, adapted = llm.generate(PROMPTS, RANDOM), []
                if "max_loras" not in options:  # there the other one takes its place
                    adapted = llm.generate(PROMPTS, RANDOM, lora_request=one)
                assert all(out.finish_reason is FinishReason.LENGTH for out in [*plain, *adapted])
            assert not waits.done(), options
            may_read.set()
            assert said(waits.result(60)) == want, options
            assert_idle(llm)


def test_names_and_numbers_are_one_adapters(folder: Path) -> None:
    with open_llm(folder, lora=[f"one={folder / 'one'}"]) as llm:

        def refused(message: str, given: Any, kind: type[Exception] = RequestError) -> None:
            with pytest.raises(kind, match=message):
                llm.generate([PROMPT], GREEDY, lora_request=given)

        assert llm.generate([PROMPT], GREEDY, lora_request=LoRARequest("one", 1))
        refused("lora_int_id 1 is the adapter 'one', and 'other' is another", LoRARequest("other", 1))
        refused(
            "the adapter 'other' has no lora_path and was not named before; known: one",
            LoRARequest("other", 2),
        )
        refused(
            "adapter 'one' is .*one; give .*other another name",
            LoRARequest("one", 1, folder / "other"),
            ModelError,
        )
        refused("adapter 'x': .*gone is not a folder", LoRARequest("x", 3, folder / "gone"), ModelError)
        refused("lora_request is 'one'; allowed: a LoRARequest", "one")
        refused("2 LoRARequests for 1 prompts", [LoRARequest("one", 1)] * 2)
        with pytest.raises(RequestError, match="lora_int_id is 0; allowed: 1, 2"):
            LoRARequest("one", 0)
        with pytest.raises(RequestError, match="lora_name is ''; allowed: a name"):
            LoRARequest("", 1)
        [output] = list(llm.stream(PROMPT, GREEDY, lora_request=LoRARequest("one", 1)))[-1:]
        assert said([output]) == said(llm.generate([PROMPT], GREEDY, lora_request=LoRARequest("one", 1)))


def test_a_damaged_adapter_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(Loader, "target", read)
    with pytest.raises(ModelError, match=r"adapter 'sql': .*nowhere is not a folder"):
        open_llm(folder, lora={"sql": tmp_path / "nowhere"})


@pytest.mark.parametrize(("quantization", "weights"), [("none", torch.float32), ("int8", torch.int8)])
def test_the_plan_of_memory_has_the_largest_adapters(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    quantization: str,
    weights: torch.dtype,
) -> None:
    """ "one" is the largest, then "third"."""
    seen = noted_needs(monkeypatch)
    named = {name: folder / name for name in ("one", "other", "third")}
    options = {"lora": named, "kernels": "native", "quantization": quantization}
    for most in (1, 2, 3, 8):
        with caplog.at_level("INFO"), open_llm(folder, **options, max_loras=most) as llm:
            adapters = llm.models.adapters
            sizes = {name: one.bytes(weights) for name, one in adapters._folders.items()}
            assert sizes["one"] > sizes["third"] > sizes["other"]
            missing = adapters.missing_bytes()
        needs = seen[-1]
        assert needs.adapters == sum(sorted(sizes.values())[-most:]) == needs.fixed(0)["adapters"]
        assert missing == {1: 0, 2: sizes["third"] - sizes["other"]}.get(most, 0)  # the first ones are loaded
        told = f"adapters take up to {gib(needs.adapters)} of memory (3 named, at most {most} in memory)"
        assert f"target: {told}" in caplog.text


def test_adapters_count_where_weights_do_not_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = spied(monkeypatch, loading, "plan_memory", lambda needs, *_: needs)
    monkeypatch.setattr(memory, "process_bytes", lambda: 0)
    room = [1 << 40]
    monkeypatch.setattr(memory, "allowed_bytes", lambda *_: room[0])
    options = {"lora": {"one": folder / "one"}}
    open_llm(folder, **options).close()
    [needs] = seen
    room[0] = needs.weights + needs.adapters - 1
    open_llm(folder).close()
    with pytest.raises(CapacityError, match=r"the weights need .* \+ adapters .* MiB = .* MiB, but"):
        open_llm(folder, **options)


def test_the_cache_leaves_memory_for_adapters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller adapter is loaded first, and the larger one takes its place later."""
    options = {"lora": {"other": folder / "other", "one": folder / "one"}, "max_loras": 1}
    with open_llm(folder, **options) as llm:
        missing = llm.models.adapters.missing_bytes()
    assert missing > 0
    room = [ENGINE["kv_cache_memory"] + missing]
    monkeypatch.setattr(executor, "free_bytes", lambda *_: room[0])
    open_llm(folder, **options).close()
    room[0] -= 1
    told = r"kv_cache_memory .* free on cpu \(beside .* MiB for adapters, see max_loras\) after loading"
    with pytest.raises(CapacityError, match=told):
        open_llm(folder, **options)


def test_an_adapter_that_a_request_names_has_to_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = [0]
    monkeypatch.setattr(loading, "free_bytes", lambda *_: room[0])
    with open_llm(folder, max_loras=1) as llm:
        told = r"adapter 'one' .*may then take 0.\d\d MiB more, and 0.00 MiB of memory are free"
        with pytest.raises(CapacityError, match=told):
            llm.generate([PROMPT], GREEDY, lora_request=lora(folder, "one"))
        with pytest.raises(RequestError, match="has no lora_path and was not named before; known: none"):
            llm.generate([PROMPT], GREEDY, lora_request=LoRARequest("one", 1))
        room[0] = 1 << 20
        found = said(llm.generate([PROMPT], GREEDY, lora_request=lora(folder, "one")))
        room[0] = 0
        llm.generate([PROMPT], GREEDY, lora_request=lora(folder, "other"))  # smaller, and in its place
        assert said(llm.generate([PROMPT], GREEDY, lora_request=lora(folder, "one"))) == found


def test_options_that_contradict_each_other(folder: Path) -> None:
    for options, message in (
        ({"lora": ["one"]}, "lora is 'one'; allowed: NAME=FOLDER"),
        ({"lora": ["=x"]}, "lora is '=x'; allowed: NAME=FOLDER"),
        ({"lora": ["a=x", "a=y"]}, "lora has the name 'a' twice"),
        ({"max_loras": 0}, "max_loras is 0; allowed: an integer >= 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            pytest.fail(f"{options}: {open_llm(folder, **options)}")


def test_a_variant_has_the_same_adapters(folder: Path) -> None:
    with open_llm(folder, lora=[f"one={folder / 'one'}"]) as llm:
        want = said(llm.generate(PROMPTS, RANDOM, lora_request=LoRARequest("one", 1)))
        with llm.variant(lookup=True) as variant:
            assert said(variant.generate(PROMPTS, RANDOM, lora_request=LoRARequest("one", 1))) == want
        with pytest.raises(ConfigError, match=r"lora is .*, and a variant shares weights"):
            llm.variant(lora=())


def test_a_model_through_transformers_takes_none(folder: Path) -> None:
    """A native model family, which would run adapters in native code."""
    refused = "adapter 'one' cannot be used: .* runs through transformers, without adapters; merge it"
    with pytest.raises(ModelError, match=refused):
        open_llm(folder, model_impl="transformers", lora={"one": folder / "one"})
    with open_llm(folder, model_impl="transformers") as llm, pytest.raises(ModelError, match=refused):
        llm.generate([PROMPT], GREEDY, lora_request=lora(folder, "one"))
