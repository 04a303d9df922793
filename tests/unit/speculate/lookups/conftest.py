"""What looks guesses up: native code, and plain Python."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Literal, cast

import pytest

from specinfer.speculate.lookups import ngram, suffix
from specinfer.speculate.lookups.native_lookups import NativeLookups
from specinfer.speculate.lookups.native_text_index import NativeTextIndex
from specinfer.speculate.lookups.plain_text_index import PlainTextIndex
from specinfer.speculate.lookups.text_index import NewIndex
from tests.kernels import library_or_skip

Kind = Literal["plain", "native"]


@pytest.fixture(scope="module", params=("plain", "native"))
def looking_up(request: pytest.FixtureRequest) -> Iterator[Kind]:
    """What looks guesses up for speculators that are given no library."""
    kind = cast(Kind, request.param)
    with pytest.MonkeyPatch.context() as patch:
        if kind == "native":
            for speculator in (suffix, ngram):
                patch.setattr(speculator, "PlainLookups", partial(NativeLookups, library=library_or_skip()))
        yield kind


@pytest.fixture(scope="module", params=("plain", "native"))
def new_index(request: pytest.FixtureRequest) -> NewIndex:
    """What makes indexes of texts."""
    return PlainTextIndex if request.param == "plain" else partial(NativeTextIndex, library_or_skip())
