"""Tokens that a folder's configs add to those of tokenizer.json, with the ids that transformers gives them.

tokenizer_config.json lists them in added_tokens_decoder, in extra_special_tokens or as values of keys such as
eos_token; older folders have added_tokens.json and special_tokens_map.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken

from specinfer.errors import ModelFileError
from specinfer.hub.model_files import read_json

CONFIG: Final = "tokenizer_config.json"
_NAMED: Final = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


class ConfiguredTokens:
    """The special tokens that a folder's configs name, and the tokens that they add.

    Raises ModelFileError for a token that is neither a text nor an object with its content.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / CONFIG
        self.config = _read(self._file)
        older = _read(folder / "special_tokens_map.json")
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
            self._add_older(_read(folder / "added_tokens.json"))
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
        return ModelFileError(
            f"{self._file}: {key} is {repr(value)[:80]}; allowed: tokens, each a text or an object with its "
            "content. Fetch the model again"
        )


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _text(value: object) -> str | None:
    """The text of a token in a config: a string, or an object with its content."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None
