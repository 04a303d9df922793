"""Tokenizer: encodes and decodes; from a model's folder or its GGUF file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Final

import tokenizers

from specinfer.errors import ConfigError, ModelFileError, RequestError
from specinfer.hub.gguf_header import read_gguf
from specinfer.hub.model_files import TEMPLATES, ModelFiles
from specinfer.tokenizer.detokenizer import TokenBytes
from specinfer.tokenizer.fill_in import KNOWN_PREFIXES, NAMES, FillInTokens
from specinfer.tokenizer.vocabulary import library_panics, odd_value, read_folder, read_optional

_MAX_IDS: Final = 1 << 31  # exclusive upper bound of token ids
_MAX_SHORT: Final = 4096  # characters, which take about 1 ms
_LINE = "\n"  # context for encoding the continuation of a text
_SPECIAL_NAMES = (
    *("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"),
    *NAMES,
)


class Tokenizer:
    """A model's tokenizer. Immutable and safe to share between threads.

    `backend` encodes, and its post-processor adds the special tokens at the start of a plain prompt.
    `special_tokens` are the texts of the names in a chat template (bos_token, ...). `templates` are the chat
    templates by name: default, and tool_use or rag if the model has separate ones.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Iterable[int],
        bos_token_id: int | None = None,
        special_tokens: Mapping[str, str] | None = None,
        templates: Mapping[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = frozenset(eos_token_ids)
        self.token_bytes = TokenBytes(backend)
        self.templates = dict(templates or {})  # sources
        self.special_tokens = dict(special_tokens or {})

    @classmethod
    def load(cls, files: ModelFiles | str | Path, chat_template: str | None = None) -> Tokenizer:
        """Load the tokenizer of a model on disk: a folder with tokenizer.json, or a GGUF file.

        `chat_template` is the path of a template that replaces the model's own, or the name of one of those.
        Raises ModelFileError if there is no tokenizer or its kind is not supported, and ConfigError if the
        template cannot be read.
        """
        path = files.path if isinstance(files, ModelFiles) else Path(files)
        if path.is_dir():
            loaded = cls._from_folder(path)
        else:
            header = files.header if isinstance(files, ModelFiles) else None
            from specinfer.tokenizer.gguf_vocabulary import read_vocabulary

            loaded = read_vocabulary(header or read_gguf(path))
        if chat_template is not None:
            named = loaded.templates.get(chat_template)
            loaded.templates = {"default": _template_in(chat_template) if named is None else named}
        return loaded

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text, with the begin-of-text token if the model uses one.

        Names of special tokens in the text ("<|im_end|>") become special tokens. Raises RequestError for a
        text that is not valid Unicode, or on which the tokenizer's regular expressions do not terminate.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"character {error.start} of the text is half of a surrogate pair; give valid Unicode text"
            ) from None
        with library_panics():
            if len(text) <= _MAX_SHORT:
                encoding = self.backend.encode(text, add_special_tokens=add_special)
            else:  # a batch is encoded without the GIL: megabytes would stop all threads for a second
                [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special)
            ids: list[int] = encoding.ids
        return ids

    def encode_behind(self, text: str) -> list[int]:
        """Token ids of a text that continues another one: no space or token is prepended.

        Raises as `encode`.
        """
        if not self.token_bytes.strips_first_space:
            return self.encode(text, add_special=False)
        # Such a tokenizer prepends a space to every text; decoding removes it.
        ids = self.encode(_LINE + text, add_special=False)
        before = self._line
        return ids[len(before) :] if ids[: len(before)] == before else self.encode(text, add_special=False)

    def encode_fill_in(
        self, prefix: str, suffix: str, files: Sequence[tuple[str, str]] = (), max_tokens: int | None = None
    ) -> list[int]:
        """The token ids of a fill-in-the-middle prompt; `fill_in.ends` are the tokens that end the answer.

        `files` are names and texts of other files as context; the first ones are left out if the prompt would
        have more than `max_tokens` tokens. Raises RequestError if the vocabulary has no such tokens, and as
        `encode`.
        """
        if self.fill_in is None:
            raise RequestError(
                "the model has no fill-in-the-middle tokens in its vocabulary; looked for "
                f"{KNOWN_PREFIXES}; use a code model that has them"
            )
        return self.fill_in.encode(self, prefix, suffix, files, max_tokens)

    @cached_property
    def fill_in(self) -> FillInTokens | None:
        """The fill-in-the-middle tokens; None if the vocabulary has none."""
        return FillInTokens.of(self.backend.token_to_id, self.special_tokens)

    @property
    def beginning(self) -> list[int]:
        """The tokens that `encode` puts before a text: begin-of-text, or none."""
        return [token for token in self.encode("")[:1] if token == self.bos_token_id]

    @cached_property
    def _line(self) -> list[int]:
        return self.encode(_LINE, add_special=False)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; special tokens are left out, invalid UTF-8 becomes U+FFFD."""
        table = self.token_bytes
        text = b"".join([table[token_id] for token_id in ids]).decode("utf-8", "replace")
        return text.removeprefix(" ") if table.strips_first_space else text

    @property
    def chat_template(self) -> str | None:
        """The source of the default template; None if there is none."""
        return self.templates.get("default")

    @property
    def tool_template(self) -> str | None:
        """The source of the template for conversations with tools; None if there is none."""
        return self.templates.get("tool_use", self.chat_template)

    @property
    def has_chat_template(self) -> bool:
        """True if the model has a chat template."""
        return bool(self.templates.get("default"))

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's string for an id, with stand-in characters; None for an id without a token."""
        token: str | None = self.backend.id_to_token(token_id) if token_id >= 0 else None
        return token

    def text_of(self, token_id: int) -> str:
        """One token as text; a special token as its name, part of a character as U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def bytes_of(self, token_id: int) -> bytes:
        """One token as bytes; a special token, which `token_bytes` omits, as its name."""
        if self.is_special(token_id):
            return (self.id_to_token(token_id) or "").encode()
        return self.token_bytes[token_id]

    def is_special(self, token_id: int) -> bool:
        """True if `decode` omits the token."""
        return token_id in self.token_bytes.special_ids

    @cached_property
    def special_names(self) -> tuple[str, ...]:
        """The names of all special tokens."""
        return tuple(filter(None, map(self.text_of, self.token_bytes.special_ids)))

    def special_id(self, name: str) -> int | None:
        """The id of the special token of that name; None if it is text to `decode`, or no token."""
        token_id: int | None = self.backend.token_to_id(name)
        return token_id if token_id in self.token_bytes.special_ids else None

    @classmethod
    def _from_folder(cls, folder: Path) -> Tokenizer:
        backend, tokens = read_folder(folder)
        special_tokens = {name: text for name in _SPECIAL_NAMES if (text := tokens.texts.get(name))}
        eos_ids = _eos_ids(folder / "generation_config.json") | _eos_ids(folder / "config.json")
        eos_id = backend.token_to_id(special_tokens.get("eos_token", ""))
        return cls(
            backend,
            eos_token_ids=eos_ids if eos_id is None else eos_ids | {eos_id},
            bos_token_id=backend.token_to_id(special_tokens.get("bos_token", "")),
            special_tokens=special_tokens,
            templates=_folder_templates(folder),
        )


def _eos_ids(file: Path) -> set[int]:
    """eos_token_id of a config: absent, one id or several; in text_config for multimodal models."""
    config = read_optional(file)
    nested = config.get("text_config") or {}
    if not isinstance(nested, dict):
        raise odd_value(file, "text_config", nested, "a JSON object")
    value = config.get("eos_token_id", nested.get("eos_token_id"))
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token_id) is not int or not 0 <= token_id < _MAX_IDS for token_id in ids):
        raise odd_value(file, "eos_token_id", value, "a token id, or a list of them")
    return set(ids)


def _folder_templates(folder: Path) -> dict[str, str]:
    """The chat templates of a model by name: those in files of their own come first."""
    found = {}
    for file in (folder / "chat_template.jinja", *sorted((folder / TEMPLATES).glob("*.jinja"))):
        if file.is_file():
            name = file.stem if file.parent.name == TEMPLATES else "default"
            try:
                found[name] = file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ModelFileError(f"{file} is not UTF-8 text ({error}); fetch the model again") from error
    return found if "default" in found else {**_configured_templates(folder), **found}


def _configured_templates(folder: Path) -> dict[str, str]:
    """The chat templates in JSON files; a single one is "default"."""
    for file in ("chat_template.json", "processor_config.json", "tokenizer_config.json"):
        match template := read_optional(folder / file).get("chat_template"):
            case None:
                continue
            case str():
                return {"default": template}
            case [*named] if all(_is_named_template(entry) for entry in named):
                return {entry["name"]: entry["template"] for entry in named}
        raise odd_value(folder / file, "chat_template", template, "a text, or a list of texts with names")
    return {}


def _template_in(path: str) -> str:
    """Read a template file that the user named; raises ConfigError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"cannot read chat_template {path}: {reason}; name a file with a template"
        ) from None


def _is_named_template(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("name", "template"))
