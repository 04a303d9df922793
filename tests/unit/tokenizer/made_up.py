"""Small tokenizers that need no files: GGUF headers and folders made by hand."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models

from specinfer.hub.gguf_header import GgufHeader
from tests.foreign import CHARACTER, byte_level

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def header(**keys):
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items() if key != "chat_template"}
    if "chat_template" in keys:
        metadata["tokenizer.chat_template"] = keys["chat_template"]
    return GgufHeader(Path("made-up.gguf"), metadata, (), 0)


def byte_level_header(pre="gpt-2", words=(), **more):
    """All 256 bytes, then the words (with the merges that build them), then <|bos|> <|im_end|> <tool>."""
    tokens = [CHARACTER[byte] for byte in range(256)]
    merges = []
    for word in words:
        spelled = [CHARACTER[byte] for byte in word.encode()]
        for end in range(2, len(spelled) + 1):
            merge = ("".join(spelled[: end - 1]), spelled[end - 1])
            if "".join(merge) not in tokens:
                merges.append(" ".join(merge))
                tokens.append("".join(merge))
    types = [NORMAL] * len(tokens) + [CONTROL, CONTROL, USER_DEFINED, UNUSED]
    tokens = [*tokens, "<|bos|>", "<|im_end|>", "<tool>", f"[PAD{len(tokens) + 3}]"]
    keys = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges}
    return header(**(keys | {"bos_token_id": len(tokens) - 4} | more))


def sentencepiece_header(pieces, *, user_defined=(), **more):
    """<unk> <s> </s>, the user-defined tokens, 256 byte tokens, then pieces with falling scores."""
    tokens = ["<unk>", "<s>", "</s>", *user_defined, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL] + [USER_DEFINED] * len(user_defined) + [BYTE] * 256
    types += [NORMAL] * len(pieces)
    scores = [0.0] * (len(tokens) - len(pieces)) + [float(-i) for i in range(len(pieces))]
    keys = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    keys |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return header(**(keys | more))


def sentencepiece_backend(pieces=()):
    """BPE over byte tokens, the mark of a space (256) and these pieces; a text's first space is dropped."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {piece: 256 + i for i, piece in enumerate(("\u2581", *pieces))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    spaces, first = decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), first])
    return backend


def write_folder(folder: Path, *, backend: Any = None, **configs: Any) -> Path:
    """A model folder with a byte-level tokenizer.json of 256 bytes, <s> (256) and </s> (257), and configs."""
    if backend is None:
        backend = byte_level(range(256), [], ["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    for name, content in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
