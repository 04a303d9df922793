"""The model that speculators of text alone guess for."""

from __future__ import annotations

from tests.engines import tiny_of

tiny = tiny_of(vocab_size=16, max_context=64)
