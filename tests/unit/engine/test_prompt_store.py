"""Texts are the same wherever their prompts' blocks come from, and whatever becomes of the files."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specinfer.config import EngineConfig
from specinfer.engine.models import Models
from specinfer.errors import ConfigError
from specinfer.llm import LLM
from specinfer.request import LoRARequest
from specinfer.sampling_params import SamplingParams
from tests.adapters import write_adapter
from tests.engines import ENGINE, Tiny, engine_of
from tests.recurrent import answer as recurrent_answer
from tests.recurrent import counting
from tests.tiny_models import write_pair, write_tiny_llama

PROMPT = [(7 * i) % 200 for i in range(50)]  # 12 blocks of 4, and 2 tokens
PARAMS = SamplingParams(temperature=1, seed=3, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(
        tmp_path_factory.mktemp("model") / "m", vocab_size=256, max_context=128, tokenizer=True
    )


def opened(model: Path, store: Path | None, **options: Any) -> LLM:
    return LLM(model, **{**ENGINE, "block_size": 4, "prompt_store": store, **options})


def answer(llm: LLM, prompt: list[int] = PROMPT) -> tuple[tuple[int, ...], int]:
    (output,) = llm.generate([prompt], PARAMS)
    llm.check_integrity()
    assert output.finish_reason == "length"
    return output.token_ids, output.cached_tokens


def files(store: Path) -> list[Path]:
    return sorted(store.glob("*/*"))


def losing(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files be lost until `monkeypatch` is undone."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if fault == "full":
        monkeypatch.setattr("specinfer.engine.prompt_files.os.replace", refuse)
    else:
        monkeypatch.setattr("specinfer.engine.prompt_files._MAX_WAITING", 0)


def wait_written(llm: LLM) -> None:
    store = engine_of(llm)._scheduler.store
    assert store is not None
    while store._files._waiting:
        time.sleep(0.001)


def filled(model: Path, store: Path, **options: Any) -> tuple[int, ...]:
    """Answer with an empty store, and return the text."""
    with opened(model, store, **options) as llm:
        text, cached = answer(llm)
    assert cached == 0
    assert len([path for path in files(store) if not path.suffix]) == 14  # of 59 computed tokens
    return text


@pytest.mark.parametrize("options", [{}, {"drafts": ["self"]}, {"lookup": True}], ids=str)
def test_a_restarted_engine_finds_what_was_written(
    model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    with opened(model, None) as llm:
        alone = answer(llm)[0]
    store = tmp_path / "store"
    assert filled(model, store, **options) == alone
    with opened(model, store, **options) as llm:
        assert answer(llm) == (alone, 48)
        assert answer(llm) == (alone, 49)  # from the pool, which has parts of blocks
        assert answer(llm, [*PROMPT[:21], 9])[1] == 21
        counts = llm.statistics().prompt_store
        assert (counts["read"], counts.get("wrong", 0)) == (24 if "drafts" in options else 12, 0)
        outputs = llm.generate([[*PROMPT[:9], i] for i in range(4)] + [PROMPT], PARAMS)
        assert outputs[-1].token_ids == alone


def test_several_texts_wait_for_the_same_files_and_those_without_do_not(model: Path, tmp_path: Path) -> None:
    text = filled(model, tmp_path)
    with opened(model, tmp_path, max_batch_size=3) as llm:
        outputs = llm.generate([PROMPT, [9, 8, 7], PROMPT, [*PROMPT, 4]], PARAMS)
    *cached, last = [output.cached_tokens for output in outputs]
    assert (cached, last in (48, 50)) == ([48, 0, 48], True)  # the last one may begin within a block
    assert outputs[0].token_ids == outputs[2].token_ids == text


def test_a_text_that_is_aborted_while_it_is_read_leaves_the_store_to_others(
    model: Path, tmp_path: Path
) -> None:
    text = filled(model, tmp_path)
    with opened(model, tmp_path) as llm:
        engine = engine_of(llm)
        [[gone]] = llm.intake.prompts([PROMPT], PARAMS)
        engine.add(gone)
        engine.step()
        engine.abort(gone.request.request_id)
        assert answer(llm)[0] == text


@pytest.mark.parametrize("fault", ["full", "slow"])
@pytest.mark.parametrize("drafts", [(), ("self",)])
def test_a_lost_block_is_written_for_the_next_text_that_finds_it(
    model: Path, tmp_path: Path, fault: str, drafts: tuple[str, ...]
) -> None:
    with opened(model, tmp_path, drafts=drafts) as llm:
        with pytest.MonkeyPatch.context() as lossy:
            losing(fault, lossy)
            text = answer(llm)[0]
            wait_written(llm)
        assert files(tmp_path) == []
        assert answer(llm) == (text, 49)  # a row of another text's block, too
        wait_written(llm)
        whole = {path.name for path in files(tmp_path) if not path.suffix}
        written = [path for path in files(tmp_path) if path.stem in whole]
        assert (len(whole), len(written)) == (12, 12 + 12 * len(drafts))
        times = [path.stat().st_mtime_ns for path in written]
        answer(llm)  # finds nothing that is lost
        wait_written(llm)
        assert [path.stat().st_mtime_ns for path in written] == times
    with opened(model, tmp_path, drafts=drafts) as llm:
        assert answer(llm) == (text, 48)
        assert llm.statistics().prompt_store["read"] == len(written)


def hybrid(tiny: Tiny, store: Path, drafts: Sequence[str] = ()) -> LLM:
    """An engine whose models have recurrent states."""
    models = counting(tiny.tokenizer)
    named = {f"{i}-{name}": getattr(models, name) for i, name in enumerate(drafts)}
    loaded = Models(models.target, models.tokenizer, named, origin={"model": "counting"})
    options = {**ENGINE, "block_size": 4, "prompt_store": store, "drafts": drafts}
    return LLM.from_models(EngineConfig.from_options("m", options), loaded)


GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
RECURRENT = [i % 61 for i in range(50)]  # a prompt


@pytest.mark.parametrize("fault", ["full", "slow"])
def test_lost_states_are_written_for_the_next_text_that_finds_them(
    tiny: Tiny, tmp_path: Path, fault: str
) -> None:
    found: list[int] = []
    for faults in ((fault, None), (None,)):  # two engines
        with hybrid(tiny, tmp_path) as llm:
            for one in faults:
                with pytest.MonkeyPatch.context() as lossy:
                    if one is not None:
                        losing(one, lossy)
                    (output,) = llm.generate([RECURRENT], GREEDY)
                    wait_written(llm)
                assert list(output.token_ids) == recurrent_answer(RECURRENT, 12)
                found.append(output.cached_tokens)
    assert found == [0, 48, 48]


def test_two_engines_use_one_folder_within_its_size(model: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("another's file")
    filled(model, tmp_path)
    size = sum(path.stat().st_size for path in files(tmp_path))
    with opened(model, tmp_path) as one, opened(model, tmp_path, prompt_store_size=size) as two:
        texts = [answer(llm, [number, *PROMPT])[0] for number in range(8) for llm in (one, two)]
        assert texts[::2] == texts[1::2]
    with opened(model, tmp_path, prompt_store_size=size) as llm:
        answer(llm, [77, *PROMPT])
    assert sum(path.stat().st_size for path in files(tmp_path)) <= size
    assert (tmp_path / "other").exists()


def test_a_text_with_an_adapter_of_its_request_is_not_written(tmp_path: Path) -> None:
    folder, greedy = write_pair(tmp_path / "models"), SamplingParams(temperature=0, max_tokens=9)
    adapter = write_adapter(folder / "one", folder / "target", rank=4, alpha=8, seed=1)
    store, prompt = tmp_path / "store", [token % 60 for token in PROMPT]
    with opened(folder / "target", store, drafts=[str(folder / "draft")]) as llm:
        llm.generate([prompt], greedy, lora_request=LoRARequest("one", 1, adapter))
        wait_written(llm)
        assert files(store) == []
        llm.generate([prompt], greedy)
        wait_written(llm)
        assert {bool(path.suffix) for path in files(store)} == {False, True}


def test_a_clock_that_was_wrong_leaves_room_for_new_texts(model: Path, tmp_path: Path) -> None:
    filled(model, tmp_path)
    size = sum(path.stat().st_size for path in files(tmp_path))
    for seconds in (0, 1 << 33):
        for path in files(tmp_path):
            os.utime(path, (seconds, seconds))
        new = [seconds % 7 + 1, *PROMPT[1:]]
        with opened(model, None) as llm:
            expected = answer(llm, new)[0]
        for cached in (0, 48):
            with opened(model, tmp_path, prompt_store_size=size) as llm:
                assert answer(llm, new) == (expected, cached), seconds
        assert sum(path.stat().st_size for path in files(tmp_path)) <= size


def test_engines_with_other_numbers_share_no_file(model: Path, tmp_path: Path) -> None:
    filled(model, tmp_path)
    for options in ({"block_size": 8}, {"dtype": "bfloat16"}, {"kernels": "torch"}):
        with opened(model, tmp_path, **options) as llm:
            assert answer(llm)[1] == 0
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("drafts", [(), ("similar",)])
def test_states_of_hybrids_are_found_again(tiny: Tiny, tmp_path: Path, drafts: Sequence[str]) -> None:
    second = [*RECURRENT, *recurrent_answer(RECURRENT, 12), 5]
    turns = [RECURRENT, second, [*RECURRENT[:48], 7, 7]]
    for turn, expected in zip(turns, (0, 60, 48), strict=True):  # one engine each
        with hybrid(tiny, tmp_path, drafts) as llm:
            (output,) = llm.generate([turn], GREEDY)
            llm.check_integrity()
        assert (list(output.token_ids), output.cached_tokens) == (recurrent_answer(turn, 12), expected)


def test_drafts_whose_adapters_had_one_path_share_no_file(tmp_path: Path) -> None:
    folder, store = write_pair(tmp_path / "models"), tmp_path / "store"
    prompt = [token % 60 for token in PROMPT]
    kinds = []
    for seed in (1, 2, 1):
        adapter = write_adapter(folder / "one", folder / "draft", rank=4, alpha=8, seed=seed)
        with opened(folder / "target", store, drafts=[str(folder / "draft")], draft_lora=str(adapter)) as llm:
            llm.generate([prompt], SamplingParams(temperature=0, max_tokens=9))
        kinds.append(len({path.suffix for path in files(store)} - {""}))
    assert kinds == [1, 2, 2]


def test_bad_options_are_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for options, line in (
        ({"prompt_store_size": 100}, "prompt_store_size is 100; allowed: "),
        ({"prompt_store": tmp_path / "file"}, "prompt_store cannot be used: "),
        ({"prefix_reuse": False}, "prompt_store is set with prefix_reuse False; "),
        ({"tensor_parallel": 2}, "prompt_store is "),
    ):
        with pytest.raises(ConfigError) as refused:
            opened(model, tmp_path, **options)
        assert str(refused.value).startswith(line)
