"""A tokenizer that was written encodes and chats as the one it was made of."""

from pathlib import Path

import pytest

from specinfer.hub.model_files import ModelFiles
from specinfer.tokenizer import ChatEncoder, Tokenizer
from specinfer.tokenizer.gguf_vocabulary import write_tokenizer
from specinfer.tokenizer.vocabulary import Vocabulary

from .made_up import byte_level_header, sentencepiece_header, write_folder

TEXTS = ("hello world", "a<tool><|im_end|>", "na\u00efve \u65e5\u672c\r\n\t", "</s> x  y")
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ eos_token }}"
HEADERS = {
    "bytes": byte_level_header(words=["hello", " wor"], eos_token_id=264, chat_template=CHAT),
    "pieces": sentencepiece_header(["h", "e", "he", "\u2581he"], chat_template=CHAT),
}


def of_header(header):
    return ModelFiles("made-up", header.path, (), header)


@pytest.mark.parametrize("kind", HEADERS)
def test_export_of_a_gguf_file(kind, tmp_path):
    source = of_header(HEADERS[kind])
    write_tokenizer(source, tmp_path)
    ours, theirs = Tokenizer.load(source), Tokenizer.load(tmp_path)
    for text in TEXTS:
        assert theirs.encode(text) == ours.encode(text)
        assert theirs.decode(theirs.encode(text)) == ours.decode(ours.encode(text))
    messages = [{"role": "user", "content": "hi"}]
    assert ChatEncoder(theirs).render(messages).text == ChatEncoder(ours).render(messages).text
    assert ChatEncoder(theirs).render(messages).text.startswith("hi<")
    assert theirs.bos_token_id == ours.bos_token_id
    assert Vocabulary(source).same_ids(Vocabulary(ModelFiles("written", tmp_path, ())))


def test_the_files_of_a_folder_are_copied(tmp_path):
    source, folder = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    folder.mkdir()
    write_folder(source, tokenizer_config={"eos_token": "</s>"})
    (source / "chat_template.jinja").write_text(CHAT)
    (source / "model.bin").write_bytes(b"no tokenizer")
    write_tokenizer(ModelFiles("source", source, ()), folder)
    copied = sorted(file.name for file in folder.iterdir())
    assert copied == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    assert Tokenizer.load(folder).encode("hi</s>") == Tokenizer.load(source).encode("hi</s>")
    assert Path(folder / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
