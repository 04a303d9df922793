import gguf
import numpy as np
import pytest

from specinfer.errors import ModelFileError
from specinfer.hub.gguf_header import check_complete, read_header


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
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["llama.block_count"] == 3
    assert header.metadata["made.up"] == 0.5
    assert header.metadata["tokenizer.ggml.tokens"] == ["a", "b\u00e9", ""]
    assert header.metadata["tokenizer.ggml.scores"] == [0.0, -1.0, -2.0]
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
