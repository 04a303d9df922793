"""The table of known drafts, what of it is found on a machine, and the heads that come with the package."""

import json
import re
from pathlib import Path

import pytest
from huggingface_hub import constants

from specinfer.heads.checkpoint import is_head
from specinfer.hub import CATALOGUE, resolve
from specinfer.hub.catalogue import SHIPPED_HEADS
from specinfer.hub.known_drafts import BESIDE, ModelShape, drafts_for, known_drafts, local_drafts
from specinfer.hub.model_files import ModelFiles
from specinfer.hub.resolution import parse_hub_name
from tests.drafts_table import write_known_pair
from tests.tiny_gguf import write_tiny_gguf


def described(folder: Path, kind: str, hidden: int, layers: int, vocab: int) -> ModelFiles:
    """A folder that has a config.json of these sizes, and weights that are not read."""
    folder.mkdir()
    sizes = {"model_type": kind, "hidden_size": hidden, "num_hidden_layers": layers, "vocab_size": vocab}
    (folder / "config.json").write_text(json.dumps(sizes))
    (folder / "model.safetensors").write_bytes(bytes(100))
    return ModelFiles(str(folder), folder, (folder / "model.safetensors",))


def test_rows_name_drafts_that_can_be_fetched_and_fit() -> None:
    rows = known_drafts()
    assert len({(row.target, row.draft) for row in rows}) == len(rows) >= 40
    for row in rows:
        known = row.draft in CATALOGUE or row.draft in SHIPPED_HEADS
        assert known or parse_hub_name(row.draft) is not None, row
        assert not row.gguf or row.gguf in CATALOGUE or parse_hub_name(row.gguf) is not None, row
        assert (row.form == "model") == (row.draft_shape is not None), row
        if (draft := row.draft_shape) is not None:
            assert draft.layers * draft.hidden**2 < row.shape.layers * row.shape.hidden**2, row
            assert abs(draft.vocabulary - row.shape.vocabulary) < 512, row
        assert row.bytes >= 0, row


def test_models_of_equal_sizes_are_told_apart_by_their_names(tmp_path: Path) -> None:
    for name, first in {
        "Qwen2.5-Coder-7B-Instruct": "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        "Qwen2.5-7B-Instruct": "Qwen/Qwen2.5-0.5B-Instruct",
        "my-own-tune": "Qwen/Qwen2.5-0.5B-Instruct",
    }.items():
        found = drafts_for(described(tmp_path / name, "qwen2", 3584, 28, 152064))
        assert (found[0].draft, len(found)) == (first, 2), name
    for sizes in (("qwen2", 3584, 27, 152064), ("qwen3", 3584, 28, 152064), ("qwen2", 3584, 28, 100000)):
        assert drafts_for(described(tmp_path / str(sizes), *sizes)) == [], sizes
    one, padded = (ModelShape("gemma3", 2560, 34, size) for size in (262144, 262208))
    assert one.matches(padded), "tables are padded"


def test_shapes_are_read_from_headers_and_nothing_else_is_a_model(tmp_path: Path) -> None:
    assert ModelShape.of(write_tiny_gguf(tmp_path / "a.gguf")) == ModelShape("llama", 32, 1, 97)
    (tmp_path / "b.gguf").write_bytes(b"GGUF and no more")
    (tmp_path / "config.json").write_text("[]")
    for path in (tmp_path / "b.gguf", tmp_path, tmp_path / "none"):
        assert ModelShape.of(path) is None, path
    text = {"model_type": "gemma3_text", "hidden_size": 640, "num_hidden_layers": 18, "vocab_size": 262144}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert ModelShape.of(tmp_path) == ModelShape("gemma3", 640, 18, 262144)
    del text["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert ModelShape.of(tmp_path) == ModelShape("gemma3", 640, 18, 262208), "the default"


def test_kinds_of_files_of_both_forms_match(tmp_path: Path) -> None:
    folder = described(tmp_path / "Qwen3-30B-A3B-Instruct-2507", "qwen3_moe", 2048, 48, 151936)
    kinds = {"qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "gemma3_text": "gemma3"}
    for of_folder, of_gguf in kinds.items():
        assert ModelShape.parse(f"{of_folder} 1 2 3") == ModelShape.parse(f"{of_gguf} 1 2 3"), of_gguf
    assert len(drafts_for(folder)) == 3


def test_a_draft_is_found_beside_it_and_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    target, draft = write_known_pair(tmp_path / "models", monkeypatch)
    [found] = local_drafts(resolve(str(target)))
    assert (found.path, found.where, found.name) == (draft, BESIDE, "Tiny-1L")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "Tiny-4L").symlink_to(target)
    assert local_drafts(resolve(str(tmp_path / "links" / "Tiny-4L"))) == [], "beside the name, not the file"
    cached = tmp_path / "hub" / "models--nobody--Tiny-1L"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots").mkdir()
    draft.rename(cached / "snapshots" / "abc")
    [found] = local_drafts(resolve(str(target)))
    assert (found.path, found.name) == (cached / "snapshots" / "abc", "nobody/Tiny-1L")
    (cached / "snapshots" / "abc" / "model.safetensors").unlink()
    assert local_drafts(resolve(str(target))) == [], "a part of a model is none"


def test_the_smaller_draft_is_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = write_known_pair(tmp_path, monkeypatch)
    again = draft.parent / "Tiny-1L-large"
    again.mkdir()
    for file in draft.iterdir():
        (again / file.name).write_bytes(file.read_bytes() + b" " * 64)
    assert [one.path for one in local_drafts(resolve(str(target)))] == [draft, again]
    (again / "other.safetensors").write_bytes(bytes(1 << 20))
    assert [one.path for one in local_drafts(resolve(str(target)))] == [draft]


@pytest.mark.parametrize("name", SHIPPED_HEADS)
def test_a_shipped_head_is_in_the_package(name: str) -> None:
    found = resolve(name)
    assert found.name == name
    assert is_head(found.path)
    assert sum(file.stat().st_size for file in found.path.iterdir()) <= 12 << 20
    described = json.loads((found.path / "config.json").read_text())
    verifier = described["speculators_config"]["verifier"]["name_or_path"]
    assert verifier == SHIPPED_HEADS[name]
    assert verifier in CATALOGUE
    assert re.fullmatch(r"[0-9a-f]{64}", described["target_fingerprint"])
    card = (found.path / "README.md").read_text()
    for part in ("## Licence", "Apache-2.0", "CC BY-SA 3.0", "MIT", CATALOGUE[verifier].file):
        assert part in card
