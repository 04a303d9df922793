"""Forms in which models write calls: a row of data each, and the form that a chat template shows.

    hermes         Hermes, Qwen2.5, Qwen3, Granite 4     qwen3_coder    Qwen3-Coder, Qwen3.5
    llama3         Llama 3                               glm            GLM-4.5 and later
    mistral        Mistral                               deepseek_v3    DeepSeek V3, R1
    mistral_args   Mistral with [ARGS]                   deepseek_v31   DeepSeek V3.1
    mistral_ids    the same, with ids of calls           functools      Phi-4-mini with vLLM's template
    granite3       Granite 3                             phi4           Phi-4-mini with llama.cpp's template
    lfm2           LFM2                                  phi4_list      Phi-4-mini with its own template
    lfm2_json      LFM2 with llama.cpp's template        gemma4         Gemma 4
    pythonic       Gemma 3 with vLLM's template          functiongemma  FunctionGemma
    harmony        gpt-oss (`channels.py`)

The form in a chat template is the one that the model was trained on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

NAME, ID = "\0", "\1"  # stand for a function's name, and for the id of a call
PYTHON_TAG: Final = "<|python_tag|>"
# Expressions for a call that is a JSON object: all before its name, and all between name and arguments.
# Blanks are not bounded, because bounds would multiply the states of a grammar's lexer.
BLANKS: Final = r"[ \n\t]*"
BARE_BEGIN: Final = rf'{BLANKS}(?:```(?:json)?\n{BLANKS})?\{{{BLANKS}(?:"type": ?"function", ?)?"name": ?"'
BARE_NAMED: Final = rf'",{BLANKS}"(?:arguments|parameters)":'
_MARK = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")  # a part of a form that may be a special token


@dataclass(frozen=True, slots=True)
class Tags:
    """Arguments between tags: `before key after value end` for each; strings have no quotes.

    `begin` matches all before the value. A space is an optional blank.
    """

    before: str
    after: str
    end: str
    begin: str


@dataclass(frozen=True, slots=True)
class Notation:
    """Arguments as `key assign value`, with their own literals.

    `quote` delimits strings without escapes; without it they are Python's, and keys of objects have quotes.
    """

    assign: str
    words: Mapping[str, str]  # JSON's true, false and null -> the words for them
    quote: str = ""


PYTHON: Final = Notation("=", {"true": "True", "false": "False", "null": "None"})


@dataclass(frozen=True, slots=True)
class CallForm:
    """Calls are `mark open call (between call)* close`, and each call is `head arguments tail`.

    Without a `mark` they are the whole answer. A space outside `head` is an optional blank. `arguments` is
    None for JSON. A chat template with all of `shown`, or the mark, and none of `hidden` has this form.
    """

    mark: str
    open: str
    head: str
    tail: str
    between: str
    close: str = ""
    arguments: Tags | Notation | None = None
    shown: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()

    @property
    def marks(self) -> Sequence[str]:
        """All parts that may be special tokens, each once."""
        texts = [self.mark, self.open, self.head, self.tail, self.between, self.close]
        return marks_in(*texts, str(self.arguments or ("" if self.mark else PYTHON_TAG)))

    def is_shown_in(self, template: str) -> bool:
        """Return whether a chat template has this form."""
        has_all = all(one in template for one in self.shown or (self.mark,))
        return has_all and not any(one in template for one in self.hidden)

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Write calls: their names and arguments. Tags are not supported, and no template needs them."""
        texts = []
        for name, arguments in calls:
            text = json.dumps(arguments, ensure_ascii=False)
            if self.arguments is not None:
                text = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            texts.append(f"{self.head.replace(NAME, name)}{text}{self.tail}")
        return f"{self.mark}{self.open}{self.between.join(texts)}{self.close}"


def _deepseek(name: str) -> str:
    return f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"


def _gemma(begin: str, end: str, quote: str) -> CallForm:
    notation = Notation(":", {word: word for word in PYTHON.words}, quote)
    return CallForm(begin, "", f"call:{NAME}{{", f"}}{end}", f" {begin}", "", notation)


_CALLS, _CALLS_END = _deepseek("tool calls begin"), _deepseek("tool calls end")
_CALL, _SEPARATOR, _CALL_END = map(_deepseek, ("tool call begin", "tool sep", "tool call end"))
_JSON: Final = f'{{"name": "{NAME}", "arguments": '
_QWEN_TAGS: Final = Tags("<parameter=", ">\n", "\n</parameter>\n", r"<parameter=([^>\n]+)>\n")
_GLM_TAGS: Final = Tags(
    *(" <arg_key>", "</arg_key> <arg_value>", "</arg_value>"), r"<arg_key>([^<\n]+)</arg_key>\s*<arg_value>"
)
_CODER: Final = ("\n", f"<function={NAME}>\n", "</function>\n</tool_call>", "\n<tool_call>\n")
_FENCE: Final = "```json"
_MISTRAL: Final = "[TOOL_CALLS]"
_LFM2, _LFM2_END = "<|tool_call_start|>", "]<|tool_call_end|>"
_PHI, _PHI_END = "<|tool_call|>", "<|/tool_call|>"
# The first row that a template shows is its form.
FORMS: Final[Mapping[str, CallForm]] = {
    "mistral_ids": CallForm(_MISTRAL, "", f"{NAME}[CALL_ID]{ID}[ARGS]", "", _MISTRAL, shown=("[CALL_ID]",)),
    "mistral_args": CallForm(_MISTRAL, "", f"{NAME}[ARGS]", "", _MISTRAL, shown=("[ARGS]",)),
    "mistral": CallForm(_MISTRAL, " [", _JSON, "}", ", ", "]"),
    "deepseek_v3": CallForm(
        *(_CALLS, "", f"{_CALL}function{_SEPARATOR}{NAME}\n{_FENCE}\n", f"\n```{_CALL_END}", " ", _CALLS_END),
        shown=(_CALLS, _FENCE),
    ),
    "deepseek_v31": CallForm(_CALLS, "", f"{_CALL}{NAME}{_SEPARATOR}", _CALL_END, "", _CALLS_END),
    "lfm2_json": CallForm(_LFM2, "[", _JSON, "}", ", ", _LFM2_END, shown=(_LFM2, '"arguments": ')),
    "lfm2": CallForm(_LFM2, "[", f"{NAME}(", ")", ", ", _LFM2_END, PYTHON),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "phi4": CallForm(_PHI, "", _JSON, f"}}{_PHI_END}", f" {_PHI}", shown=(_PHI, _PHI_END)),
    "granite3": CallForm(_PHI, "[", _JSON, "}", ", ", "]"),
    "phi4_list": CallForm(_PHI, "[", _JSON, "}", ", ", f"]{_PHI_END}", shown=("message['tools']",)),
    "functools": CallForm("functools[", "", _JSON, "}", ", ", "]"),
    "glm": CallForm(
        "<tool_call>", "", NAME, " </tool_call>", " <tool_call>", "", _GLM_TAGS, ("<arg_key>", "<arg_value>")
    ),
    "qwen3_coder": CallForm("<tool_call>", *_CODER, "", _QWEN_TAGS, ("<function=", "<parameter=")),
    "hermes": CallForm(
        *("<tool_call>", "\n", _JSON, "}\n</tool_call>", "\n<tool_call>\n"),
        shown=("<tool_call>", "arguments"),
        hidden=("<function=", "<arg_key>"),
    ),
    # Only the marks of this row are read.
    "harmony": CallForm(
        *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|end|>"),
        shown=("<|channel|>", "<|message|>", "functions"),
    ),
    "pythonic": CallForm("", "[", f"{NAME}(", ")", ", ", "]", PYTHON, ("name + '('",)),
    "llama3": CallForm(
        "", "", _JSON.replace("arguments", "parameters"), "}", "; ", shown=("<|start_header_id|>",)
    ),
}


def marks_in(*texts: str) -> tuple[str, ...]:
    """Return the parts of texts that may be special tokens, each once."""
    return tuple(dict.fromkeys(mark for text in texts for mark in _MARK.findall(text)))


def lark_text(text: str, special: Mapping[str, int], *, blanks: bool = False) -> str:
    """Return a part of a form as a Lark expression; `special` has the ids of special tokens.

    With `blanks` each space in it is an optional blank.
    """
    parts = []
    for part in re.split(f"({'|'.join(map(re.escape, special)) or '(?!)'})", text):
        if part in special:
            parts.append(f"<[{special[part]}]>")
        else:
            pieces = part.split(" ") if blanks else [part]
            quoted = [json.dumps(piece, ensure_ascii=False) if piece else "" for piece in pieces]
            parts.append(r" /[ \n]/? ".join(quoted))
    return " ".join(filter(None, parts))
