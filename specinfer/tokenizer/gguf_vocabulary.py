"""Tokenizers from GGUF metadata: byte-level BPE ("gpt2") and SentencePiece BPE ("llama", "gemma4").

A GGUF file holds tokens, scores or merges, and the *name* of a pre-tokenizer. SentencePiece BPE merges the
pair whose union has the highest score, so its merges are listed in order of the scores, except Gemma 4's.
`write_tokenizer` writes such a tokenizer as files for transformers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from specinfer.errors import ModelFileError
from specinfer.files import NewFile, write_text
from specinfer.hub.gguf_header import GgufHeader
from specinfer.hub.model_files import TEMPLATES, ModelFiles
from specinfer.tokenizer.detokenizer import SPACE_SYMBOL
from specinfer.tokenizer.tokenizer import Tokenizer
from specinfer.tokenizer.vocabulary import first_ids, gguf_texts, gguf_value, library_errors, odd_value

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type

# Control tokens that end a turn or a text, in addition to the file's eos token.
END_TOKENS = frozenset(
    {
        "<|im_end|>",  # ChatML: Qwen, SmolLM
        "<|endoftext|>",
        "<end_of_turn>",  # Gemma
        "<turn|>",  # Gemma 4
        "<eos>",
        "<|eot_id|>",  # Llama 3
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|end|>",  # Phi; in gpt-oss it ends one message of an answer
        *("<|return|>", "<|call|>"),  # gpt-oss
        "</s>",  # Llama 2, Mistral
        "<|END_OF_TURN_TOKEN|>",  # Command R
    }
)
_TEMPLATE: Final = "tokenizer.chat_template"  # a point and a name follow for another than the default
# Fill-in-the-middle tokens, by their names in configs: the current GGUF key and the earlier one.
_FILL_IN = {
    "prefix_token": ("fim_pre_token_id", "prefix_token_id"),
    "suffix_token": ("fim_suf_token_id", "suffix_token_id"),
    "middle_token": ("fim_mid_token_id", "middle_token_id"),
}
# Files of a model's folder that belong to its tokenizer and chat template.
_FILES: Final = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "processor_config.json"),
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How byte-level BPE splits a text into words before merging."""

    patterns: tuple[str, ...]  # applied in order, each to the pieces of the previous one
    nfc: bool = False  # the text is first normalized to NFC
    ignore_merges: bool = False  # a word that is itself a token is not split
    add_bos: bool = False  # default, if the file does not specify it


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_BLANKS = rf"\s*[\r\n]+|{_SPACES}"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_QWEN2 = rf"{_ENDING}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_BLANKS}"
_QWEN35 = (
    rf"{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
)
_LLAMA3 = rf"{_ENDING}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_BLANKS}"
# Words that also end between a lower-case and an upper-case letter.
_CASES = (
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{0}"
    r"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{0}"
)
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_CASES.format('')}|\p{{N}}|{_PATHS}|{_BLANKS}"
_GPT4O = rf"{_CASES.format(_ENDING + '?')}|\p{{N}}{{1,3}}|{_PATHS}|{_BLANKS}"
_EAST = r"[\u4e00-\u9fa5\u3040-\u30ff]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
    rf"[\r\n]*|{_BLANKS}"
)
_CHINESE = r"[\u0800-\u9fa5\uac00-\ud7ff]+"
# Letters with case of the Unicode version that the tokenizer was made with, without Armenian's small ones.
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c7-\u10cd\u10d0-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d\ua790-\ua7fa"
    r"\uab30-\uab68\x{10570}-\x{105bc}\x{10d50}-\x{10d85}\x{16e40}-\x{16e7f}\x{1d400}-\x{1df2a}]]"
)
_PHRASE = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# By the name in tokenizer.ggml.pre: the rules of the models' own tokenizers, as in llama.cpp, for models that
# run from GGUF files.
_RULES: Final[Mapping[str, PreTokenizer]] = {
    "gpt-2 olmo mpt jais trillion granite-docling phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en "
    "jina-v2-code roberta-bpe gigachat a.x-4.0 mellum modern-bert exaone4": PreTokenizer((_GPT2,)),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": PreTokenizer((r"\p{N}", _GPT2)),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez": PreTokenizer((_QWEN2,), nfc=True),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "stablelm2 hunyuan solar-open grok-2": PreTokenizer((_QWEN2,)),
    "ufakzeka": PreTokenizer((rf"{_WORD}|\p{{N}}|{_SYMBOLS}|{_BLANKS}",)),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": PreTokenizer(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    "smaug-bpe dbrx glm4 chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), ignore_merges=True),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_GPT4O,)),
    "tiny_aya cohere2moe": PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?{_CASED}+",
            r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _CHINESE,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": PreTokenizer((r"\p{N}{1,3}", _EAST, _DEEPSEEK3)),
    "poro-chat bloom gpt3-finnish": PreTokenizer((_PHRASE,)),
    "viking": PreTokenizer((_PHRASE, r"\p{N}")),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "seed-coder": PreTokenizer(
        (rf"{_ENDING}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|{_SPACES}",)
    ),
}
PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = {
    name: rules for names, rules in _RULES.items() for name in names.split()
}


def read_vocabulary(header: GgufHeader) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes.

    Raises ModelFileError if metadata is missing or names an unknown tokenizer.
    """
    metadata = _Metadata(header)
    kind = gguf_value(header, "model")
    tokens = list(gguf_texts(header, "tokens"))
    types = metadata.numbers("token_type", [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise ModelFileError(
            f"{header.path}: {len(tokens)} tokens but {len(types)} token types; damaged file"
        )
    if kind == "gpt2":
        backend, add_bos = _byte_level(metadata, tokens, types)
    elif kind == "llama":
        backend, add_bos = _sentencepiece(metadata, tokens, types), True
    elif kind == "gemma4":
        backend, add_bos = _sentencepiece(metadata, tokens, types, _merges(metadata)), True
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    else:
        raise ModelFileError(
            f"{header.path} has a tokenizer of kind {kind!r}; supported: 'gpt2' (byte-level BPE), 'llama' "
            "and 'gemma4' (SentencePiece BPE): use the model's safetensors folder instead"
        )
    bos, eos = metadata.token_id("bos_token_id", tokens), metadata.token_id("eos_token_id", tokens)
    ends = {eos, metadata.token_id("eot_token_id", tokens), metadata.token_id("eom_token_id", tokens)}
    known = END_TOKENS - {"<|end|>"} if "<|call|>" in tokens else END_TOKENS
    ends |= {i for i, token in enumerate(tokens) if token in known and types[i] == CONTROL}
    names = {"bos_token": bos, "eos_token": eos}
    names["unk_token"] = metadata.token_id("unknown_token_id", tokens)
    names["pad_token"] = metadata.token_id("padding_token_id", tokens)
    for name, keys in _FILL_IN.items():
        found = (metadata.token_id(key, tokens) for key in keys)
        names[name] = next((token for token in found if token is not None), None)
    prefix = [bos] if bos is not None and metadata.get("add_bos_token", add_bos) else []
    suffix = [eos] if eos is not None and metadata.get("add_eos_token", False) else []
    if prefix or suffix:
        backend.post_processor = processors.TemplateProcessing(
            single=[*(tokens[i] for i in prefix), "$A", *(tokens[i] for i in suffix)],
            special_tokens=[(tokens[i], i) for i in {*prefix, *suffix}],
        )
    templates = {}
    for key, template in header.metadata.items():
        if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}."):
            if not isinstance(template, str):
                raise odd_value(header.path, key, template, "a text")
            templates[key[len(_TEMPLATE) + 1 :] or "default"] = template
    return Tokenizer(
        backend,
        bos_token_id=bos,
        eos_token_ids=frozenset(i for i in ends if i is not None),
        special_tokens={name: tokens[i] for name, i in names.items() if i is not None},
        templates=templates,
    )


class _Metadata:
    """The tokenizer.ggml.* keys of a header."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header

    def get(self, key: str, default: Any) -> Any:
        return self.header.metadata.get(f"tokenizer.ggml.{key}", default)

    def numbers(self, key: str, default: Any) -> list[Any]:
        value = self.get(key, default)
        if not isinstance(value, list):
            raise odd_value(self.header.path, f"tokenizer.ggml.{key}", value, "a list of numbers")
        return value

    def token_id(self, key: str, tokens: Sequence[str]) -> int | None:
        value = self.get(key, None)
        return value if isinstance(value, int) and 0 <= value < len(tokens) else None


def _byte_level(
    metadata: _Metadata, tokens: list[str], types: list[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    name = metadata.get("pre", "default")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise ModelFileError(
            f"{metadata.header.path} names the pre-tokenizer {name!r}; known: {', '.join(PRE_TOKENIZERS)}: "
            "use the model's safetensors folder instead"
        )
    rules = PRE_TOKENIZERS[name]
    bpe = {"vocab": first_ids(tokens), "merges": _merges(metadata), "ignore_merges": rules.ignore_merges}
    backend = _backend(metadata, bpe)
    if rules.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, tokens, types, normalized=False)
    return backend, rules.add_bos


def _merges(metadata: _Metadata) -> list[tuple[str, ...]]:
    merges = [tuple(merge.split(" ")) for merge in gguf_texts(metadata.header, "merges")]
    if not {2}.issuperset(map(len, merges)):
        raise ModelFileError(f"{metadata.header.path}: a merge is not a pair of tokens; damaged file")
    return merges


def _sentencepiece(
    metadata: _Metadata, tokens: list[str], types: list[int], merges: list[tuple[str, ...]] | None = None
) -> tokenizers.Tokenizer:
    """SentencePiece BPE with these merges; None: those of the scores."""
    scores = metadata.numbers("scores", gguf_value(metadata.header, "scores"))
    if len(scores) != len(tokens):
        raise ModelFileError(
            f"{metadata.header.path}: {len(tokens)} tokens but {len(scores)} scores; damaged file"
        )
    add_space = metadata.get("add_space_prefix", True)
    if add_space:
        # If a space is prepended to every piece of text, user-defined runs of spaces cannot be split off
        # beforehand; they take part in the merges like other tokens.
        types = [
            NORMAL if kind == USER_DEFINED and SPACE_SYMBOL in token else kind
            for token, kind in zip(tokens, types, strict=True)
        ]
    unknown = metadata.token_id("unknown_token_id", tokens)
    ids = first_ids(tokens)
    backend = _backend(
        metadata,
        {
            "vocab": ids,
            "merges": _merges_by_score(tokens, scores, types, ids) if merges is None else merges,
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": BYTE in types,
        },
    )
    spaces = normalizers.Replace(" ", SPACE_SYMBOL)
    steps = [decoders.Replace(SPACE_SYMBOL, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_SYMBOL), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(steps)
    # Normalized, so that user-defined runs of spaces are found after spaces became symbols.
    _add_tokens(backend, tokens, types, normalized=not add_space)
    return backend


def _backend(metadata: _Metadata, bpe: dict[str, Any]) -> tokenizers.Tokenizer:
    with library_errors(metadata.header.path):
        return tokenizers.Tokenizer(models.BPE(**bpe))


def _merges_by_score(
    tokens: list[str], scores: list[float], types: list[int], ids: dict[str, int]
) -> list[tuple[str, str]]:
    """Every split of a normal token into two, highest score first."""
    parts = {token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL}
    order = sorted(
        (i for i, kind in enumerate(types) if kind == NORMAL and len(tokens[i]) > 1), key=lambda i: -scores[i]
    )
    merges: list[tuple[str, str]] = []
    for i in order:
        token = tokens[i]
        pairs = [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in parts and token[cut:] in parts
        ]
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += pairs
    return merges


def _add_tokens(
    backend: tokenizers.Tokenizer, tokens: list[str], types: list[int], *, normalized: bool
) -> None:
    """Add the special tokens, then the user's."""
    for kinds, special in (((CONTROL, UNKNOWN), True), ((USER_DEFINED,), False)):
        backend.add_tokens(
            [
                AddedToken(token, special=special, normalized=normalized and not special)
                for token, kind in zip(tokens, types, strict=True)
                if kind in kinds
            ]
        )


def write_tokenizer(source: ModelFiles, folder: Path) -> None:
    """Write a model's tokenizer into a folder: a copy of its files, or converted from a GGUF file.

    Raises OSError, and ModelFileError if the model has no readable tokenizer.
    """
    if source.header is None:
        for name in _FILES:
            if (source.path / name).is_file():
                with NewFile(folder / name, mode=0o644) as new, (source.path / name).open("rb") as old:
                    shutil.copyfileobj(old, new)
                    new.keep()
        if (source.path / TEMPLATES).is_dir():
            shutil.copytree(source.path / TEMPLATES, folder / TEMPLATES, dirs_exist_ok=True)
        return
    vocabulary = read_vocabulary(source.header)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **vocabulary.special_tokens,
    }
    named = [{"name": name, "template": text} for name, text in vocabulary.templates.items()]
    if named:
        config["chat_template"] = named if [*vocabulary.templates] != ["default"] else named[0]["template"]
    for name, text in (
        ("tokenizer.json", vocabulary.backend.to_str()),
        ("tokenizer_config.json", json.dumps(config, indent=2)),
    ):
        write_text(folder / name, text)
