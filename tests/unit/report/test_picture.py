"""What pictures need, and where they go."""

from __future__ import annotations

from pathlib import Path

import pytest

from specinfer.errors import ConfigError
from specinfer.report import picture


def test_what_a_picture_needs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--plot is 'a\.gif'; allowed: a file that ends in \.png"):
        picture.check_plot(Path("a.gif"))
    monkeypatch.setattr(picture, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"needs matplotlib; install it with: pip install 'specinfer\[plot\]'"
    ):
        picture.check_plot(Path("a.png"))


def test_a_picture_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*: No such file or directory"):
        picture.save(picture.new_figure(1, 1), tmp_path / "none" / "a.png")
