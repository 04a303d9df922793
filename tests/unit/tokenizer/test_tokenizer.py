import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from specinfer.errors import ModelFileError, RequestError
from specinfer.hub import ModelFiles
from specinfer.tokenizer import ChatEncoder, Tokenizer
from specinfer.tokenizer.gguf_vocabulary import read_vocabulary as load
from specinfer.tokenizer.gguf_vocabulary import write_tokenizer

from .made_up import byte_level_header, write_folder

CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_folder_gives_ids_text_and_names(tmp_path):
    folder = write_folder(tmp_path, tokenizer_config={"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    tokenizer = Tokenizer.load(ModelFiles("m", folder, ()))
    assert tokenizer.encode("hi\u00e9</s>") == [*"hi\u00e9".encode(), 257]
    assert tokenizer.decode([256, *"hi\u00e9".encode(), 257]) == "hi\u00e9"
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (258, 256, {257})
    assert tokenizer.id_to_token(65) == "A"
    assert tokenizer.id_to_token(258) is None
    assert tokenizer.id_to_token(-1) is None
    assert tokenizer.decode([65, 300, 66, 10**9]) == "AB"
    with pytest.raises(RequestError, match="character 1 of the text is half of a surrogate pair"):
        tokenizer.encode("a\ud800")


def test_a_long_text_is_encoded_without_the_lock_of_the_interpreter(tmp_path, monkeypatch):
    tokenizer = Tokenizer.load(write_folder(tmp_path))
    text = "a\u00e9</s> b" * 5000
    want = tokenizer.backend.encode(text).ids
    batched = SimpleNamespace(encode_batch_fast=tokenizer.backend.encode_batch_fast)  # `encode` keeps it
    monkeypatch.setattr(tokenizer, "backend", batched)
    assert tokenizer.encode(text) == want


def test_end_tokens_are_gathered_from_every_config(tmp_path):
    configs = {"config": {"eos_token_id": 1}, "generation_config": {"eos_token_id": [2, 3]}}
    folder = write_folder(tmp_path, **configs, tokenizer_config={"eos_token": "</s>"})
    assert Tokenizer.load(folder).eos_token_ids == {1, 2, 3, 257}
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 9}}')
    assert Tokenizer.load(folder).eos_token_ids == {9, 2, 3, 257}


def test_truncation_and_padding_left_by_training_change_no_prompt(tmp_path):
    backend = tokenizers.Tokenizer.from_file(str(write_folder(tmp_path) / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=16, pad_id=257, pad_token="</s>")
    folder = write_folder(tmp_path, backend=backend)
    assert '"max_length":4' in (folder / "tokenizer.json").read_text().replace(" ", "").replace("\n", "")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("one two three") == list(b"one two three")
    assert tokenizer.encode_behind("four five") == list(b"four five")
    assert tokenizer.encode("") == []


def test_a_text_that_the_tokenizers_own_rules_do_not_end_with_is_refused(tmp_path):
    backend = tokenizers.Tokenizer.from_file(str(write_folder(tmp_path) / "tokenizer.json"))
    words = pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(use_regex=False)])
    tokenizer = Tokenizer.load(write_folder(tmp_path, backend=backend))
    with pytest.raises(RequestError, match="tokenizer cannot encode the text"):
        tokenizer.encode("a" * 40 + "b")


def test_chat_is_rendered_and_encoded_without_a_second_bos(tmp_path):
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML}
    tokenizer = Tokenizer.load(write_folder(tmp_path, tokenizer_config=config))
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.has_chat_template
    assert ChatEncoder(tokenizer).render(messages).text == "<|user|>hi</s><|assistant|>"
    assert ChatEncoder(tokenizer).render(messages, add_generation_prompt=False).text == "<|user|>hi</s>"
    assert ChatEncoder(tokenizer).token_ids(messages) == [*b"<|user|>hi", 257, *b"<|assistant|>"]
    gguf = load(byte_level_header(add_bos_token=True, chat_template="<|bos|>{{ messages[0]['content'] }}"))
    assert ChatEncoder(gguf).token_ids(messages) == [256, *b"hi"]


def test_the_template_is_found_wherever_models_keep_it(tmp_path):
    named = [{"name": "tool_use", "template": "T{{ tools[0].type }}"}, {"name": "default", "template": "D"}]
    folder = write_folder(tmp_path, tokenizer_config={"chat_template": named})
    message = [{"role": "user", "content": "hi"}]

    def render(name=None, **more):
        return ChatEncoder(Tokenizer.load(folder, name)).render(message, **more).text

    assert (render(), render(tools=[{"type": "function"}])) == ("D", "Tfunction")
    (folder / "processor_config.json").write_text('{"chat_template": "P"}')
    assert render() == "P"
    (folder / "chat_template.json").write_text('{"chat_template": "J"}')
    assert render() == "J"
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "rag.jinja").write_text("R{{ documents[0].title }}")
    assert render() == "J"
    (folder / "chat_template.jinja").write_text("F")
    assert render() == "F"
    (more / "tool_use.jinja").write_text("U{{ tools[0].type }}")
    assert render(tools=[{"type": "function"}]) == "Ufunction"
    for name in (None, "rag"):
        assert render(name, variables={"documents": [{"title": "T"}]}) == "RT"
    assert ChatEncoder(Tokenizer.load(folder)).variables == {"documents"}
    written = tmp_path / "written"
    written.mkdir()
    write_tokenizer(ModelFiles("m", folder, ()), written)
    assert Tokenizer.load(written).templates == Tokenizer.load(folder).templates


def test_a_gguf_file_has_a_template_for_tools_too(tmp_path):
    header = byte_level_header(chat_template="D{{ (tools or [{}])[0].type }}")
    message, tools = [{"role": "user", "content": "hi"}], [{"type": "function"}]

    def render(tokenizer, **more):
        return ChatEncoder(tokenizer).render(message, **more).text

    assert render(load(header), tools=tools) == "Dfunction"
    header.metadata["tokenizer.chat_template.rag"] = "R{{ documents | length }}"
    assert render(load(header), variables={"documents": [1]}) == "R1"
    header.metadata["tokenizer.chat_template.tool_use"] = "T{{ tools[0].type }}"
    write_tokenizer(ModelFiles("made-up", header.path, (), header), tmp_path)
    for tokenizer in (load(header), Tokenizer.load(tmp_path)):
        assert (render(tokenizer, tools=tools), render(tokenizer)) == ("Tfunction", "D")


def test_special_tokens_have_ids_and_others_are_text():
    tokenizer = load(byte_level_header(words=["word"]))
    assert tokenizer.special_id("<|im_end|>") == tokenizer.encode("<|im_end|>")[0]
    assert [tokenizer.special_id(name) for name in ("<tool>", "word", "nothing")] == [None] * 3


def test_without_a_template_chat_points_to_generate(tmp_path):
    tokenizer = Tokenizer.load(write_folder(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template; use generate"):
        ChatEncoder(tokenizer).token_ids([{"role": "user", "content": "hi"}])


def test_unreadable_folders_are_refused_with_a_remedy(tmp_path):
    def refused(message):
        with pytest.raises(ModelFileError, match=message):
            Tokenizer.load(tmp_path)

    refused(r"no tokenizer\.json")
    (tmp_path / "tokenizer.model").touch()
    refused("save_pretrained")
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    refused("is damaged")
    write_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    refused(r"config\.json is not valid JSON")
    (tmp_path / "config.json").unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    refused(r"chat_template\.jinja is not UTF-8 text")


ODD_VALUES = [
    ("config.json", {"eos_token_id": "</s>"}, r"eos_token_id is '</s>'; allowed: a token id, or a list"),
    ("config.json", {"eos_token_id": {"a": 1}}, r"eos_token_id is \{'a': 1\}"),
    ("config.json", {"eos_token_id": [2, [3]]}, r"eos_token_id is \[2, \[3\]\]"),
    ("config.json", {"eos_token_id": True}, r"eos_token_id is True"),
    ("config.json", {"eos_token_id": -5}, r"eos_token_id is -5; allowed: a token id, or a list"),
    ("generation_config.json", {"eos_token_id": [2, 1 << 70]}, r"eos_token_id is \[2, 11805916207174113034"),
    ("config.json", {"text_config": [7]}, r"text_config is \[7\]; allowed: a JSON object"),
    ("generation_config.json", {"eos_token_id": ["2"]}, r"eos_token_id is \['2'\]"),
    ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}, r"chat_template is \[\{'name'"),
    ("tokenizer_config.json", {"chat_template": [{"template": "T"}]}, r"chat_template is \[\{'template'"),
    ("tokenizer_config.json", {"chat_template": ["T"]}, r"chat_template is \['T'\]; allowed: a text, or a l"),
    ("tokenizer_config.json", {"chat_template": 3}, r"chat_template is 3"),
    ("chat_template.json", {"chat_template": {"default": "T"}}, r"chat_template is \{'default': 'T'\}"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "<x>"}}}, "added_.*allowed: tokens"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"300": 7}}, "added_tokens_decoder is .*allowed: to"),
    ("tokenizer_config.json", {"extra_special_tokens": "<x>"}, "extra_special_tokens is .*allowed: tokens"),
    ("tokenizer_config.json", {"extra_special_tokens": [7]}, "extra_special_tokens is .*allowed: tokens"),
    ("tokenizer_config.json", {"eos_token": 7}, "eos_token is .*allowed: tokens"),
]


def test_odd_values_are_named_with_their_file(tmp_path):
    folder = write_folder(tmp_path)
    for file, content, message in ODD_VALUES:
        (folder / file).write_text(json.dumps(content))
        with pytest.raises(ModelFileError, match=rf"{re.escape(file)}: {message}"):
            Tokenizer.load(folder)
        (folder / file).unlink()


def test_a_decoder_that_is_not_understood_is_refused(tmp_path):
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    with pytest.raises(ModelFileError, match="no decoder"):
        Tokenizer.load(write_folder(tmp_path, backend=backend))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelFileError, match="decoder WordPiece is not supported"):
        Tokenizer.load(write_folder(tmp_path, backend=backend))


def test_torch_and_optional_packages_are_not_imported():
    code = "import sys, specinfer.tokenizer, specinfer.hub, specinfer.progress; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "huggingface_hub", "gguf", "rich", "transformers", "jinja2"}
    assert not heavy & set(done.stdout.split())
