"""Headers of GGUF files, and models in several files: parts that are named, missing or foreign."""

import os
from functools import partialmethod
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from specinfer import LLM
from specinfer.errors import ModelFileError, ModelNotFoundError
from specinfer.hub import gguf_header
from specinfer.hub.gguf_header import check_complete, first_parts, part_files, part_names, read_header
from specinfer.hub.model_files import hash_of
from specinfer.hub.resolution import resolve
from specinfer.models.open_model import open_model
from specinfer.models.prepared import identity
from specinfer.tokenizer import Tokenizer
from tests.tiny_gguf import write_tiny_gguf


def write_gguf(path):
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(3)
    writer.add_float32("made.up", 0.5)
    writer.add_token_list(["a", "b\u00e9", ""])
    writer.add_token_scores([0.0, -1.0, -2.0])
    writer.add_add_bos_token(True)
    writer.add_tensor("w", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("q", np.zeros((2, 34), dtype=np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_tensor_table_are_read(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    header = read_header(path)
    expected = {"general.architecture": "llama", "llama.block_count": 3, "made.up": 0.5}
    expected |= {"tokenizer.ggml.tokens": ["a", "b\u00e9", ""], "tokenizer.ggml.scores": [0.0, -1.0, -2.0]}
    assert {name: header.metadata[name] for name in expected} == expected
    assert header.metadata["tokenizer.ggml.add_bos_token"] is True
    assert [(t.name, t.shape) for t in header.tensors] == [("w", (4, 3)), ("q", (32, 2))]
    data = path.read_bytes()[header.data_offset + header.tensors[0].offset :]
    assert np.frombuffer(data[:48], np.float32).tolist() == list(range(12))
    check_complete(header)


def test_a_file_without_its_last_byte_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    header = read_header(path)
    last = max(header.tensors, key=lambda t: t.offset)
    assert last.name == "q"
    path.write_bytes(path.read_bytes()[: header.data_offset + last.offset + 2 * 34 - 1])
    with pytest.raises(ModelFileError, match="cut short"):
        check_complete(read_header(path))


def test_a_header_cut_anywhere_is_refused_in_one_line(tmp_path):
    whole = write_gguf(tmp_path / "m.gguf")
    header_bytes = whole.read_bytes()[: read_header(whole).data_offset]
    cut = tmp_path / "cut.gguf"
    table_end = header_bytes.rstrip(b"\0")
    for length in range(4, len(table_end) - 8):
        cut.write_bytes(header_bytes[:length])
        with pytest.raises(ModelFileError, match="cut short") as caught:
            read_header(cut)
        assert "\n" not in str(caught.value)


def test_another_format_another_version_and_an_absurd_count_are_refused(tmp_path):
    path, count = tmp_path / "m.gguf", (2**62).to_bytes(8, "little")
    for content, message in {
        b"": "cut short",
        b"GG": "cut short",
        b"GGUF\3\0\0\0": "cut short",
        b"PK\3\4" + bytes(40): "does not begin with 'GGUF'",
        b"GGUF" + (1).to_bytes(4, "little") + bytes(40): "version 1",
        b"GGUF" + (3).to_bytes(4, "big") + bytes(40): "little-endian",
        b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + count + bytes(100): "cut short or damaged",
    }.items():
        path.write_bytes(content)
        with pytest.raises(ModelFileError, match=message):
            read_header(path)


NAMES = [f"m-0000{number}-of-00004.gguf" for number in range(1, 5)]


@pytest.fixture
def split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny model in four parts, and the same whole beside that folder."""
    write_tiny_gguf(tmp_path / "whole.gguf")
    in_parts = partialmethod(gguf.GGUFWriter.__init__, split_max_tensors=3)
    (tmp_path / "parts").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(gguf.GGUFWriter, "__init__", in_parts)
        write_tiny_gguf(tmp_path / "parts" / "m.gguf")
    assert sorted(os.listdir(tmp_path / "parts")) == NAMES
    return tmp_path / "parts"


def assert_refused(path: Path, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        resolve(str(path))


def test_names_of_parts() -> None:
    assert part_names("a/m-00002-of-00003.gguf") == [f"a/m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for other in ("", "-00004-of-00003", "-00000-of-00003", "-1-of-3"):
        assert part_names(f"m{other}.gguf") == [f"m{other}.gguf"]
    assert part_names("m-00001-of-00003") == ["m-00001-of-00003"]
    assert first_parts([*NAMES[1:], "b.gguf"]) == ["b.gguf", NAMES[0]]


@pytest.mark.parametrize("name", [*NAMES, ""])
def test_any_part_or_their_folder_names_the_whole_model(name: str, split: Path) -> None:
    whole, files = open_model(split.parent / "whole.gguf"), resolve(str(split / name))
    assert files.path == split / NAMES[0]
    assert hash_of(split / name) == hash_of(files.path)
    assert files.weights == tuple(split / part for part in NAMES)
    parts = open_model(files)
    assert parts.config == whole.config
    assert parts.shapes == whole.shapes
    for tensor, shape in whole.shapes.items():
        assert torch.equal(parts.read_rows(tensor, 0, shape[0]), whole.read_rows(tensor, 0, shape[0]))
    text = "the same"
    assert Tokenizer.load(files).encode(text) == Tokenizer.load(split.parent / "whole.gguf").encode(text)
    assert Tokenizer.load(split / (name or NAMES[2])).encode(text) == Tokenizer.load(files).encode(text)


def test_a_missing_part_is_named(split: Path) -> None:
    (split / NAMES[2]).unlink()
    for name in (*NAMES[:2], NAMES[3], ""):
        assert_refused(split / name, f"one of 4 parts of a model, but {NAMES[2]} is missing;")
    (split / NAMES[1]).unlink()
    assert_refused(split / NAMES[0], f"but {NAMES[1]} and 1 more are missing; fetch them")


def test_renamed_parts_and_another_order_are_recognized(split: Path) -> None:
    second = (split / NAMES[1]).rename(split / "second.gguf")
    assert_refused(second, r"second\.gguf is one of 4 parts of a model, but its name has another form")
    (split / NAMES[2]).rename(split / NAMES[1])
    second.rename(split / NAMES[2])
    assert_refused(split / NAMES[0], rf"{NAMES[1]} has split\.no 2 and split\.count 4, expected 1 and 4")


def test_a_part_that_is_cut_short_is_named(split: Path) -> None:
    path = split / NAMES[1]
    path.write_bytes(path.read_bytes()[:-64])
    assert_refused(split / NAMES[0], f"{NAMES[1]} is cut short")


def test_a_folder_of_several_models_names_each_once(split: Path) -> None:
    (split.parent / "whole.gguf").rename(split / "whole.gguf")
    with pytest.raises(ModelNotFoundError, match=rf"choose one of \S+{NAMES[0]}, \S+whole\.gguf$"):
        resolve(str(split))


def test_quantized_matrices_are_kept_of_all_parts(split: Path) -> None:
    before = identity(split / NAMES[0], "int8", torch.float32)
    os.utime(split / NAMES[2], (1, 1))
    assert identity(split / NAMES[0], "int8", torch.float32) != before
    assert part_files(split / NAMES[0]) == [split / name for name in NAMES]


def test_a_start_parses_the_header_of_each_part_once(split: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    plain = gguf_header.read_header
    monkeypatch.setattr(gguf_header, "read_header", lambda path: parsed.append(path.name) or plain(path))
    LLM(str(split), kv_cache_memory=1 << 20, max_context=64).close()
    assert sorted(parsed) == NAMES
