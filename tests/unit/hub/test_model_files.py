"""Facts in the files of a model: recommended sampling parameters, and the members of a pool of drafts."""

import json
from pathlib import Path
from typing import Any

import pytest

from specinfer.errors import ModelFileError
from specinfer.hub.gguf_header import GgufHeader
from specinfer.hub.model_files import ModelFiles, pool_members, sampling_defaults, write_pool

SAMPLING = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1}
QWEN = {"bos_token_id": 151643, "eos_token_id": [151645, 151643], "max_new_tokens": 2048}
QWEN |= {"do_sample": True, **SAMPLING}


def folder(path: Path, config: Any) -> ModelFiles:
    (path / "generation_config.json").write_text(json.dumps(config))
    return ModelFiles("m", path, ())


def gguf(**metadata: Any) -> ModelFiles:
    found = {f"general.sampling.{name}": value for name, value in metadata.items()}
    return ModelFiles("m", Path("m.gguf"), (), GgufHeader(Path("m.gguf"), found, (), 0))


def test_a_folder_says_it_in_its_generation_config(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], dict[str, float]]] = [
        (QWEN, SAMPLING),
        ({"temperature": 0.6}, {"temperature": 0.6}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 20}, {"temperature": 0}),
        ({"do_sample": False, "repetition_penalty": 1.2}, {"temperature": 0, "repetition_penalty": 1.2}),
        ({"do_sample": None, "temperature": None, "min_p": 0.05, "top_k": -1}, {"min_p": 0.05, "top_k": 0}),
        ({"eos_token_id": 2}, {}),
    ]
    for config, found in cases:
        assert sampling_defaults(folder(tmp_path, config)) == found, config


def test_a_gguf_file_says_it_in_its_metadata(tmp_path: Path) -> None:
    made = gguf(temp=0.5, top_k=40, top_p=1.0, min_p=0.0, penalty_repeat=1.0, mirostat=0)
    expected = {"temperature": 0.5, "top_k": 40, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert sampling_defaults(made) == expected
    assert sampling_defaults(gguf()) == {}
    assert sampling_defaults(ModelFiles("m", tmp_path, ())) == {}


def test_invalid_defaults_are_refused_by_name(tmp_path: Path) -> None:
    invalid: dict[str, list[Any]] = {"temperature": ["hot", -1, 1e400, True], "top_k": [1.5, 1 << 70]}
    invalid |= {"top_p": [0], "min_p": [[0.1]], "repetition_penalty": [0]}
    for name, value in ((name, value) for name, values in invalid.items() for value in values):
        message = rf"generation_config.json: {name} is .*; allowed: "
        with pytest.raises(ModelFileError, match=message) as error:
            pytest.fail(f"{name} {value!r} is read as {sampling_defaults(folder(tmp_path, {name: value}))}")
        assert "\n" not in str(error.value)


def test_a_written_pool_is_read(tmp_path: Path) -> None:
    assert pool_members(tmp_path) == pool_members(tmp_path / "missing") == []
    write_pool(tmp_path, ["member2", "member1"])
    for name in ("member1", "member2"):
        (tmp_path / name).mkdir()
    assert pool_members(tmp_path) == [tmp_path / "member2", tmp_path / "member1"]


def test_what_is_no_list_of_folders_beside_it_is_refused(tmp_path: Path) -> None:
    names = ["..", "../other", "/etc", "a/b", "", ".", "a\\b", "~", "a\0b", "x" * 65]
    values = [*([name] for name in names), [], [f"m{n}" for n in range(17)], {"members": ["a"]}, 7, None]
    values += [[3], [["a"]], ["a", "a"], "member1"]
    texts = [*map(json.dumps, values), "", "[", 100_000 * "[", json.dumps(["a"]) + (1 << 16) * " " + "]"]
    for text in texts:
        (tmp_path / "pool.json").write_text(text)
        with pytest.raises(ModelFileError, match=r"is no list of drafts; allowed: 1 to 16 different names"):
            pytest.fail(f"{text[:40]!r} is read as {pool_members(tmp_path)}")


def test_folders_that_are_no_members_are_refused(tmp_path: Path) -> None:
    pool, elsewhere = tmp_path / "pool", tmp_path / "elsewhere"
    pool.mkdir()
    elsewhere.mkdir()
    write_pool(pool, ["member1"])
    with pytest.raises(ModelFileError, match=r"has no folder member1, which its pool\.json names"):
        pool_members(pool)
    for place in (elsewhere, pool):  # the second is a circle
        (pool / "member1").symlink_to(place)
        with pytest.raises(ModelFileError, match="is a link to another place"):
            pool_members(pool)
        (pool / "member1").unlink()
    (pool / "member1").mkdir()
    write_pool(pool / "member1", ["member1"])
    with pytest.raises(ModelFileError, match="is a pool; allowed: members that are heads"):
        pool_members(pool)
