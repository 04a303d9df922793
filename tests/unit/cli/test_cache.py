"""`specinfer cache`: the list has every kind and model, and clearing removes what was named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.conftest import Run


def test_the_cache_is_listed_and_cleared(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path))
    status, out, _ = run("cache")
    assert (status, out.splitlines()[0]) == (0, str(tmp_path))
    for name, size in {
        "prepared/m-int4.safetensors": 2000,
        "prepared/m-int4.safetensors.lock": 0,
        "models/tiny/m.gguf": 3000,
        "models/other/n.gguf": 1000,
        "kernels/a.so": 500,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    status, out, _ = run("cache", "list")
    lines = [" ".join(line.split()) for line in out.splitlines()[1:]]
    assert lines[:5] == [
        "2.0 kB prepared weights in int8 and int4, and for streaming",
        "2.0 kB m-int4.safetensors",
        "4.0 kB models downloads",
        "1.0 kB other",
        "3.0 kB tiny",
    ]
    status, out, _ = run("cache", "clear", "tiny")
    assert (status, out) == (0, f"removed {tmp_path / 'models' / 'tiny'} (3.0 kB)\n")
    assert run("cache", "clear", "kernels")[0] == 0
    assert not (tmp_path / "kernels").exists()
    assert (tmp_path / "models" / "other" / "n.gguf").exists()
    for words, wrong in (
        (["clear", "tiny"], "the cache has no 'tiny'"),
        (["list", "x"], "list takes no name"),
    ):
        status, _, err = run("cache", *words)
        assert status == 2, words
        assert wrong in err, words
    assert run("cache", "clear")[0] == 0
    assert [*tmp_path.iterdir()] == []
