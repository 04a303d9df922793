"""The cache of a draft with another vocabulary: a wrong position costs only guesses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specinfer import SamplingParams
from specinfer.errors import ConfigError
from specinfer.models.weights import load_model
from specinfer.plan import PlanEntry
from specinfer.runtime.runner import ModelRunner
from specinfer.speculate.drafts.draft_tokens import ForeignTokens, foreign_tokens
from specinfer.speculate.drafts.foreign_draft import ForeignDraft
from specinfer.speculate.drafts.growth import Shape
from specinfer.speculate.ensemble import Ensemble
from specinfer.speculate.policy.policy import SpeculationPolicy
from specinfer.tokenizer import Tokenizer
from specinfer.tree import DrawRule, TokenTree
from specinfer.tree.token_tree import Expansion
from tests import plans
from tests.engines import CPU
from tests.foreign import byte_level, write_foreign_llama
from tests.plans import outcome
from tests.tiny_models import write_tiny_llama
from tests.unit.speculate.guessers import passes_of

TEXT = [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12]
GREEDY = SamplingParams(temperature=0, max_tokens=40)
WORDS = ["\x01\x00", "\x0b\x0c\x07", "12"]  # so TEXT is ten tokens to the draft
LACKS = [30, 60]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foreign")
    target = write_tiny_llama(folder / "target", vocab_size=64, max_context=96, tokenizer=True)
    write_foreign_llama(target, folder / "draft", words=WORDS, lacks=LACKS)
    return folder


def exchange(folder: Path) -> ForeignTokens:
    target, draft = (Tokenizer.load(folder / name) for name in ("target", "draft"))
    return foreign_tokens(target, draft, (64, draft.vocab_size), name="d")


def draft(folder: Path, *widths: int, max_rows: int = 96, blocks: int = 60) -> ForeignDraft:
    tokens = exchange(folder)
    model = load_model(folder / "draft", dtype=torch.float32, device=CPU, logit_ids=tokens.logit_ids.tolist())
    runner = ModelRunner(model, num_blocks=blocks, block_size=4)
    expansion = Expansion(widths)
    return ForeignDraft(
        "draft",
        runner,
        Shape(expansion, DrawRule.POINT_MASS),
        max_rows=max_rows,
        num_blocks=blocks,
        tokens=tokens,
    )


def entry(text: list[int], *, max_depth: int = 9, **fields: Any) -> PlanEntry:
    return plans.entry(list(text), params=GREEDY, max_depth=max_depth, **fields)


def guesses(model: ForeignDraft, *entries: PlanEntry) -> list[TokenTree]:
    trees = Ensemble([model], vocab=64, policy=SpeculationPolicy()).propose(plans.plan(*entries))
    for tree in trees:
        tree.check_integrity()
    blocks = [*model._free, *(block for text in model._spelled.values() for block in text.table)]
    assert sorted(blocks) == [*range(len(blocks))], "every block is free or belongs to one text"
    return trees


def read(model: ForeignDraft, monkeypatch: pytest.MonkeyPatch, *entries: PlanEntry) -> list[list[int]]:
    """Return the rows of a step's first pass, as bytes."""
    table = model._tokens.draft.token_bytes
    with monkeypatch.context() as patch:
        passes = passes_of(model._runner, patch)
        guesses(model, *entries)
    return [[*b"".join(table[i] for i in token_ids)] for token_ids in passes[0]]


@pytest.mark.few(6)
@pytest.mark.parametrize("node", range(1, 13))
def test_after_any_path_the_cache_is_as_good_as_new(folder: Path, node: int) -> None:
    model = draft(folder, 3, 2, 2)
    [tree] = guesses(model, entry(TEXT))
    assert tree.num_nodes > node
    committed = (*tree.path_tokens(node), 17)
    model.observe([outcome(*committed)])
    text = [*TEXT, *committed]
    [again], [new] = guesses(model, entry(text)), guesses(draft(folder, 3, 2, 2), entry(text))
    assert (again.token_ids, again.parents) == (new.token_ids, new.parents)


def test_only_what_the_cache_lacks_is_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = draft(folder, 1, 1, 1)
    [first] = guesses(model, entry(TEXT))
    committed = (*first.token_ids[1:], 17)  # the third guess was never run, the bonus token not guessed
    model.observe([outcome(*committed)])
    assert read(model, monkeypatch, entry([*TEXT, *committed])) == [[first.token_ids[3], 17]]


def test_an_end_spelled_otherwise_is_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = draft(folder, 1)
    guesses(model, entry([*TEXT[:8], 1]))
    model.observe([outcome(0)])  # 1 and 0 are one token to the draft
    assert read(model, monkeypatch, entry([*TEXT[:8], 1, 0])) == [[1, 0]]
    [tree], [new] = (
        guesses(model, entry([*TEXT[:8], 1, 0])),
        guesses(draft(folder, 1), entry([*TEXT[:8], 1, 0])),
    )
    assert tree.token_ids == new.token_ids


def test_what_the_draft_has_no_token_for_is_never_guessed(folder: Path) -> None:
    shared = exchange(folder)
    assert set(range(64)) - set(shared.vocabulary.ids.tolist()) == set(LACKS)
    [word] = shared.draft.encode("12")
    assert shared.to_target(word) == -1
    assert shared.to_draft([3, 9]) == [shared.draft.encode("\x03")[0], shared.draft.encode("\t")[0]]


def test_short_blocks_are_taken_from_those_who_do_not_run_and_then_nobody_guesses(folder: Path) -> None:
    model = draft(folder, 1, blocks=4)
    guesses(model, entry(TEXT, max_nodes=2))
    [tree] = guesses(model, entry(TEXT[::-1], request_id="b", max_nodes=2))
    assert tree.num_nodes == 2
    assert model._spelled["r"].cached == 0
    [one, other] = guesses(model, entry(TEXT, max_nodes=2), entry(TEXT[::-1], request_id="b", max_nodes=2))
    assert sorted([one.num_nodes, other.num_nodes]) == [1, 2]
    model.observe([outcome(finished=True), outcome(request_id="b", finished=True)])
    [tree] = guesses(model, entry(TEXT, request_id="c", max_nodes=2))
    assert tree.token_ids == guesses(draft(folder, 1), entry(TEXT, max_nodes=2))[0].token_ids


def test_a_text_that_fills_the_drafts_context_is_not_guessed_for(folder: Path) -> None:
    long = [t % 59 for t in range(120)]
    assert guesses(draft(folder, 1, 1), entry(long))[0].num_nodes == 1


def test_a_draft_that_shares_no_token_is_refused() -> None:
    one, other = (Tokenizer(byte_level(singles, []), eos_token_ids=[]) for singles in ([65], [66]))
    with pytest.raises(ConfigError, match=r"^draft d and the target have no token in common"):
        foreign_tokens(one, other, (1, 1), name="d")
