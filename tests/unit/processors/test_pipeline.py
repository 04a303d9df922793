"""All processors in their order; the laws they make are in tests/exact/test_parameters.py."""

from typing import Any

import numpy as np

from specinfer import SamplingParams
from specinfer.processors.pipeline import Processors

NO = -np.inf
ROW = np.array([4, 2, 0, -2, -4, 1], dtype=np.float32)
PROMPT, END = (1, 4), 5


class Even:
    """A form that allows even tokens after an even number of them, odd ones otherwise."""

    def __init__(self) -> None:
        self.length = 0

    def allowed(self, path: Any) -> Any:
        return np.arange(6) % 2 == (self.length + len(path)) % 2

    def permits(self, path: Any, token: int) -> bool:
        return bool(self.allowed(path)[token])

    def commit(self, tokens: Any) -> None:
        self.length += len(tokens)


def processors(*, form: bool = False, bad_words: Any = (), **params: Any) -> Processors:
    grammar: Any = Even() if form else None
    asked = SamplingParams(**params)
    return Processors(asked, PROMPT, vocab=6, ending=[END], bad_words=bad_words, grammar=grammar)


def test_logits_after_a_path() -> None:
    for asked, path, expected in (
        ({}, (), [4, 2, 0, -2, -4, 1]),
        ({"form": True}, (), [4, NO, 0, NO, -4, NO]),
        ({"form": True}, (0,), [NO, 2, NO, -2, NO, 1]),
        ({"allowed_token_ids": [1, 3]}, (0,), [NO, 2, NO, -2, NO, NO]),
        ({"bad_words": [[0], [2, 3]]}, (1,), [NO, 2, 0, -2, -4, 1]),
        ({"bad_words": [[0], [2, 3]]}, (1, 2), [NO, 2, 0, NO, -4, 1]),
        ({"min_tokens": 2}, (), [4, 2, 0, -2, -4, NO]),
        ({"min_tokens": 2}, (0,), [4, 2, 0, -2, -4, NO]),
        ({"min_tokens": 2}, (0, 0), [4, 2, 0, -2, -4, 1]),
        ({"logit_bias": {0: -100, 4: 8}}, (), [-96, 2, 0, -2, 4, 1]),
        # The bias comes before the penalties: (2 + 2) / 2 of the prompt's 1, (-4 + 8) / 2 of its 4.
        ({"logit_bias": {1: 2, 4: 8}, "repetition_penalty": 2}, (), [4, 2, 0, -2, 2, 1]),
        # A bias brings back nothing that is banned.
        ({"logit_bias": {0: 100}, "allowed_token_ids": [1]}, (), [NO, 2, NO, NO, NO, NO]),
        # Contradictions leave nothing.
        ({"allowed_token_ids": [END], "min_tokens": 1}, (), [NO] * 6),
        ({"form": True, "allowed_token_ids": [1]}, (), [NO] * 6),
    ):
        row = ROW.copy()
        fresh = processors(**asked)
        assert fresh.apply(row, path).tolist() == expected, (asked, path)
        assert row.tolist() == ROW.tolist(), "the model's own row stays as it is"
        changes = fresh.changes(path)
        assert (changes is None) == any(name in asked for name in ("form", "allowed_token_ids")), asked
        if changes is not None:
            changed = row.copy()
            changes.apply(changed)
            assert changed.tolist() == expected, "single logits change as in the whole row"
        assert [fresh.permits(path, token) for token in range(6)] == [x > NO for x in expected], (asked, path)
        moved = processors(**asked)
        for token in path:
            moved.commit([token])
        assert moved.apply(row, ()).tolist() == expected, "a path is what the text would be after it"


def test_what_may_ban_and_what_changes_nothing() -> None:
    for asked, bans, idle in (
        ({}, [], True),
        ({"temperature": 0.5, "top_k": 3}, [], True),
        ({"presence_penalty": 1}, [], False),
        ({"repetition_penalty": 1.1}, [], False),
        ({"logit_bias": {1: 1}}, [], False),
        ({"logit_bias": {}}, [], True),
        ({"allowed_token_ids": [1]}, ["allowed_token_ids"], False),
        ({"bad_words": [[1]]}, ["bad_words"], False),
        ({"min_tokens": 1}, ["min_tokens"], False),
        ({"min_tokens": 1, "bad_words": [[1]]}, ["bad_words", "min_tokens"], False),
    ):
        made = processors(**asked)
        assert (made.bans, made.idle) == (bans, idle), asked
        assert (made.apply(ROW, ()) is ROW) == idle, "an idle row is not even copied"


def test_the_form_is_named_as_the_caller_named_it() -> None:
    assert processors(form=True, choice=["a"]).bans == ["choice"]
    assert processors(form=True, response_format={"type": "json_object"}).bans == ["response_format"]


def test_min_tokens_is_over_when_there_are_enough() -> None:
    made = processors(min_tokens=3)
    made.commit([1, 1])
    assert (made.idle, made.bans, made.permits((), END)) == (False, ["min_tokens"], False)
    made.commit([1])
    assert (made.idle, made.bans, made.permits((), END)) == (True, [], True)
