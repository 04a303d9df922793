"""FillInTokens: the special tokens for fill-in-the-middle (FIM) prompts of code models."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from specinfer.tokenizer.tokenizer import Tokenizer

# Keys of tokenizer_config.json; GGUF metadata is mapped to the same names.
NAMES: Final = ("prefix_token", "suffix_token", "middle_token")
_REPOSITORY, _FILE = "myproject", "filename"  # llama.cpp's defaults for missing names
_SNIPPET: Final = "\n\n--- snippet ---\n\n"  # llama.cpp's separator for models without a file token


class _Family(NamedTuple):
    """Names of the FIM tokens of one family of models; "" for none."""

    prefix: str
    suffix: str
    middle: str
    repository: str = ""
    file: str = ""
    ends: tuple[str, ...] = ()  # other tokens that may end an answer


FAMILIES: Final = (
    _Family(  # Qwen2.5-Coder and Qwen3-Coder; CodeGemma has another token for files
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"),
        ends=("<|fim_pad|>", "<|file_separator|>", "<|endoftext|>"),
    ),
    _Family(  # StarCoder 2; StarCoder and Granite name files differently
        *("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>"),
        ends=("<fim_pad>", "<filename>", "<reponame>", "<|endoftext|>"),
    ),
    _Family(
        "<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>", "<|endoftext|>")
    ),  # SantaCoder
    _Family(  # DeepSeek-Coder
        *("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
        ends=("<|EOT|>",),
    ),
    _Family("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", ends=("\u2581<EOT>",)),  # CodeLlama
    _Family("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    _Family("[PREFIX]", "[SUFFIX]", ""),  # Codestral: suffix first, no middle token
)
KNOWN_PREFIXES: Final = ", ".join(family.prefix for family in FAMILIES)


@dataclass(frozen=True, slots=True)
class FillInTokens:
    """Ids of the FIM tokens of a vocabulary.

    Without `middle` the prompt has the suffix first, and the answer continues the prefix. `ends` are the
    tokens that may end an answer: pass them as `stop_token_ids`.
    """

    prefix: int
    suffix: int
    middle: int | None
    repository: int | None
    file: int | None
    ends: tuple[int, ...]
    names: re.Pattern[str]

    @classmethod
    def of(cls, token_id: Callable[[str], int | None], named: Mapping[str, str]) -> FillInTokens | None:
        """Find the tokens; None if there are none.

        `named` holds token names from the model's files, by NAMES.
        """
        before, behind, between = (named.get(name, "") for name in NAMES)
        own = _Family(before, behind, between)
        for family in (*FAMILIES, *([own] if all(own[:3]) else [])):
            prefix, suffix, middle = map(token_id, family[:3])
            if prefix is None or suffix is None or (family.middle and middle is None):
                continue
            names = [name for part in family for name in ((part,) if isinstance(part, str) else part) if name]
            found = {name: known for name in names if (known := token_id(name)) is not None}
            return cls(
                prefix,
                suffix,
                middle if family.middle else None,
                token_id(family.repository) if family.repository else None,
                token_id(family.file) if family.file else None,
                tuple(sorted(set(found.values()))),
                re.compile("|".join(map(re.escape, found))),
            )
        return None

    def encode(
        self,
        tokenizer: Tokenizer,
        prefix: str,
        suffix: str,
        files: Sequence[tuple[str, str]] = (),
        max_tokens: int | None = None,
    ) -> list[int]:
        """The FIM prompt for the text between `prefix` and `suffix`, as token ids.

        `files` are names and texts of other files as context; the first ones are left out if the prompt would
        have more than `max_tokens` tokens. Names of FIM tokens inside the texts are encoded as text.
        """
        before = [self.prefix, *self._ids(tokenizer, prefix)]
        behind = [self.suffix, *self._ids(tokenizer, suffix, continues=True)]
        body = [*behind, *before] if self.middle is None else [*before, *behind, self.middle]
        begin = tokenizer.beginning
        if not files:
            return [*begin, *body]
        if self.repository is not None and self.file is not None:
            begin = [*begin, self.repository, *self._ids(tokenizer, f"{_REPOSITORY}\n")]
        if self.file is not None:
            body = [*self._named(tokenizer, _FILE, ""), *body]
        for name, text in reversed(files):
            more = self._named(tokenizer, name or _FILE, text)
            if max_tokens is not None and len(begin) + len(more) + len(body) > max_tokens:
                break
            body = [*more, *body]
        return [*begin, *body]

    def _named(self, tokenizer: Tokenizer, name: str, text: str) -> list[int]:
        if self.file is None:
            return self._ids(tokenizer, _SNIPPET + text, continues=True)
        return [self.file, *self._ids(tokenizer, f"{name}\n{text}", continues=True)]

    def _ids(self, tokenizer: Tokenizer, text: str, *, continues: bool = False) -> list[int]:
        """Encode a text; a name of a FIM token in it is split in two, so that it stays text."""
        cuts = [0, *(found.start() + 1 for found in self.names.finditer(text)), len(text)]
        ids: list[int] = []
        for start, end in pairwise(cuts):
            piece = text[start:end]
            if continues or start:
                ids += tokenizer.encode_behind(piece)
            else:
                ids += tokenizer.encode(piece, add_special=False)
        return ids
