"""Whether the ids of two models can be exchanged, whatever they are kept in."""

from pathlib import Path

import pytest

from specinfer.hub import ModelFiles
from specinfer.hub.gguf_header import GgufHeader
from specinfer.tokenizer import vocabulary
from specinfer.tokenizer.gguf_vocabulary import read_vocabulary as load
from specinfer.tokenizer.vocabulary import Vocabulary

from .made_up import byte_level_header, header, write_folder


def of_header(made_up: GgufHeader) -> Vocabulary:
    return Vocabulary(ModelFiles("m", made_up.path, (), made_up))


def of_folder(folder: Path) -> Vocabulary:
    return Vocabulary(ModelFiles("m", folder, ()))


TOKENS = byte_level_header().metadata["tokenizer.ggml.tokens"]
PAD = len(TOKENS) - 1


def test_vocabularies_are_compared_by_the_token_of_each_id() -> None:
    one = of_header(byte_level_header())
    for tokens, same in (
        (TOKENS, True),
        (TOKENS[:PAD], True),  # without its padding
        ([*TOKENS[:PAD], f"[PAD{PAD + 1}]"], False),  # a token that only looks like padding
        ([TOKENS[1], TOKENS[0], *TOKENS[2:]], False),
        ([*TOKENS, "more"], False),
        (TOKENS[: PAD - 1], False),
        ([*TOKENS, TOKENS[5]], True),  # the second of two equal tokens means nothing
        ([token.replace("<tool>", "\u2581<tool>") for token in TOKENS], False),
    ):
        other = of_header(byte_level_header(tokens=tokens))
        assert (one.same_ids(other), other.same_ids(one)) == (same, same), tokens[-3:]


def test_a_folder_and_a_gguf_file_of_the_same_vocabulary_agree(tmp_path: Path) -> None:
    one, other = (of_header(header(tokens=["a", spelled])) for spelled in (" b", "\u2581b"))
    assert one.same_ids(other), "a space may be spelled either way"
    made_up = byte_level_header(words=["hello"])
    backend = load(made_up).backend
    folder = of_folder(write_folder(tmp_path, backend=backend))
    assert folder.size == of_header(made_up).size == backend.get_vocab_size(with_added_tokens=True)
    assert folder.same_ids(of_header(made_up))
    assert of_header(made_up).same_ids(folder)
    assert not folder.same_ids(of_header(byte_level_header(words=["hallo"])))


def test_configured_tokens_count(tmp_path: Path) -> None:
    found = []
    for name, pad in (("one", "<pad>"), ("two", "<pad>"), ("three", "<other>")):
        (tmp_path / name).mkdir()
        found.append(of_folder(write_folder(tmp_path / name, tokenizer_config={"pad_token": pad})))
    assert [found[0].same_ids(other) for other in found[1:]] == [True, False]


def test_equal_files_are_known_before_building(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / name for name in ("one", "two", "other")]
    for folder in folders:
        folder.mkdir()
        write_folder(folder)
    text = (folders[2] / "tokenizer.json").read_text()
    (folders[2] / "tokenizer.json").write_text(text.replace('"</s>"', '"<e>"'))
    built: list[Path] = []
    read = vocabulary.read_folder
    monkeypatch.setattr(vocabulary, "read_folder", lambda folder: built.append(folder) or read(folder))
    one, two, other = map(of_folder, folders)
    assert one.same_ids(two)
    assert built == []
    assert not one.same_ids(other)
    assert built == [folders[0], folders[2]]
