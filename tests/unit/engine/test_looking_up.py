"""Who looks guesses up in an engine: its native kernels where it has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM, SamplingParams
from specinfer.speculate.lookups.native_lookups import NativeLookups
from specinfer.speculate.lookups.plain_lookups import PlainLookups
from tests.engines import ENGINE
from tests.kernels import library_or_skip
from tests.tiny_models import write_pair


@pytest.mark.parametrize(("name", "by"), [("native", NativeLookups), ("torch", PlainLookups)])
def test_guesses_are_looked_up_by_the_kernels_there_are(
    name: str, by: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "native":
        library_or_skip()
    asked = set[tuple[type[Any], str]]()

    def noting(ask: Callable[..., Any]) -> Callable[..., Any]:
        def noted(self: Any, *args: Any, **options: Any) -> Any:
            asked.add((type(self), ask.__name__))
            return ask(self, *args, **options)

        return noted

    questions = ("suffix_trees", "ngram_trees")
    for lookups in (NativeLookups, PlainLookups):
        for question in questions:
            monkeypatch.setattr(lookups, question, noting(getattr(lookups, question)))
    model, options = str(write_pair(tmp_path) / "target"), {**ENGINE, "kernels": name, "ngram": True}
    with LLM(model, suffix=True, **options) as llm:
        [output] = llm.generate(["(1,2)(1,2)"], SamplingParams(temperature=0, max_tokens=20))
    assert asked == {(by, question) for question in questions}
    assert output.figures.drafted_tokens > 0
