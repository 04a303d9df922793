"""Tokens of a folder's configs: ids and texts are those of transformers."""

import json
import random
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors
from transformers import PreTrainedTokenizerFast

from specinfer.hub.model_files import ModelFiles
from specinfer.tokenizer import Tokenizer
from specinfer.tokenizer.vocabulary import Vocabulary

from .made_up import write_folder

TEXT = "a<s> <x>b </s><pad><y> z<own><img>\u00e9<tool> <x>"


def test_tokens_and_texts_are_those_of_transformers(tmp_path: Path) -> None:
    chance, without = random.Random(48), tmp_path / "without"
    without.mkdir()
    write_folder(without)
    plain = tokenizers.Tokenizer.from_file(str(without / "tokenizer.json"))
    for number in range(60):
        folder = tmp_path / str(number)
        folder.mkdir()
        backend = tokenizers.Tokenizer.from_str(plain.to_str())
        if chance.random() < 0.3:
            backend.add_tokens([AddedToken("<x>", special=False)])
        if chance.random() < 0.3:
            begun = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
            backend.post_processor = begun
        files = {name: made for name, made in made_up_configs(chance, backend).items() if made is not None}
        write_folder(folder, backend=backend)
        for name, made in files.items():
            (folder / name).write_text(json.dumps(made))
        theirs = PreTrainedTokenizerFast.from_pretrained(str(folder))
        ours = Tokenizer.load(folder)
        vocabulary = Vocabulary(ModelFiles("m", folder, ()))
        added = {i: token.content for i, token in ours.backend.get_added_tokens_decoder().items()}
        assert {i: str(token) for i, token in theirs.added_tokens_decoder.items()} == added, files
        ids = theirs.encode(TEXT)
        assert ours.encode(TEXT) == ids, files
        assert ours.encode(TEXT, add_special=False) == theirs.encode(TEXT, add_special_tokens=False), files
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), files
        assert (vocabulary.size, ours.vocab_size) == (len(theirs), len(theirs)), files
        assert ours.bos_token_id == theirs.bos_token_id, files


def made_up_configs(chance: random.Random, backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """Random configs that name tokens in some of the ways that folders have."""

    def maybe(value: Any, share: float = 0.5) -> Any:
        return value if chance.random() < share else None

    def token(text: str) -> dict[str, Any]:
        flags = ("special", "normalized", "lstrip", "rstrip", "single_word")
        return {"content": text, **{flag: chance.random() < 0.3 for flag in flags}}

    free = backend.get_vocab_size()
    config = {
        "bos_token": maybe("<s>"),
        "eos_token": maybe(chance.choice(["</s>", {"__type": "AddedToken", **token("</s>")}])),
        "pad_token": maybe("<pad>"),
        "image_token": maybe("<img>"),
        "extra_special_tokens": maybe(chance.choice([["<y>", "<x>"], {"own_token": "<own>"}])),
        "additional_special_tokens": maybe(["<x>", "<y>"], 0.3),
        "add_bos_token": maybe(chance.random() < 0.5, 0.3),
        "add_eos_token": maybe(chance.random() < 0.5, 0.3),
        "added_tokens_decoder": maybe(
            {
                str(free + place): token(text)
                for place, text in enumerate(chance.sample(["<x>", "<y>", "<tool>", "<pad>"], 3))
            }
        ),
    }
    named = {"eos_token": "</s>", "own_token": "<own>"}
    return {
        "tokenizer_config.json": {name: value for name, value in config.items() if value is not None},
        "special_tokens_map.json": maybe(named | {"pad_token": token("<pad>")}, 0.3),
        "added_tokens.json": maybe({"<tool>": free, "<pad>": free + 1}, 0.3),
    }
