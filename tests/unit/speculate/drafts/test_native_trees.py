"""Best-first trees: the oracle has the likeliest of all paths, and one native call grows the oracle's."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specinfer.heads.block import BlockModel
from specinfer.heads.checkpoint import HeadFolder, load_head
from specinfer.heads.runner import HeadPass
from specinfer.kernels.choice import choose_kernels, draft_kernels
from specinfer.models.open_model import open_model
from specinfer.models.weights import load_model
from specinfer.plan import PlanEntry
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary, named_tokens
from specinfer.speculate.drafts.growth import Growth, GuessedTree, Shape
from specinfer.speculate.drafts.one_pass import NativeTrees, OnePassTrees
from specinfer.speculation_config import Quantization
from specinfer.tree import DrawRule, TokenTree, TreeBuilder
from specinfer.tree.token_tree import Expansion, single_node
from specinfer.verify.noise import exponentials
from tests import plans
from tests.heads import SIZE, VOCAB, block_config, tiny_head, write_tiny_head
from tests.oracles.best_first import Level, PlainTrees, Race, grow
from tests.tiny_models import write_tiny_llama

CPU = torch.device("cpu")
LEVELS = 4
Loaded = tuple[BlockModel, DraftVocabulary | None]
SHAPE = Shape(Expansion((1, 1, 1, 1, 1)), DrawRule.COUPLED)
HEADS: dict[str, dict[str, Any]] = {
    "pairs": {},
    "no pairs": {"markov_rank": 0},
    "all tokens": {"draft_vocab_size": VOCAB},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trees")


def loaded(folder: Path, name: str, dtype: torch.dtype, quantization: Quantization) -> Loaded:
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


@pytest.fixture(scope="module")
def head(folder: Path) -> Loaded:
    return loaded(folder, "pairs", torch.float32, "none")


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
def test_small_trees_and_many_are_the_same(head: Loaded, of: dict[str, int]) -> None:
    for native, plain in both(*head, {"temperature": 0}, **of):
        assert_same(native, plain)
        assert 1 < native.num_nodes <= min(of.get("most", 40), 1 + of.get("nodes", 32))


@pytest.mark.parametrize("row", [0, 2])
def test_levels_that_are_no_numbers_end_a_tree(head: Loaded, row: int) -> None:
    [(native, plain)] = both(*head, {"temperature": 0}, no_number=row, count=1)
    assert_same(native, plain)
    assert max(native.depths()) == row


def test_rows_that_are_not_there_are_refused(head: Loaded) -> None:
    model, vocabulary = head
    native = NativeTrees("head", model, vocabulary, model.kernels.library)
    asked = guessed({"temperature": 0}, 1, 4)
    with pytest.raises(IndexError, match="4 rows of logits"):
        native.grow([replace(asked[0], first=1)], model.logits(torch.zeros(4, SIZE)), 32)


def grown(trees: OnePassTrees, model: BlockModel, entry: PlanEntry) -> TokenTree:
    """A tree that is grown now."""
    growth = Growth.of(entry, "head", LEVELS)
    read_TD = torch.randn(LEVELS, SIZE, generator=torch.Generator().manual_seed(1))
    trees.grow([trees.open(growth, 0, LEVELS)], HeadPass((), read_TD, model.logits(read_TD)))
    return growth.tree()


def chain(nodes: int, name: str = "head") -> TokenTree:
    builder = TreeBuilder(1)
    for node in range(nodes):
        builder.add(node, 5, name)
    return builder.build()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("params", [{"top_p": 0.9, "temperature": 1.0}, {"temperature": 0}])
def test_levels_have_a_shape(head: Loaded, params: dict[str, Any], native: bool, learned: bool) -> None:
    model, vocabulary = head
    shape = Shape(Expansion((1, 2, 1)), DrawRule.COUPLED, learned=learned)
    entry = plans.entry([3, 7], params=SamplingParams(seed=1, **params))
    mine = OnePassTrees("head", model, shape, vocabulary)
    if not native:
        mine._grow_best_first = None
    assert mine.max_nodes(entry.request) == (32 if native and learned else 5)
    by_levels = "top_p" in params or not native or not learned
    assert (grown(mine, model, entry).parents == (-1, 0, 1, 1, 2, 3)) == by_levels


def test_trees_are_as_large_as_is_verified_of_them(head: Loaded) -> None:
    model, vocabulary = head
    shape = Shape(Expansion((1,) * LEVELS), DrawRule.COUPLED, learned=True)
    trees, others = OnePassTrees("head", model, shape, vocabulary), chain(30, "lookup")
    entry = plans.entry([3, 7], params=SamplingParams(temperature=0))
    for times, drawn, chosen, nodes in (
        (0, [], [], 32),
        (1, [chain(32)], [chain(11)], 32),
        (1, [others], [single_node(1)], 32),  # no guess of this draft
        (1, [chain(32), others], [chain(10), others], 16),
        (3, [chain(16)], [single_node(1)], 8),
        (1, [chain(8), chain(8)], [chain(3), chain(8)], 16),
        (3, [chain(16)], [chain(16)], 32),
    ):
        for _ in range(times):
            trees.see_choices(drawn, chosen)
        assert grown(trees, model, entry).num_nodes - 1 == nodes, (times, drawn, chosen)


TOKENS = np.array([[10, 11, 12], [20, 21, 22], [30, 31, 32]])


def levels(seed: int, *, rest: float = 0.5) -> list[Level]:
    """Three levels of three candidates, each with logits of its own behind each token before."""
    random = np.random.default_rng(seed)
    made = []
    for number in range(3):
        before = 1 if number == 0 else 3
        made.append(Level(TOKENS[number], random.normal(size=(before, 3)), rest))
    return made


def all_paths(made: list[Level]) -> dict[tuple[int, ...], float]:
    """How likely each path is, by its tokens."""
    found: dict[tuple[int, ...], float] = {}
    for depth in (1, 2, 3):
        for places in product(range(3), repeat=depth):
            likely, before = 1.0, 0
            for level, place in zip(made, places, strict=False):
                weights = np.exp(level.logits_AC[before])
                likely *= weights[place] / (weights.sum() + level.rest)
                before = place
            found[tuple(int(TOKENS[d, p]) for d, p in enumerate(places))] = float(likely)
    return found


def grown_best(made: list[Level], most: int, race: Race | None = None, room: int = 1 << 30) -> TreeBuilder:
    builder = TreeBuilder(5, room)
    grow(builder, made, most, "head", race)
    return builder


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("most", [1, 2, 5, 9])
def test_the_nodes_are_the_likeliest_paths_of_all(seed: int, most: int) -> None:
    made = levels(seed)
    tree = grown_best(made, most).build()
    tree.check_integrity()
    expected = sorted(all_paths(made).items(), key=lambda item: -item[1])[:most]
    assert {tree.path_tokens(node) for node in range(1, tree.num_nodes)} == {path for path, _ in expected}
    likelihoods = tree.likelihoods()
    for node in range(1, tree.num_nodes):
        assert likelihoods[node] == pytest.approx(all_paths(made)[tree.path_tokens(node)])


@pytest.mark.parametrize("seed", range(4))
def test_children_of_a_race_come_as_the_noise_has_them(seed: int) -> None:
    made = levels(seed)
    tree = grown_best(made, 100, Race(seed=3, position=7)).build()
    assert {draw.rule for draw in tree.draws} == {DrawRule.COUPLED}
    assert tree.num_nodes > 8
    for node, children in enumerate(tree.children()):
        path = tree.path_tokens(node)
        if not children:
            continue
        level = made[len(path)]
        before = 0 if not path else int(np.flatnonzero(TOKENS[len(path) - 1] == path[-1])[0])
        noise = exponentials(3, 7 + len(path), level.tokens_C)
        order = np.argsort(noise / np.exp(level.logits_AC[before]))
        assert list(children) == level.tokens_C[order][: len(children)].tolist()
