"""Training of a pool's next member: other texts, other positions, another law."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specinfer.progress import NoProgress
from specinfer.tune.boosting import DiscountedSet, hit_probabilities, proposals, proposed
from specinfer.tune.dataset import Corpus, TunedText, anchors_of, block_batch
from specinfer.tune.evaluation import read_draft
from specinfer.tune.prompts import HELD_OUT
from specinfer.tune.small_model import SsmKind
from tests.unit.tune.test_small_model import opened

GREEDY, WARM, HOT = (HELD_OUT * number + 1 for number in (0, 1, 2))  # keys
LAW = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.4, 0.0]]).log()
IDS = torch.tensor([[7, 8, 9], [3, 4, 5]])


def text(key: int, tokens: tuple[int, ...] = (1, 7, 4)) -> TunedText:
    """A prompt of a token, and an answer whose places have the laws above."""
    rows = len(tokens) - 1
    laws = IDS.repeat(rows, 1)[:rows], LAW.repeat(rows, 1)[:rows]
    return TunedText(torch.tensor(tokens), 1, torch.zeros(rows, 0, 32), *laws, key, held_out=False)


def test_how_likely_a_pool_hits() -> None:
    for key, proposed_RM, hits in (
        (GREEDY, [[7], [4]], [1.0, 0.0]),  # whether the likeliest is proposed
        (GREEDY, [[8, 9], [3, 5]], [0.0, 1.0]),
        (HOT, [[7], [4]], [0.5, 0.4]),
        (HOT, [[7, 9], [-1, -1]], [0.7, 0.0]),
        (HOT, [[7, 7], [4, 4]], [0.5, 0.4]),  # two members that agree propose one token
        (WARM, [[7], [3]], [0.5707, 0.6409]),  # p^(1/0.7), renormalised
    ):
        found = hit_probabilities(text(key), torch.tensor(proposed_RM)).tolist()
        assert found == pytest.approx(hits, abs=1e-4), (key, proposed_RM)


def pretended(tokens: list[int]) -> list[Tensor]:
    """A member that proposes one of these tokens at every place of a text but the first."""
    return [torch.tensor([-1, token, token]) for token in tokens]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Four greedy texts; each position has the first law, whose likeliest token is 7."""
    made = Corpus(tmp_path)
    laws = {"label_ids_RK": IDS[:1].repeat(3, 1), "label_logprobs_RK": LAW[:1].repeat(3, 1)}
    for number in range(4):
        one = text(GREEDY + 48 * HELD_OUT * number, (1, 7, 7, 7))
        made.add([replace(one, **laws)], 1.0)
    return made


def test_places_that_are_predicted_count_less(corpus: Corpus) -> None:
    known = [pretended([7, 8, 7, 9])]
    left = DiscountedSet(corpus, known)
    assert left.text(0).weights_R.tolist() == pytest.approx([1, 0.3, 0.3])
    assert left.text(1).weights_R.tolist() == [1, 1, 1]
    law = left.text(0).label_logprobs_RK.exp()
    assert law[0].tolist() == pytest.approx([0.5, 0.3, 0.2], abs=1e-3)  # the first token is never guessed
    assert law[1].tolist() == pytest.approx([3 / 13, 6 / 13, 4 / 13], abs=1e-3)  # 0.15, 0.3, 0.2 of 0.65
    first = DiscountedSet(corpus, [])
    assert first.text(0).weights_R.tolist() == [1, 1, 1]
    assert len(first) == 4


def test_weights_reach_the_places_they_are_of() -> None:
    counted = replace(text(HOT, (1, 7, 4, 7, 4)), counts_R=torch.arange(4.0))
    batch = block_batch([counted], [anchors_of(counted, 9, torch.Generator())], 2, torch.ones(0, 32))
    assert batch.weights_BAL.tolist() == [[[1, 2], [2, 3], [3, 3]]]
    assert batch.valid_BAL.tolist() == [[[True, True], [True, True], [True, False]]]


def test_a_member_proposes_its_likeliest_tokens(target: Path, corpus: Corpus, tmp_path: Path) -> None:
    source = opened(target)
    SsmKind(layers=1).blank(source, torch.ones(0, 32), []).write(tmp_path / "one", source)
    member = read_draft(tmp_path / "one", source, 2)
    found = proposals(member, corpus, NoProgress())
    logits = member.logits(member.module(torch.tensor([[1, 7, 7]])), torch.zeros(0))[0]
    assert [one.tolist() for one in found] == [[-1, *logits[1:].argmax(dim=-1).tolist()]] * 4
    few = proposed(member, corpus.text(0, held_out=False), torch.tensor([5, 7, 11]))
    assert few[1:].tolist() == [(5, 7, 11)[int(row[[5, 7, 11]].argmax())] for row in logits[1:]]
