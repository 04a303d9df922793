"""A kind of head that is added as docs/heads.md says: a config, module and model, and two rows of tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from specinfer import SamplingParams
from specinfer.heads import kinds
from specinfer.heads.checkpoint import is_head, load_head, open_head
from specinfer.heads.kinds import FolderReader, HeadKind
from specinfer.heads.runner import HeadModel, HeadPass
from specinfer.models.open_model import open_model
from specinfer.runtime.features import TappedRows, TextFeatures, joined
from specinfer.speculate.drafts import head_drafts
from specinfer.speculate.drafts.one_pass import OnePassDraft
from tests.engines import Tiny, assert_idle, slow_generate
from tests.heads import SIZE, VOCAB
from tests.unit.engine.heads.head_engines import PROMPTS, SAMPLED, engine


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearConfig:
    """One product with the target's last hidden state guesses the token behind the next one."""

    kind: ClassVar[str] = "linear"
    output: ClassVar[str] = "lm_head"
    taps: tuple[int, ...]
    target_hidden_size: int
    vocab_size: int
    depth: int = 1
    own_head: bool = True
    own_embedding: bool = True
    body: None = None

    @property
    def draft_vocab_size(self) -> int:
        return self.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.target_hidden_size


class LinearHead(nn.Module):
    """The module, whose tensors are the checkpoint's."""

    def __init__(self, config: LinearConfig, ids: Sequence[int]) -> None:
        super().__init__()
        self.config = config
        self.lm_head = nn.Linear(config.hidden_size, len(ids), bias=False)


class LinearModel(HeadModel[Any, TappedRows]):
    """The engine's."""

    def __init__(self, head: LinearConfig, weights: Any, target: Any, ids: Sequence[int]) -> None:
        super().__init__(head, weights, target, ids)
        self._head = weights.linear("lm_head")

    def guess(self, texts: Sequence[TappedRows], cache: object) -> HeadPass:
        read_RD = joined(texts)[:, 0]
        return HeadPass([None] * len(texts), read_RD, self._head(read_RD))

    def probe(self, rows: int, block_size: int) -> list[TappedRows]:
        return self.zero_states(1) * rows


class LinearDraft(OnePassDraft):
    """Its speculator: the last hidden state of each text is all it keeps."""

    def __init__(self, *args: Any, **limits: Any) -> None:
        super().__init__(*args, **limits)
        self._last: dict[str, tuple[int, TappedRows]] = {}

    def receive_states(self, texts: Sequence[TextFeatures]) -> None:
        for text in texts:
            count = len(text.states)
            last = text.states.part(count - 1, count).compact()
            self._last[text.entry.request.request_id] = text.end, last

    def _text(self, entry: int, most: int) -> tuple[TappedRows, int, int] | None:
        planned = self._growths[entry].entry
        end, state = self._last.get(planned.request.request_id, (0, None))
        grows = planned.has_tree and self._growths[entry].limit > 0 and end == planned.end - 1
        return (state, 0, 1) if grows and state is not None else None


def described(c: Mapping[str, object], layers: int, shapes: Mapping[str, tuple[int, ...]]) -> LinearConfig:
    vocab, size = shapes["lm_head.weight"]
    return LinearConfig(taps=(layers,), target_hidden_size=size, vocab_size=vocab)


READER = FolderReader(
    reads=lambda c: c.get("model_type") == "linear",
    tensor_name=lambda c, name: name,
    config=cast(Any, described),
    tokens=lambda path, config, entries: (range(config.vocab_size), entries),
)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(kinds.KINDS, "linear", HeadKind(READER, cast(Any, LinearHead), LinearModel))  # type: ignore[attr-defined]
    monkeypatch.setitem(head_drafts.HEAD_DRAFTS, "linear", LinearDraft.of)  # type: ignore[attr-defined]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "linear"}))
    weight: Tensor = torch.randn(VOCAB, SIZE, generator=torch.Generator().manual_seed(3))
    save_file({"lm_head.weight": weight}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("sampling", [{"temperature": 0}, SAMPLED], ids=str)
def test_two_rows_of_tables_make_an_engine_guess_with_it(
    folder: Path, tiny: Tiny, written: Path, sampling: dict[str, Any]
) -> None:
    target, params = open_model(folder / "target"), SamplingParams(max_tokens=16, **sampling)
    assert is_head(written)
    head = open_head(written, target)
    assert head.shapes == {"lm_head.weight": (VOCAB, SIZE)}
    with engine(tiny, load_head(head, target, tiny.target)) as llm:
        outputs = llm.generate(PROMPTS, params)
        assert_idle(llm)
    assert [list(one.token_ids) for one in outputs] == [
        slow_generate(tiny.target, prompt, params) for prompt in PROMPTS
    ]
    assert sum(output.figures.proposed_by.get("draft", 0) for output in outputs) > 0
