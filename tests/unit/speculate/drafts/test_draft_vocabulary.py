"""Which tokens a pruned draft keeps, and that the text does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specinfer.engine.steps import TreeEvent
from specinfer.errors import ConfigError
from specinfer.llm import LLM
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary, draft_vocabulary
from specinfer.speculate.drafts.draws import Site, draw_children
from specinfer.tokenizer import Tokenizer
from specinfer.tree import DrawRule, TokenTree, TreeBuilder
from specinfer.tree.distribution import Distribution
from tests.flights import flight_of
from tests.tiny_models import write_similar_llama, write_tiny_llama

VOCAB = 96
Said = tuple[list[Any], set[int]]
PROMPTS = [[5, 9, 5, 9, 5], list(range(30))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    home = tmp_path_factory.mktemp("models")
    target = write_tiny_llama(home / "target", vocab_size=VOCAB, tokenizer=True, eos_token_id=90)
    return target, write_similar_llama(target, home / "draft", noise=0.1)


def kept(option: int | str | None, folder: Path) -> list[int] | None:
    vocabulary = draft_vocabulary(option, Tokenizer.load(folder), VOCAB)
    return None if vocabulary is None else vocabulary.ids.tolist()


FILES = {
    "JSON": ("[7, 3,\n 3]", [3, 7, 90]),
    "lines": ("7\n3\n\n90\n", [3, 7, 90]),
}
REFUSED = {
    "an id outside": ("[1, 96]", "holds 96"),
    "a negative one": ("-1\n", "holds -1"),
    "no number": ("1\ntwo\n", "holds no ids"),
    "a number with a fraction": ("[1.5]", "holds 1.5"),
    "true": ("[true]", "holds True"),
    "nothing": ("", "holds 'nothing'"),
    "broken JSON": ("[1, 2", "holds no ids"),
}


@pytest.mark.parametrize(("text", "ids"), FILES.values(), ids=FILES)
def test_a_file_names_the_ids(folders: tuple[Path, Path], tmp_path: Path, text: str, ids: list[int]) -> None:
    file = tmp_path / "ids"
    file.write_text(text)
    assert kept(str(file), folders[0]) == ids


@pytest.mark.parametrize(("text", "says"), REFUSED.values(), ids=REFUSED)
def test_a_file_of_something_else_is_refused(
    folders: tuple[Path, Path], tmp_path: Path, text: str, says: str
) -> None:
    file = tmp_path / "ids"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"{says}.*each from 0 to 95"):
        kept(str(file), folders[0])


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("rule", list(DrawRule))
def test_a_pruned_row_draws_what_a_row_without_the_other_tokens_draws(
    rule: DrawRule, temperature: float, processed: bool
) -> None:
    rng = np.random.default_rng(7)
    vocabulary = DraftVocabulary(np.sort(rng.choice(500, 80, replace=False)), 500)

    def add_one_hundredth(row: Any) -> Any:
        assert row.shape == (500,), "processors see the whole vocabulary"
        return row + np.float32(0.01)

    def drawn(row: Any, seed: int, pruned: DraftVocabulary | None) -> TokenTree:
        uniforms = np.random.default_rng(seed)
        builder = TreeBuilder(root=0)
        params = SamplingParams(temperature=temperature, top_p=0.9)
        site = Site(
            builder, 0, 4, params, seed, 3, uniforms.random, rule, add_one_hundredth if processed else None
        )
        draw_children(flight_of(row[None]), [site], "draft", pruned)
        return builder.build()

    for seed in range(20):
        row = np.round(rng.normal(size=80) * 3).astype(np.float32)  # with ties
        ours, theirs = drawn(row, seed, vocabulary), drawn(vocabulary.widened(row), seed, None)
        assert ours.token_ids == theirs.token_ids
        assert set(ours.token_ids[1:]) <= set(vocabulary.ids.tolist())
        for draw, twin in zip(ours.draws, theirs.draws, strict=True):
            assert (draw.law is None) == (twin.law is None)
            if isinstance(draw.law, Distribution) and isinstance(twin.law, Distribution):
                assert draw.law.dense().tolist() == twin.law.dense().tolist()


def generated(folders: tuple[Path, Path], params: SamplingParams, **options: Any) -> Said:
    """The texts of PROMPTS, and every token that was guessed."""
    guessed: set[int] = set()

    def watch(event: TreeEvent) -> None:
        guessed.update(event.tree.token_ids[1:])

    llm = LLM(
        str(folders[0]), lookup=False, dtype="float32", kv_cache_memory=1 << 24, tree_size="fixed", **options
    )
    llm.on_tree = watch
    return [output.token_ids for output in llm.generate(PROMPTS, params)], guessed


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(temperature=0.9, top_p=0.9, seed=4, max_tokens=40),
        SamplingParams(temperature=0.9, seed=4, max_tokens=40, frequency_penalty=0.7, min_tokens=40),
    ],
    ids=["greedy", "sampled", "processed"],
)
def test_the_text_is_the_same_and_only_kept_tokens_are_guessed(
    folders: tuple[Path, Path], params: SamplingParams
) -> None:
    plain, _ = generated(folders, params)
    for tokens in (30, 60):
        texts, guessed = generated(
            folders, params, drafts=(str(folders[1]),), draft_vocabulary=tokens, expansion=(2, 1, 1)
        )
        assert texts == plain
        assert guessed
        assert guessed <= {*range(tokens - 1), 90}
