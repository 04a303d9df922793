"""`specinfer drafts`, and `pull --with-draft`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specinfer.engine.drafts import FoundModel
from specinfer.engine.loader import Loader
from specinfer.models.language_model import LanguageModel
from tests.drafts_table import TABLE, write_known_pair
from tests.mtp import write_target
from tests.unit.cli.conftest import Run


def test_drafts_are_listed_and_tried(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = write_known_pair(tmp_path, monkeypatch)
    status, out, _ = run("drafts", target)
    assert (status, len(out.splitlines())) == (0, 2)
    assert out.splitlines()[1].split()[:2] == ["nobody/Tiny-1L", "model"]
    assert f"--draft {draft}  not measured" in out
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1 2 3"}\n{"turns": ["4", "5"]}\n')
    reads, read = list[str](), Loader.target

    def counted(loader: Loader, found: FoundModel, *given: Any, **how: Any) -> LanguageModel:
        reads.append(found.files.name)
        return read(loader, found, *given, **how)

    monkeypatch.setattr(Loader, "target", counted)
    words = ("--try", "--prompts", prompts, "--seconds", "30", "--kv-cache-memory", "8MB")
    status, out, _ = run("drafts", target, *words)
    assert status == 0
    heads, *rows = out.splitlines()
    assert heads.split()[0] == "draft"
    assert sorted(row.split("  ")[0] for row in rows) == ["Tiny-1L", "lookups alone"]
    assert all("3 of 3" in row for row in rows)
    assert any(row.endswith(f"--draft {draft}") for row in rows)
    assert any(row.endswith("--no-draft") for row in rows)
    assert reads == [str(target)], "it is read once for all"
    whole = (draft / "model.safetensors").read_bytes()
    (draft / "model.safetensors").write_bytes(whole[:-100])
    status, out, err = run("drafts", target, *words)
    assert (status, [row.split("  ")[0] for row in out.splitlines()[1:]]) == (0, ["lookups alone"]), err
    assert "Tiny-1L is left out: " in err
    assert "is truncated" in err
    status, _, err = run("drafts", target, "--prompts", prompts)
    assert status == 2
    assert "--prompts is for --try" in err
    draft.rename(tmp_path.parent / f"{tmp_path.name}-away")
    assert "specinfer pull nobody/Tiny-1L" in run("drafts", target)[1]
    monkeypatch.setattr("specinfer.hub.known_drafts.known_drafts", tuple)
    assert "no draft is known for" in run("drafts", target)[1]


def test_a_models_own_head_is_listed_and_tried(run: Run, tmp_path: Path) -> None:
    target, prompts = write_target("mimo", tmp_path / "mimo"), tmp_path / "prompts.jsonl"
    status, out, _ = run("drafts", target)
    assert (status, out.splitlines()[1].split("  ")[0]) == (0, "its own MTP head")
    assert "--draft mtp" in out
    prompts.write_text('{"prompt": "1 2 3"}\n')
    words = ("--try", "--prompts", prompts, "--seconds", "30", "--kv-cache-memory", "8MB")
    status, out, err = run("drafts", target, *words)
    assert status == 0, err
    assert sorted(row.split("  ")[0] for row in out.splitlines()[1:]) == ["its own MTP head", "lookups alone"]


def test_pull_fetches_the_draft_of_the_row(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = write_known_pair(tmp_path, monkeypatch)
    row = replace(TABLE[0], draft=str(draft))
    monkeypatch.setattr("specinfer.hub.known_drafts.drafts_for", lambda _: [row])
    assert run("pull", target, "--with-draft")[:2] == (0, f"{target}\n{draft}\n")
    monkeypatch.setattr("specinfer.hub.known_drafts.drafts_for", lambda _: [])
    status, out, err = run("pull", target, "--with-draft")
    assert (status, out) == (2, f"{target}\n")
    assert "no draft is known for" in err
