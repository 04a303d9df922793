"""A tiny draft with another vocabulary than its target, which often agrees with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from specinfer.tokenizer.detokenizer import byte_alphabet

CHARACTER = {byte: character for character, byte in byte_alphabet().items()}


def byte_level(
    singles: Sequence[int], words: Sequence[str], specials: Sequence[str] = ()
) -> tokenizers.Tokenizer:
    """Return a tokenizer with ids for these bytes, then words and their merges, then specials.

    Words are merged from left to right.
    """
    vocabulary = {CHARACTER[byte]: i for i, byte in enumerate(singles)}
    merges = list[tuple[str, str]]()
    for word in words:
        spelled = [CHARACTER[byte] for byte in word.encode()]
        for end in range(2, len(spelled) + 1):
            merge = ("".join(spelled[: end - 1]), spelled[end - 1])
            if "".join(merge) not in vocabulary:
                vocabulary["".join(merge)] = len(vocabulary)
                merges.append(merge)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in specials])
    return tokenizer


def write_foreign_llama(
    source: Path, folder: Path, *, words: Sequence[str] = (), lacks: Sequence[int] = (), noise: float = 0.1
) -> Path:
    """Write a noisy copy of the byte model in `source` with bytes in reverse order; return the folder.

    It has no token for the bytes in `lacks`. Tokens of `words` have the embedding of their first byte.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    singles = [byte for byte in reversed(range(config["vocab_size"])) if byte not in lacks]
    tokenizer = byte_level(singles, words)
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: weight * (1 + noise * torch.randn(weight.shape, generator=generator))
        for name, weight in sorted(load_file(source / "model.safetensors").items())
    }
    alphabet = byte_alphabet()
    first = [alphabet[(tokenizer.id_to_token(i) or "")[0]] for i in range(size)]
    embedding = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = embedding[torch.tensor(first)].contiguous()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": size}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder
