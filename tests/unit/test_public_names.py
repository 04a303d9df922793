"""Public names of `import specinfer`, and the cost of the import."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

import specinfer
import specinfer.speculators


def test_the_public_names_are_these() -> None:
    # At most 12 besides the version. Each name is a promise, so add one here with care.
    names = (
        "EngineConfig FinishReason LLM LoRARequest RequestOutput SamplingParams SpecInferError "
        "SpeculationFigures SpeculationParams Speculator TokenTree UserError"
    )
    assert sorted(set(specinfer.__all__) - {"__version__"}) == names.split()


def test_every_public_name_is_on_the_page_of_the_python_api() -> None:
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
    documented = [pkgutil.resolve_name(name) for name in re.findall(r"^::: (\S+)$", page, re.M)]
    for module in (specinfer, specinfer.speculators):
        public = {name: getattr(module, name) for name in module.__all__ if name != "__version__"}
        assert {name for name, value in public.items() if value not in documented} == set(), module.__name__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'specinfer' has no attribute 'Engin'$"):
        specinfer.Engin  # noqa: B018
