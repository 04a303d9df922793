"""Best-first trees of one native call are those that PyTorch and NumPy grow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specinfer.heads.block import BlockModel
from specinfer.heads.checkpoint import HeadFolder, load_head
from specinfer.kernels.choice import choose_kernels, draft_kernels
from specinfer.models.open_model import open_model
from specinfer.models.weights import load_model
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary, named_tokens
from specinfer.speculate.drafts.growth import Growth, GuessedTree, Shape
from specinfer.speculate.drafts.one_pass import NativeTrees
from specinfer.speculation_config import Quantization
from specinfer.tree import DrawRule, TokenTree
from specinfer.tree.token_tree import Expansion
from tests import plans
from tests.heads import SIZE, VOCAB, block_config, tiny_head, write_tiny_head
from tests.oracles.best_first import PlainTrees
from tests.tiny_models import write_tiny_llama

CPU = torch.device("cpu")
SHAPE = Shape(Expansion((1, 1, 1, 1, 1)), DrawRule.COUPLED)
HEADS: dict[str, dict[str, Any]] = {
    "pairs": {},
    "no pairs": {"markov_rank": 0},
    "all tokens": {"draft_vocab_size": VOCAB},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trees")


def loaded(
    folder: Path, name: str, dtype: torch.dtype, quantization: Quantization
) -> tuple[BlockModel, DraftVocabulary | None]:
    if choose_kernels("auto", CPU)[0].library is None:
        pytest.skip("there is no native library here")
    path = folder / "target"
    target = open_model(path if path.exists() else write_tiny_llama(path, tokenizer=True, num_layers=3))
    kernels = choose_kernels("auto", CPU)[0]
    model = load_model(path, dtype=dtype, device=CPU, kernels=kernels)
    written = write_tiny_head(tiny_head(block_config(**HEADS[name]), seed=4), folder / name)
    head = load_head(
        HeadFolder(written, target.config, target),
        model,
        kernels=draft_kernels(kernels),
        quantization=quantization,
        keep=False,
    )
    return head, named_tokens(head.ids, VOCAB)


def guessed(sampling: dict[str, Any], count: int, levels: int, most: int = 40) -> list[GuessedTree]:
    """Return `count` requests, each with its levels and root."""
    found = []
    for i in range(count):
        entry = plans.entry(
            [3, 7 + i], request_id=str(i), max_nodes=most, params=SamplingParams(**sampling), seed=11 + i
        )
        growth = Growth.of(entry, "head", levels)
        (root,) = growth.sites(SHAPE)
        found.append(GuessedTree(growth, i * levels, levels, root))
    return found


def both(
    head: BlockModel,
    vocabulary: DraftVocabulary | None,
    sampling: dict[str, Any],
    no_number: int | None = None,
    **of: int,
) -> list[tuple[TokenTree, TokenTree]]:
    """Trees of the same guesses, native and plain; the row `no_number` of the logits has NaN."""
    settled = {"count": 3, "levels": 4, **of}
    nodes = settled.pop("nodes", 32)
    rows = settled["count"] * settled["levels"]
    read_TD = torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(rows)).to(head.dtype)
    logits_TU = 3 * head.logits(read_TD)
    if no_number is not None:
        logits_TU[no_number, 5] = torch.nan
    assert head.kernels.library is not None
    native = NativeTrees("head", head, vocabulary, head.kernels.library)
    grown = []
    for trees in (native, PlainTrees("head", head, vocabulary)):
        asked = guessed(sampling, **settled)
        trees.grow(asked, logits_TU, nodes)
        grown.append([one.growth.tree() for one in asked])
    return [*zip(*grown, strict=True)]


def assert_same(native: TokenTree, plain: TokenTree) -> None:
    """The same nodes, as likely, in the same order; where two are as likely as each other, either of them.

    Logits of bfloat16 have few values, so sums along two paths may be the same but for rounding.
    """
    native.check_integrity()
    ours, theirs = (
        {tree.path_tokens(draw.node): (draw.confidence, *draw.evidence) for draw in tree.draws}
        for tree in (native, plain)
    )
    assert len(ours.keys() - theirs.keys()) == len(theirs.keys() - ours.keys()) <= 1
    for path in ours.keys() & theirs.keys():
        assert ours[path] == pytest.approx(theirs[path], rel=1e-4)
    assert native.likelihoods() == pytest.approx(plain.likelihoods(), rel=1e-4)
    assert [draw.node for draw in native.draws] == [*range(1, native.num_nodes)]
    assert {draw[2:5] for draw in native.draws} == {draw[2:5] for draw in plain.draws}
    assert native.token_ids[0] == plain.token_ids[0]


@pytest.mark.few(6)
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 0.7}, {"temperature": 1.3}], ids=str
)
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [(torch.float32, "none"), (torch.bfloat16, "none"), (torch.bfloat16, "int8")],
    ids=str,
)
def test_the_trees_are_those_of_the_twin(
    folder: Path, name: str, sampling: dict[str, Any], dtype: torch.dtype, quantization: Quantization
) -> None:
    pairs = both(*loaded(folder, name, dtype, quantization), sampling)
    for native, plain in pairs:
        assert_same(native, plain)
        rule = DrawRule.COUPLED if sampling["temperature"] else DrawRule.POINT_MASS
        assert {draw.rule for draw in native.draws} == {rule}
    assert max(native.num_nodes for native, _ in pairs) == 33
    assert len({native.token_ids[1:] for native, _ in pairs}) > 1


@pytest.mark.parametrize(
    "of", [{"levels": 1}, {"count": 1}, {"most": 2}, {"nodes": 6}, {"most": 5, "count": 17}], ids=str
)
def test_small_trees_and_many_are_the_same(folder: Path, of: dict[str, int]) -> None:
    head = loaded(folder, "pairs", torch.float32, "none")
    for native, plain in both(*head, {"temperature": 0}, **of):
        assert_same(native, plain)
        assert 1 < native.num_nodes <= min(of.get("most", 40), 1 + of.get("nodes", 32))


@pytest.mark.parametrize("row", [0, 2])
def test_levels_that_are_no_numbers_end_a_tree(folder: Path, row: int) -> None:
    head = loaded(folder, "pairs", torch.float32, "none")
    [(native, plain)] = both(*head, {"temperature": 0}, no_number=row, count=1)
    assert_same(native, plain)
    assert max(native.depths()) == row


def test_rows_that_are_not_there_are_refused(folder: Path) -> None:
    head, vocabulary = loaded(folder, "pairs", torch.float32, "none")
    assert head.kernels.library is not None
    native = NativeTrees("head", head, vocabulary, head.kernels.library)
    read_TD = torch.zeros(4, SIZE)
    asked = guessed({"temperature": 0}, 1, 4)
    with pytest.raises(IndexError, match="4 rows of logits"):
        native.grow([replace(asked[0], first=1)], head.logits(read_TD), 32)
