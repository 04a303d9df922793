"""A pool in a config's drafts stands for its members; the text is the same with it and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from specinfer.config import EngineConfig
from specinfer.engine.drafts import with_pool_members
from specinfer.hub.model_files import write_pool
from specinfer.llm import LLM
from specinfer.sampling_params import SamplingParams
from tests.tiny_models import write_similar_llama, write_tiny_llama

OPTIONS = {
    "lookup": False,
    "dtype": "float32",
    "kv_cache_memory": 1 << 24,
    "max_context": 64,
    "tree_size": "fixed",
}


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
    assert with_pool_members(plain) is plain


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
