"""Vocabulary: the token of every id, to check whether two models' ids are interchangeable.

A draft needs only this from its tokenizer, and building an encoder takes a second. Two models of one family
usually have identical files, and then the tokens are not compared.

ConfiguredTokens are the tokens that a folder's configs add to those of tokenizer.json. They have the ids that
transformers gives them. tokenizer_config.json lists them in added_tokens_decoder, in extra_special_tokens or
as values of keys such as eos_token; older folders have added_tokens.json and special_tokens_map.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken

from specinfer.errors import ModelFileError, RequestError
from specinfer.hub.gguf_header import GgufHeader, Strings
from specinfer.hub.model_files import ModelFiles, read_json
from specinfer.tokenizer.detokenizer import SPACE_SYMBOL

_PADDING_TOKEN = re.compile(r"\[PAD(\d+)\]")  # GGUF converters' names for rows beyond the vocabulary
CONFIG: Final = "tokenizer_config.json"
_NAMED: Final = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


@contextmanager
def library_errors(path: Path) -> Iterator[None]:
    """Translate the tokenizers library's errors about a file into ModelFileError.

    The library raises bare `Exception`, so exactly that class is translated, and its panics.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is Exception or _is_panic(error):
            raise ModelFileError(f"the tokenizer in {path} is damaged: {error}") from error
        raise


@contextmanager
def library_panics() -> Iterator[None]:
    """Translate the tokenizers library's panics about a text into RequestError.

    It panics if a regular expression of the tokenizer does not terminate. A panic is no Exception, and ends
    threads.
    """
    try:
        yield
    except BaseException as error:
        if not _is_panic(error):
            raise
        raise RequestError(
            f"the model's tokenizer cannot encode the text ({error}); shorten it, or reduce its repetitions"
        ) from None


def _is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"  # the class cannot be imported


class Vocabulary:
    """The tokens of the ids of a model on disk.

    Raises ModelFileError if the model has no readable tokenizer.
    """

    def __init__(self, files: ModelFiles) -> None:
        self._source: Sequence[str] | Path  # a GGUF file's tokens, or a tokenizer.json
        header = files.header
        self._source = tokenizer_file(files.path) if header is None else gguf_texts(header, "tokens")

    @property
    def size(self) -> int:
        """Number of ids with a token, padding included."""
        return len(self._tokens)

    @property
    def last_token(self) -> int:
        """The highest id of a token that is not padding."""
        return max(self._meanings)

    def same_ids(self, other: Vocabulary) -> bool:
        """True if every id stands for the same token in both.

        Padding is ignored, so the same vocabulary from a folder and from a GGUF file is equal.
        """
        one, two = self._source, other._source
        if isinstance(one, Path) and isinstance(two, Path):
            alike = one.read_bytes() == two.read_bytes()
            alike = alike and ConfiguredTokens(one.parent) == ConfiguredTokens(two.parent)
        else:
            alike = one == two
        return alike or self._meanings == other._meanings

    @cached_property
    def _tokens(self) -> dict[int, str]:
        if not isinstance(self._source, Path):
            return {i: token for token, i in first_ids(self._source).items()}
        backend, _ = read_folder(self._source.parent)
        ids = backend.get_vocab(with_added_tokens=True).values()
        return {i: token for i in ids if (token := backend.id_to_token(i)) is not None}

    @cached_property
    def _meanings(self) -> dict[int, str]:
        return {
            i: token.replace(SPACE_SYMBOL, " ") for i, token in self._tokens.items() if not _pads(i, token)
        }


def tokenizer_file(folder: Path) -> Path:
    """The tokenizer.json of a model's folder; raises ModelFileError if there is none."""
    file = folder / "tokenizer.json"
    if file.is_file():
        return file
    if (folder / "tokenizer.model").is_file():
        raise ModelFileError(
            f"{folder} has only a SentencePiece tokenizer.model; make a tokenizer.json with "
            "transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    raise ModelFileError(f"{folder} has no tokenizer.json; copy the model's tokenizer.json there")


def read_folder(folder: Path) -> tuple[tokenizers.Tokenizer, ConfiguredTokens]:
    """The library's tokenizer of a model's folder, with the tokens of its configs; raises ModelFileError.

    A tokenizer.json may contain `truncation` and `padding` from training, which would cut or pad prompts;
    both are disabled.
    """
    file, tokens = tokenizer_file(folder), ConfiguredTokens(folder)
    with library_errors(file):
        backend = tokenizers.Tokenizer.from_file(str(file))
        backend.no_truncation()
        backend.no_padding()
        tokens.add_to(backend)
    return backend, tokens


def gguf_value(header: GgufHeader, key: str) -> Any:
    """The value of tokenizer.ggml.KEY in a GGUF file; raises ModelFileError if there is none."""
    value = header.metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        raise ModelFileError(
            f"{header.path} has no tokenizer.ggml.{key}; it holds no complete tokenizer: "
            "use a GGUF file that includes its vocabulary"
        )
    return value


def gguf_texts(header: GgufHeader, key: str) -> Sequence[str]:
    """The list of texts in tokenizer.ggml.KEY of a GGUF file; raises ModelFileError if there is none."""
    value = gguf_value(header, key)
    # `Strings` are texts by construction, so they are not decoded for a check.
    if isinstance(value, Strings) or (
        isinstance(value, list) and all(isinstance(text, str) for text in value)
    ):
        return value
    raise odd_value(header.path, f"tokenizer.ggml.{key}", value, "a list of texts")


def odd_value(file: Path, name: str, value: object, allowed: str) -> ModelFileError:
    """The error for a value in a model's file that is not as `allowed`."""
    return ModelFileError(f"{file}: {name} is {repr(value)[:80]}; allowed: {allowed}. Fetch the model again")


def first_ids(tokens: Sequence[str]) -> dict[str, int]:
    """Token -> id; of equal tokens (padding, in some files) the first counts."""
    return dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))


def _pads(token_id: int, token: str) -> bool:
    padding = _PADDING_TOKEN.fullmatch(token)
    return padding is not None and int(padding[1]) == token_id


class ConfiguredTokens:
    """The special tokens that a folder's configs name, and the tokens that they add.

    Raises ModelFileError for a token that is neither a text nor an object with its content.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / CONFIG
        self.config = read_optional(self._file)
        older = read_optional(folder / "special_tokens_map.json")
        listed = self.config.get("added_tokens_decoder")
        fields = self.config if listed is not None else {**self.config, **older}
        self._by_id: dict[int, AddedToken] = {}
        if listed is not None:
            if not isinstance(listed, Mapping) or not all(str(key).isdecimal() for key in listed):
                raise self._odd("added_tokens_decoder", listed)
            self._by_id = {int(key): self._token("added_tokens_decoder", one) for key, one in listed.items()}
        self._extra = self._extra_tokens(fields)
        self._special = dict(self._special_tokens(fields, older if listed is None else {}))
        if listed is None:
            self._add_older(read_optional(folder / "added_tokens.json"))
        # Without one in the config that counts, the other names the text of a token that is there already.
        self.texts = {
            **{key: found for key in older if (found := _text(older[key])) is not None},
            **{key: found for key in fields if (found := _text(fields[key])) is not None},
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConfiguredTokens) and list(map(repr, self._added())) == list(
            map(repr, other._added())
        )

    __hash__ = None  # type: ignore[assignment]  # compared, never a key

    def add_to(self, backend: tokenizers.Tokenizer) -> None:
        """Add the tokens that `backend` lacks."""
        backend.add_tokens(list(self._added(backend)))

    def _added(self, backend: tokenizers.Tokenizer | None = None) -> Iterator[AddedToken]:
        """The tokens to add, in order; without `backend`, those that an empty one lacks."""
        there = (
            set() if backend is None else {one.content for one in backend.get_added_tokens_decoder().values()}
        )
        names, listed = {token.content for token in self._special.values()}, sorted(self._by_id.items())
        with_id: dict[str, list[AddedToken]] = {}
        for token in self._by_id.values():
            with_id.setdefault(token.content, []).append(token)
        for token in (*(token for _, token in listed), *self._special.values(), *self._extra):
            if token.content in there and token not in with_id.get(token.content, ()):
                continue
            if token.content in names:
                token.special = True
            there.add(token.content)
            yield token

    def _special_tokens(
        self, fields: Mapping[str, Any], older: Mapping[str, Any]
    ) -> Iterator[tuple[str, AddedToken]]:
        """The named tokens: the standard ones first, then a model's own, as transformers orders them."""
        known = {token.content: token for token in self._by_id.values()}
        own = [key for key in fields if key.endswith("_token") and key not in _NAMED]
        own.sort(key=lambda key: key not in older)  # stable
        for key in (*_NAMED, *own):
            value = fields.get(key)
            if isinstance(value, bool) or value is None or (key in own and _text(value) is None):
                continue  # such as add_bos_token
            if key in older and isinstance(value, Mapping):
                value = {**value, "special": True}
            token = self._token(key, value, special=True)
            yield key, known.get(token.content, token) if key in _NAMED else token
        if isinstance(named := fields.get("extra_special_tokens"), Mapping):
            for key, value in named.items():
                yield key, self._token(f"extra_special_tokens.{key}", value, special=True)

    def _extra_tokens(self, fields: Mapping[str, Any]) -> list[AddedToken]:
        key, value = "extra_special_tokens", fields.get("extra_special_tokens")
        if not value or isinstance(value, Mapping):  # a mapping has named tokens
            key = "additional_special_tokens"
            value = fields.get(key) or []
        if not isinstance(value, list):
            raise self._odd(key, value)
        return [self._token(key, one, special=True) for one in value]

    def _add_older(self, ids: Mapping[str, Any]) -> None:
        """Add the tokens of added_tokens.json."""
        special = {token.content for token in (*self._special.values(), *self._extra)}
        for text, number in ids.items():
            if type(number) is not int:
                raise self._odd("added_tokens.json", number)
            self._by_id[number] = AddedToken(text, normalized=text not in special, special=text in special)

    def _token(self, key: str, value: object, **flags: bool) -> AddedToken:
        if isinstance(value, Mapping):
            flags |= {name: bool(value[name]) for name in _FLAGS if name in value}
        text = _text(value)
        if text is None:
            raise self._odd(key, value)
        return AddedToken(text, **flags)

    def _odd(self, key: str, value: object) -> ModelFileError:
        return odd_value(self._file, key, value, "tokens, each a text or an object with its content")


def read_optional(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if the file does not exist."""
    return read_json(path) if path.is_file() else {}


def _text(value: object) -> str | None:
    """The text of a token in a config: a string, or an object with its content."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None
