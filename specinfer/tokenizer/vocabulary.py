"""Vocabulary: the token behind every id, enough to know whether the ids of two models can be exchanged.

A draft needs nothing else of its tokenizer, and what encodes takes a second to build. Two models of one
family mostly hold the same bytes here, and then not even the tokens are looked at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import tokenizers

from specinfer.errors import ModelFileError, RequestError
from specinfer.hub.gguf_header import GgufHeader, Strings
from specinfer.hub.model_files import ModelFiles
from specinfer.tokenizer.detokenizer import SPACE_SYMBOL

_MOST_GROWTH: Final = 256  # characters that a tokenizer may make of one before it looks for tokens
_PADDING_TOKEN = re.compile(r"\[PAD(\d+)\]")  # how GGUF converters name the rows beyond the vocabulary


@contextmanager
def library_errors(path: Path) -> Iterator[None]:
    """Let what the tokenizers library finds wrong with a file leave as ModelFileError.

    It raises bare `Exception` for all of it, so exactly that class is translated, and its panics are.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is Exception or _is_panic(error):
            raise ModelFileError(f"the tokenizer in {path} is damaged: {error}") from error
        raise


@contextmanager
def library_panics() -> Iterator[None]:
    """Let the tokenizers library's panics over a text leave as RequestError.

    It panics where a regex of the tokenizer's does not end. A panic is no Exception, and ends threads.
    """
    try:
        yield
    except BaseException as error:
        if not _is_panic(error):
            raise
        raise RequestError(
            f"the model's tokenizer cannot read the text ({error}); shorten it, or change its repetitions"
        ) from None


def _is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"  # which cannot be imported


class Vocabulary:
    """What the ids of a model on disk stand for.

    Raises ModelFileError where the model has no tokenizer, or one that cannot be read.
    """

    def __init__(self, files: ModelFiles) -> None:
        self._source: Sequence[str] | Path  # a GGUF file's tokens, or a tokenizer.json
        header = files.header
        self._source = tokenizer_file(files.path) if header is None else gguf_texts(header, "tokens")

    @property
    def size(self) -> int:
        """How many ids stand for a token, padding included."""
        return len(self._tokens)

    @property
    def last_token(self) -> int:
        """The highest id that stands for a token and is no padding."""
        return max(self._meanings)

    def same_ids(self, other: Vocabulary) -> bool:
        """Whether every id stands for the same token in both.

        Padding does not count, so the same vocabulary from a folder and from a GGUF file agrees.
        """
        one, two = self._source, other._source
        if isinstance(one, Path) and isinstance(two, Path):
            alike = one.read_bytes() == two.read_bytes()
        else:
            alike = one == two
        return alike or self._meanings == other._meanings

    @cached_property
    def _tokens(self) -> dict[int, str]:
        if not isinstance(self._source, Path):
            return {i: token for token, i in first_ids(self._source).items()}
        backend = read_backend(self._source)
        ids = backend.get_vocab(with_added_tokens=True).values()
        return {i: token for i in ids if (token := backend.id_to_token(i)) is not None}

    @cached_property
    def _meanings(self) -> dict[int, str]:
        return {
            i: token.replace(SPACE_SYMBOL, " ") for i, token in self._tokens.items() if not _pads(i, token)
        }


def tokenizer_file(folder: Path) -> Path:
    """The tokenizer.json of a model's folder; raises ModelFileError where there is none."""
    file = folder / "tokenizer.json"
    if file.is_file():
        return file
    if (folder / "tokenizer.model").is_file():
        raise ModelFileError(
            f"{folder} has only a SentencePiece tokenizer.model; make a tokenizer.json with "
            "transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    raise ModelFileError(f"{folder} has no tokenizer.json; copy the one of the model there")


def read_backend(file: Path) -> tokenizers.Tokenizer:
    """The library's tokenizer of a tokenizer.json, for texts of any length.

    Training leaves `truncation` and `padding` in such files, which would cut prompts or fill them up.
    Raises ModelFileError where the file is damaged, or makes so much of a character that a short prompt
    could take all memory.
    """
    with library_errors(file):
        backend = tokenizers.Tokenizer.from_file(str(file))
        backend.no_truncation()
        backend.no_padding()
    _check_growth(file, backend)
    return backend


def _check_growth(file: Path, backend: tokenizers.Tokenizer) -> None:
    """Raise ModelFileError where the normalizer can make too much of a text."""
    if backend.normalizer is None:
        return
    growth = 1
    for step in _steps(json.loads(backend.normalizer.__getstate__())):
        match step:
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                growth *= max(1, -(-len(content) // max(1, len(pattern))))
            case {"type": "Replace", "content": str(content)}:  # a regex, which may match between characters
                growth *= 1 + len(content)
            case {"type": "Prepend", "prepend": str(content)}:
                growth *= 1 + len(content)
        if growth > _MOST_GROWTH:
            raise ModelFileError(
                f"{file}: its normalizer can make {growth} characters of one; allowed: at most "
                f"{_MOST_GROWTH}. Fetch the model again"
            )


def _steps(normalizer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer, of which some may be sequences themselves."""
    if normalizer.get("type") == "Sequence":
        for step in normalizer["normalizers"]:
            yield from _steps(step)
    else:
        yield normalizer


def gguf_value(header: GgufHeader, key: str) -> Any:
    """What a GGUF file has under tokenizer.ggml.KEY; raises ModelFileError where it has nothing."""
    value = header.metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        raise ModelFileError(
            f"{header.path} has no tokenizer.ggml.{key}; it holds no complete tokenizer: "
            "use a GGUF file made with its vocabulary"
        )
    return value


def gguf_texts(header: GgufHeader, key: str) -> Sequence[str]:
    """The list of texts under a GGUF file's tokenizer.ggml.KEY; raises ModelFileError where there is none."""
    value = gguf_value(header, key)
    # Those that lie in a file as texts are not decoded to be looked at.
    if isinstance(value, Strings) or (
        isinstance(value, list) and all(isinstance(text, str) for text in value)
    ):
        return value
    raise odd_value(header, f"tokenizer.ggml.{key}", value, "a list of texts")


def odd_value(header: GgufHeader, name: str, value: object, allowed: str) -> ModelFileError:
    """The error about a value of a GGUF file that is of another kind than `allowed`."""
    return ModelFileError(
        f"{header.path}: {name} is {repr(value)[:80]}; allowed: {allowed}. Fetch the model again"
    )


def first_ids(tokens: Sequence[str]) -> dict[str, int]:
    """Token -> id: of two tokens with the same string (padding, in some files) the first is meant."""
    return {token: i for i, token in reversed(list(enumerate(tokens)))}


def _pads(token_id: int, token: str) -> bool:
    padding = _PADDING_TOKEN.fullmatch(token)
    return padding is not None and int(padding[1]) == token_id
