from __future__ import annotations

from specinfer.speculate.lookups.matches import match_confidence


def test_longer_matches_are_surer() -> None:
    assert [match_confidence(n) for n in (0, 1, 2, 3)] == [0, 0.5, 0.75, 0.875]
    assert match_confidence(16) == match_confidence(99) < 1
