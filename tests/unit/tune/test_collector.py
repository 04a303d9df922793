"""Collection: recorded values equal those of the target on the text alone."""

from dataclasses import replace
from pathlib import Path

import torch

from specinfer.llm import LLM
from specinfer.progress import NoProgress
from specinfer.runtime.batch import chain_rows
from specinfer.runtime.runner import ModelRunner
from specinfer.tune.collector import CollectionCounts, Collector, HiddenStateListener, collecting_config
from specinfer.tune.dataset import Corpus
from specinfer.tune.prompts import Prompts, read_prompts
from tests.unit.tune.conftest import engine, ticking, write_prompts

TAPS = (0, 1, 2)


def collect(
    target: Path, prompts: Prompts, folder: Path, seconds: float = 1000.0, max_tokens: int = 12
) -> tuple[Corpus, CollectionCounts]:
    folder.mkdir(exist_ok=True)
    listener, corpus = HiddenStateListener((*TAPS, 3)), Corpus(folder)
    with LLM(collecting_config(engine(target)), speculators=[listener]) as llm:
        collector = Collector(llm, listener, chat=False, max_tokens=max_tokens, seed=0)
        return corpus, collector.run(prompts.prompts, corpus, seconds, NoProgress(), ticking())


def test_states_and_labels_are_those_of_a_pass(target: Path, prompts: Path, tmp_path: Path) -> None:
    corpus, found = collect(target, read_prompts([prompts]), tmp_path)
    assert (found.answered, found.silent, found.refused) == (40, 0, 0)
    assert corpus.count(held_out=True) + corpus.count(held_out=False) == 40
    with LLM(engine(target)) as llm:
        model = llm.models.target
        for held_out in (True, False):
            text = corpus.text(0, held_out=held_out)
            tokens = text.tokens_T.tolist()
            runner = ModelRunner(model, num_blocks=8, block_size=16)
            flight = runner.launch([chain_rows(tokens, 0, range(8), logits=True)], taps=TAPS)
            alone = torch.stack([flight.tapped([tap])[:, 0] for tap in TAPS], dim=1)[:-1]
            assert torch.allclose(text.taps_TND, alone, atol=1e-5)
            rows = [len(tokens) - 1 - text.answer + i for i in range(text.answer)]
            part = replace(chain_rows(tokens, 0, range(8), logits=True), logits_from=0)
            logits = ModelRunner(model, num_blocks=8, block_size=16).forward([part])[rows]
            expected, ids = logits.log_softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
            assert torch.allclose(text.label_logprobs_RK, expected, atol=0.02)  # kept as float16
            assert torch.equal(text.label_ids_RK[:, 0], ids[:, 0])
            if held_out:  # greedy
                assert torch.equal(text.tokens_T[text.prompt :], ids[:, 0])


def test_what_is_answered_is_not_asked_again(target: Path, tmp_path: Path) -> None:
    asked = read_prompts([write_prompts(tmp_path, [f"{n} * {n}" for n in range(100)])])
    tmp_path = tmp_path / "shards"
    first, found = collect(target, asked, tmp_path, seconds=5.0)
    assert 0 < found.answered < 100
    before = first.tokens
    second, more = collect(target, asked, tmp_path)
    assert found.answered + more.answered == 100
    assert second.tokens > before
    third, none = collect(target, asked, tmp_path)
    assert (none.answered, third.tokens, third.keys) == (0, second.tokens, {one.key for one in asked.prompts})


def test_an_answer_is_kept_as_far_as_it_is_whole(target: Path, prompts: Path, tmp_path: Path) -> None:
    asked = read_prompts([prompts])
    corpus, found = collect(target, asked, tmp_path, seconds=5.0, max_tokens=40)
    whole, _ = collect(target, asked, tmp_path / "whole", max_tokens=40)
    assert found.answered == corpus.count(held_out=True) + corpus.count(held_out=False) > 0
    firsts = [whole.text(number, held_out=held_out) for held_out in (True, False) for number in range(2)]
    texts = {text.key: text for text in firsts}
    compared = 0
    for held_out in (True, False):
        for number in range(corpus.count(held_out=held_out)):
            text = corpus.text(number, held_out=held_out)
            assert 2 <= text.answer < 39
            if (long := texts.get(text.key)) is not None:
                compared += 1
                assert torch.equal(text.tokens_T, long.tokens_T[: len(text.tokens_T)])
                assert torch.allclose(text.taps_TND, long.taps_TND[: len(text.taps_TND)], atol=1e-5)
    assert compared == 4


def test_a_damaged_shard_is_left_out(target: Path, tmp_path: Path) -> None:
    asked = read_prompts([write_prompts(tmp_path, [f"{n} * {n}" for n in range(100)])])
    tmp_path = tmp_path / "shards"
    collect(target, asked, tmp_path, seconds=5.0)
    whole, _ = collect(target, asked, tmp_path)
    paths = sorted(tmp_path.iterdir())
    assert len(paths) > 1
    paths[0].write_bytes(paths[0].read_bytes()[:-100])
    left = Corpus(tmp_path)
    assert left.damaged == [paths[0].name]
    assert 0 < left.tokens < whole.tokens
