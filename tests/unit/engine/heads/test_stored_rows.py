"""A restarted engine's drafts find the rows that they had read of a prompt, and guess what they guessed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from specinfer.config import EngineConfig
from specinfer.engine.models import Models
from specinfer.engine.steps import TreeEvent
from specinfer.heads.checkpoint import AnyHeadModel
from specinfer.llm import LLM
from specinfer.plan import PlanEntry
from specinfer.speculate.drafts.draft import CachedText, CachedTexts
from tests.engines import ENGINE, Tiny
from tests.unit.engine.heads.head_engines import shaped

PROMPT = [(7 * i) % 61 for i in range(50)]  # 12 blocks of 4, and 2 tokens


def test_drafts_begin_behind_stored_rows(
    tiny: Tiny, heads: dict[str, AnyHeadModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[tuple[int, int]] = []
    miss = CachedTexts._miss

    def start(texts: CachedTexts, entry: PlanEntry, limit: int) -> CachedText:
        text = found(texts, entry, limit)
        starts.append((text.origin, text.cached))
        return text

    def missed(texts: CachedTexts, text: CachedText, first: int) -> None:
        miss(texts, text, first)
        starts.append((text.origin, text.cached))

    found = CachedTexts._start
    monkeypatch.setattr(CachedTexts, "_start", start)
    monkeypatch.setattr(CachedTexts, "_miss", missed)

    def run(store: Path, name: str, times: int = 1) -> tuple[Sequence[int], list[object]]:
        """Answer in a new engine; returns the last text and its guesses."""
        draft = tiny.similar if name == "model" else heads[name]
        options = {**ENGINE, "block_size": 4, "prompt_store": store, "drafts": (name,)}
        config = EngineConfig.from_options("tiny", options)
        models = Models(tiny.target, tiny.tokenizer, {"draft": draft}, origin={"model": "tiny"})
        with LLM.from_models(config, models) as llm:
            for _ in range(times):
                starts.clear()
                events: list[TreeEvent] = []
                llm.on_tree = events.append
                (output,) = llm.generate([PROMPT], shaped(10))
        trees = [event.tree for event in events]
        return output.token_ids, [
            (tree.token_ids, tree.parents, [draw.confidence for draw in tree.draws]) for tree in trees
        ]

    for name in ("model", *heads):
        expected = run(tmp_path / name, name, times=2)
        kept = [*starts]
        assert kept == [(0, 48)], name
        assert run(tmp_path / name, name) == expected, name
        assert starts == kept, name
        for path in (tmp_path / name).glob("*/*.*"):
            path.write_bytes(path.read_bytes()[:-1])  # damaged
        assert run(tmp_path / name, name)[0] == expected[0], name
        assert starts[-1] == ((0, 0) if name == "model" else (48, 48)), name
