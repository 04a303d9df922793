"""Drafts go on while the target's pass is on its way, and keep what the next tree begins with."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest

from specinfer import LLM, SamplingParams
from specinfer.runtime.batch import chain_rows
from specinfer.runtime.executor import LocalExecutor, ModelRunner, as_rows
from specinfer.runtime.flight import Flight, Launch
from specinfer.speculate.drafts import draft as draft_module
from specinfer.speculate.drafts.draft import DraftModel
from specinfer.speculate.drafts.growth import Growth
from specinfer.speculate.policy.policy import SpeculationPolicy
from specinfer.speculate.speculator import Outcome
from tests.engines import Tiny, assert_idle, engine_of, runner_of, slow_generate, write_tiny
from tests.flights import Late

PROMPTS = ["a text about", "another"]
LONG = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Models that are sure of what they say, so that it pays to follow one path for long."""
    return write_tiny(tmp_path_factory.mktemp("sure"), vocab_size=128, max_context=96, spread=0.6)


def late(llm: LLM, monkeypatch: pytest.MonkeyPatch, levels: int) -> LLM:
    """The same, with time for so many levels in each pass, and trees of always the same shape.

    Nodes are run however unlikely they are: of texts that mean nothing most are.
    """
    monkeypatch.setattr(draft_module, "_LIKELY_AHEAD", 0.0)
    engine = engine_of(llm)
    launch = engine._executor.launch
    monkeypatch.setattr(
        engine._executor, "launch", lambda *args, **more: Late(launch(*args, **more).flight(), levels)
    )
    engine._speculators._policy = SpeculationPolicy.instead(llm.config.speculation)
    return llm


def drafts_of(llm: LLM) -> list[DraftModel]:
    return [one for one in engine_of(llm)._speculators._speculators if isinstance(one, DraftModel)]


def looked_ahead(llm: LLM) -> tuple[int, int]:
    return engine_of(llm)._speculators.looked_ahead


@pytest.mark.parametrize("draft", ["target", "similar", "stranger"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_the_same(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, draft: str, temperature: float
) -> None:
    params = [replace(LONG, temperature=temperature, seed=seed) for seed in (1, 2)]
    llm = late(tiny.llm([draft], tree_size="cost", clock="curve"), monkeypatch, 6)
    outputs = llm.generate(PROMPTS, params)
    for output, one in zip(outputs, params, strict=True):
        assert list(output.token_ids) == slow_generate(tiny.target, output.prompt_token_ids, one)
    made, kept = looked_ahead(llm)
    assert made > 0
    if draft != "stranger":
        assert kept > 0
    assert_idle(llm)


def test_what_was_drawn_ahead_is_what_would_be_drawn_now(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """All trees, nodes that were kept and those below them: each first child is the draft's own choice."""
    llm = late(tiny.llm(["similar"], tree_size="cost", clock="curve"), monkeypatch, 6)
    planted, checked = 0, 0
    observe = DraftModel.observe

    def first_children(growth: Growth) -> dict[int, int]:
        found: dict[int, int] = {}
        for draw in growth.builder.draws:
            found.setdefault(draw.parent, growth.builder.token_ids[draw.node])
        return found

    def watched(self: DraftModel, outcomes: Sequence[Outcome]) -> None:
        nonlocal checked
        for growth in self._growths:
            text = growth.entry.token_ids[: growth.entry.end]
            for node, token in first_children(growth).items():
                path = [*text, *growth.builder.path_tokens(node)]
                runner = ModelRunner(tiny.similar, num_blocks=1, block_size=tiny.similar.config.max_context)
                logits = as_rows(runner.forward([chain_rows(path, 0, [0], logits=True)]))[0]
                assert token == int(logits.argmax())
                checked += 1
        observe(self, outcomes)

    begin_with = Growth.begin_with

    def counted(self: Growth, earlier: Growth, run: Sequence[int]) -> None:
        nonlocal planted
        begin_with(self, earlier, run)
        planted += len(run) > 1

    monkeypatch.setattr(DraftModel, "observe", watched)
    monkeypatch.setattr(Growth, "begin_with", counted)
    llm.generate(["abc", "hello", "what", "1234"], replace(LONG, max_tokens=24))
    assert planted > 2
    assert checked > 200


def test_without_time_nothing_is_drawn_ahead(tiny: Tiny) -> None:
    llm = tiny.llm(["similar"], tree_size="cost", clock="curve")
    llm.generate(PROMPTS, LONG)
    assert looked_ahead(llm) == (0, 0)


def test_samples_are_not_drawn_ahead(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = late(tiny.llm(["similar"], tree_size="cost", clock="curve", verifier="mss"), monkeypatch, 6)
    llm.generate(PROMPTS, replace(LONG, temperature=0.9))
    assert looked_ahead(llm) == (0, 0)


def test_a_draft_that_fails_ahead_is_not_asked_again(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tiny.llm().generate(PROMPTS, LONG)
    llm = late(tiny.llm(["similar"], tree_size="cost", clock="curve"), monkeypatch, 6)

    def fail(self: DraftModel) -> bool:
        raise RuntimeError("no idea")

    monkeypatch.setattr(DraftModel, "look_ahead", fail)
    assert [o.token_ids for o in llm.generate(PROMPTS, LONG)] == [o.token_ids for o in whole]
    assert not drafts_of(llm)


def test_an_interrupt_ends_a_pass_that_is_on_its_way(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes run apart: whoever is interrupted waits for the pass, and the text goes on as it was."""
    whole = tiny.llm().generate(PROMPTS, LONG)
    llm = tiny.llm(["similar"], tree_size="cost", clock="curve")
    engine = engine_of(llm)
    executor = LocalExecutor(tiny.target, num_blocks=runner_of(llm).cache.num_slots // 16, block_size=16)
    executor._apart = ThreadPoolExecutor(1, "pass")  # as of a target that is streamed
    monkeypatch.setattr(LocalExecutor, "stream", SimpleNamespace(rest=lambda: 1.0, read_bytes=0, waited=0.0))
    engine._executor = executor
    names: set[str] = set()
    run = executor.target.launch

    def launch(*args: object, **more: object) -> Flight:
        names.add(threading.current_thread().name)
        return run(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(executor.target, "launch", launch)
    streams = [llm.stream(prompt, LONG) for prompt in PROMPTS]
    for stream in streams:
        next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(engine._speculators, "look_ahead", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(streams[0])
    *_, last = streams[1]
    assert last.token_ids == whole[1].token_ids
    assert [name for name in names if not name.startswith("pass")] == []
    assert_idle(llm)


def interrupted(launch: Launch) -> None:
    raise KeyboardInterrupt
