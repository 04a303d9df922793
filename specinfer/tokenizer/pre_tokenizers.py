"""How byte-level BPE splits a text into words, by the name in a GGUF file (tokenizer.ggml.pre).

The rules of each name are those of the models' own tokenizers, as in llama.cpp. Names of tokenizers without
byte-level BPE (gemma4, sarvam-moe, whitespace) are not known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final


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
_RUNS = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
_JAIS2 = rf"{_ENDING}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|\s*[\r\n]+|{_RUNS}|\s"
# Words that also end between a lower-case and an upper-case letter; `{0}` leaves characters out.
_CASES = (
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{0}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{0}]+{1}"
    r"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{0}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{0}]*{1}"
)
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_WITH_ENDING = _CASES.format("", f"{_ENDING}?")
_TEKKEN = rf"{_CASES.format('', '')}|\p{{N}}|{_PATHS}|{_BLANKS}"
_GPT4O = rf"{_WITH_ENDING}|\p{{N}}{{1,3}}|{_PATHS}|{_BLANKS}"
_NOT_HAN = _CASES.format(r"&&[^\p{Han}]", f"{_ENDING}?")
_KIMI = rf"\p{{Han}}+|{_NOT_HAN}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_BLANKS}"
_YOUTU = rf"{_WITH_ENDING}|\p{{N}}|{_PATHS}|{_BLANKS}"
_EAST = r"[\u4e00-\u9fa5\u3040-\u30ff]+"
_ASCII = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
_DEEPSEEK3 = rf"{_ASCII}[\r\n]*|{_BLANKS}"
_CHINESE = r"[\u0800-\u9fa5\uac00-\ud7ff]+"
# Letters with case of the Unicode version that the tokenizer was made with, without Armenian's small ones.
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c7-\u10cd\u10d0-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d\ua790-\ua7fa"
    r"\uab30-\uab68\x{10570}-\x{105bc}\x{10d50}-\x{10d85}\x{16e40}-\x{16e7f}\x{1d400}-\x{1df2a}]]"
)
_PHRASE = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# Groups of three digits from the end of a number.
_THREES = r"\p{Nd}{1,3}(?=(?:\p{Nd}{3})*(?!\p{Nd}))"
_ASIAN = (
    r"[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0eff\u1780-\u17ff"
    r"\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)

_RULES: Final[Mapping[str, PreTokenizer]] = {
    "gpt-2 olmo mpt jais trillion granite-docling phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en "
    "jina-v2-code roberta-bpe gigachat a.x-4.0 mellum modern-bert exaone4": PreTokenizer((_GPT2,)),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": PreTokenizer((r"\p{N}", _GPT2)),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez": PreTokenizer((_QWEN2,), nfc=True),
    "stablelm2 hunyuan solar-open grok-2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "ufakzeka": PreTokenizer((rf"{_WORD}|\p{{N}}|{_SYMBOLS}|{_BLANKS}",)),
    "laguna": PreTokenizer((r"[^\n]+|\n+", _QWEN2)),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": PreTokenizer(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    "smaug-bpe dbrx glm4 chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), ignore_merges=True),
    "jais-2": PreTokenizer((_JAIS2,)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_GPT4O,)),
    "granite-embed-multi-97m": PreTokenizer((_GPT4O,), ignore_merges=True),
    "tiny_aya cohere2moe": PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "youtu": PreTokenizer(
        (
            r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c"
            rf"\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|{_EAST}",
            _YOUTU,
        ),
        ignore_merges=True,
    ),
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
    "spark2_5": PreTokenizer((r"\p{N}{1,3}", _EAST, rf"{_ASCII}|[\r\n]|{_SPACES}", r"\p{N}")),
    "afmoe": PreTokenizer((_THREES, _ASIAN, _DEEPSEEK3)),
    "poro-chat bloom gpt3-finnish": PreTokenizer((_PHRASE,)),
    "viking": PreTokenizer((_PHRASE, r"\p{N}")),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer(
        (rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|\p{{N}}|{_SYMBOLS}|\s*[\r\n]|{_SPACES}",)
    ),
    "seed-coder": PreTokenizer(
        (rf"{_ENDING}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|{_SPACES}",)
    ),
    "exaone-moe": PreTokenizer(
        (
            rf"{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_SPACES}",
        )
    ),
    "chameleon": PreTokenizer(
        (
            r"<sentinel:[0-9]+>",
            r"(?:IMGIMG)[A-I]{1,4}Z",
            r"[\t\n]|    |  ",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
}


def _by_name() -> Iterator[tuple[str, PreTokenizer]]:
    for names, rules in _RULES.items():
        for name in names.split():
            yield name, rules


PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = dict(_by_name())
