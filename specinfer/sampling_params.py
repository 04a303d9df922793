"""SamplingParams, SpeculationParams and ThinkingBudget: the parameters of one request."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from numbers import Integral, Real
from typing import Any, Final, Literal, Self, get_args

from specinfer.errors import ConfigError, RequestError, naming
from specinfer.structured_output import JsonWhitespace, StructuredOutput, structured_output
from specinfer.tree.draw import PAIRS, Verifier
from specinfer.tree.token_tree import Expansion

# For requests that leave these out, if the model recommends none of _CUTS. Without a cut small models write
# nonsense at temperature 1. These two are what llama.cpp and LM Studio use, and every client can set both.
DEFAULT_SAMPLING: Final[Mapping[str, float]] = {"temperature": 0.8, "top_p": 0.95}
_CUTS: Final = {"temperature", "top_k", "top_p", "min_p"}
GREEDY_BELOW = 1e-5  # lower temperatures are greedy: the softmax in float32 is a point mass there
LogprobsMode = Literal["raw", "processed"]
_MAX_LOGPROBS = 1000
_MAX_SALT = 1024  # characters; salts are stored with cached blocks and compared in each step
_MAX_PINS = 4  # as in Anthropic's API
_MAX_BIAS = 100.0  # as in OpenAI's API: large enough to decide, and float32 sums stay finite
_MAX_REPETITION = 1000.0  # its inverse is the minimum; logits stay finite in float32
_LARGEST: Final = sys.float_info.max
# Parameter -> type, minimum, maximum, and the allowed values in words.
_RANGES: Final[Mapping[str, tuple[Callable[[Any], float], float, float, str]]] = {
    "temperature": (float, 0, _LARGEST, "a finite number >= 0"),
    "top_p": (float, math.ulp(0), 1, "a number in (0, 1]; 1 keeps every token"),
    "min_p": (float, 0, 1, "a number in [0, 1]; 0 keeps every token"),
    "top_k": (int, 0, math.inf, "an integer >= 0; 0 keeps every token"),
    "n": (int, 1, 1024, "an integer in [1, 1024]"),
    "seed": (int, -(1 << 63), (1 << 64) - 1, "an integer in [-2**63, 2**64)"),
    **dict.fromkeys(
        ("presence_penalty", "frequency_penalty"),
        (float, -2, 2, "a number in [-2, 2]; 0 switches it off"),
    ),
    "repetition_penalty": (
        *(float, 1 / _MAX_REPETITION, _MAX_REPETITION),
        f"a number in [{1 / _MAX_REPETITION:g}, {_MAX_REPETITION:g}]; 1 switches it off",
    ),
    **dict.fromkeys(("max_tokens", "min_tokens"), (int, 0, math.inf, "an integer >= 0")),
    **dict.fromkeys(
        ("logprobs", "prompt_logprobs"),
        (int, 0, _MAX_LOGPROBS, f"an integer in [0, {_MAX_LOGPROBS}], or None for none"),
    ),
}
_OPTIONAL: Final = {"seed", "logprobs", "prompt_logprobs"}  # of these, may be None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """Speculation of one request; None keeps the engine's setting.

    With the coupled verifier none of these changes a greedy or seeded text. Raises RequestError for a value
    outside its range. The names of speculators are checked when the request arrives.
    """

    enabled: bool = True  # False: ordinary decoding, with one-node trees
    max_nodes: int | None = None  # maximum nodes of a step's tree, with its root; at most the engine's limit
    expansion: Expansion | None = None  # widths <k1,k2,...> of trees of draft models
    speculators: tuple[str, ...] | None = None  # the only speculators that run: draft, lookup, ...
    verifier: Verifier | None = None  # coupled or mss; drafts then draw by a rule that suits it

    @naming("speculation")
    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise RequestError(f"speculation.enabled is {self.enabled!r}; allowed: true or false")
        nodes = self.max_nodes
        if nodes is not None and (isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1):
            raise RequestError(
                f"speculation.max_nodes is {nodes!r}; allowed: an integer >= 1, the root included"
            )
        if self.expansion is not None:
            object.__setattr__(self, "expansion", _expansion(self.expansion))
        if self.speculators is not None:
            object.__setattr__(self, "speculators", _speculators(self.speculators))
        if self.verifier is not None and self.verifier not in tuple(PAIRS):
            raise RequestError(f"speculation.verifier is {self.verifier!r}; allowed: {', '.join(PAIRS)}")

    @classmethod
    @naming("speculation")
    def of(cls, value: object) -> Self:
        """Return the parameters of a mapping, a bool or None; raises RequestError for other values."""
        if isinstance(value, cls):
            return value
        if value is None:
            return cls()
        if isinstance(value, bool):
            return cls(enabled=value)
        known = [f.name for f in fields(cls)]
        if not isinstance(value, Mapping):
            raise RequestError(
                f"speculation is {value!r}; allowed: true, false, or a mapping of {', '.join(known)}"
            )
        for key in value:
            if key not in known:
                raise RequestError(f"speculation has no option {key!r}; allowed: {', '.join(known)}")
        return cls(**value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    """Bound of the thinking at the start of a text; raises RequestError for one that is negative.

    After `tokens` tokens between the delimiters, the text continues with the token ids `ending`. 0 tokens end
    thinking as soon as it begins.
    """

    tokens: int
    open: str  # a special token counts as its name
    close: str
    ending: tuple[int, ...]  # at least one id; the last ones need not be of `close`
    started: bool = False  # the prompt has opened the thinking
    repeats: bool = False  # thinking may begin anywhere and again; one budget bounds all of it
    head: str = ""  # the beginning of `open`
    barred: tuple[int, ...] = ()  # once the budget is used, ids that may not follow `head`

    @naming("thinking")
    def __post_init__(self) -> None:
        allowed = "an integer >= 0; 0 ends thinking at once"
        _number("thinking.tokens", self.tokens, int, 0, math.inf, allowed)
        if not (self.open and self.close and self.ending):
            raise RequestError("thinking has an empty open, close or ending; give all three")


def usual_sampling(recommended: Mapping[str, float]) -> dict[str, float]:
    """Return the values of sampling fields that a request leaves out, of a model that recommends these.

    A recommendation of temperature or cuts is taken as a whole, so fields that it lacks cut nothing.
    """
    return {**({} if _CUTS & recommended.keys() else DEFAULT_SAMPLING), **recommended}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling, stop conditions, log-probabilities and speculation of one request.

    Parameters change the target's distribution in this order, each on the result of the one before:
    structured output, thinking, allowed_token_ids, bad_words, min_tokens, logit_bias, repetition_penalty,
    frequency_penalty, presence_penalty, temperature, top_k, top_p, min_p (docs/sampling.md). `temperature=0`
    is greedy decoding. Raises RequestError for a value outside its range and for values that contradict each
    other.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0 keeps every token
    top_p: float = 1.0
    min_p: float = 0.0  # keep tokens with p >= min_p * max p
    seed: int | None = None  # None: drawn per request and reported in the output
    n: int = 1  # independent completions of the prompt; they share its KV
    best_of: None = None  # not supported; the field exists for its error message

    presence_penalty: float = 0.0  # subtracted from the logit of every token of the output so far
    frequency_penalty: float = 0.0  # subtracted once per occurrence of the token in the output
    repetition_penalty: float = 1.0  # for tokens of prompt and output: divides logits > 0, multiplies others
    logit_bias: Mapping[int, float] | None = None  # token id -> number added to its logit
    bad_words: tuple[str, ...] = ()  # texts that may not occur: the token that completes one is excluded
    allowed_token_ids: tuple[int, ...] | None = None  # every other token is excluded

    # Structured output: at most one of the first four; `structured_output` is their parsed form.
    response_format: Mapping[str, Any] | None = None  # OpenAI's: json_object, json_schema, text
    regex: str | None = None  # the whole output matches it
    choice: tuple[str, ...] | None = None  # the output is one of these
    grammar: str | None = None  # Lark or EBNF
    preamble: str | None = None  # Lark rules; the rule `preamble` matches the text before the form
    json_whitespace: JsonWhitespace = "bounded"  # between parts of JSON: a pretty printer's, any or none

    max_tokens: int = 128  # 0 computes only the prompt, for example for prompt_logprobs
    min_tokens: int = 0  # no end of text, stop token or stop string before this many tokens
    stop: tuple[str, ...] = ()  # the text ends before the first of these strings
    include_stop_str_in_output: bool = False  # the text ends after the stop string instead
    stop_token_ids: tuple[int, ...] = ()  # the text ends at one of these tokens, which it omits
    ignore_eos: bool = False
    thinking: ThinkingBudget | None = None  # None: only max_tokens bounds it
    visible_token_ids: tuple[int, ...] = ()  # special tokens that the text shows by name

    logprobs: int | None = None  # per output token: log-probabilities of the chosen and of the k likeliest
    prompt_logprobs: int | None = None  # the same for the prompt's tokens, except the first
    logprobs_mode: LogprobsMode = "raw"  # raw: model's distribution; processed: after all parameters

    # None of these changes the distribution of the text.
    speculation: SpeculationParams = SpeculationParams()  # or a bool, or a mapping
    prediction: str | tuple[int, ...] | None = None  # the expected output: text or token ids
    cache_salt: str | None = None  # only requests with equal salts share KV blocks and earlier outputs
    # At most 4 pairs (tokens, seconds): KV of these leading prompt tokens is evicted last for this time.
    cache_pins: tuple[tuple[int, int], ...] = ()

    structured_output: StructuredOutput | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        assign = partial(object.__setattr__, self)  # the class is frozen
        for name, (kind, low, high, allowed) in _RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                with naming(name):
                    assign(name, _number(name, value, kind, low, high, allowed))
        for name in ("bad_words", "stop"):
            assign(name, _strings(name, getattr(self, name)))
        assign("cache_pins", _items("cache_pins", self.cache_pins, "pairs of tokens and seconds"))
        for name in ("stop_token_ids", "visible_token_ids"):
            assign(name, _token_ids(name, getattr(self, name)))
        if self.allowed_token_ids is not None:
            assign("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
        if self.prediction is not None and not isinstance(self.prediction, str):
            assign("prediction", _token_ids("prediction", self.prediction))
        if self.logit_bias is not None:
            assign("logit_bias", _biases(self.logit_bias))
        if self.choice is not None:
            assign("choice", _items("choice", self.choice, "a list of one or more non-empty strings"))
        form = structured_output(
            self.response_format, self.regex, self.choice, self.grammar, self.preamble, self.json_whitespace
        )
        assign("structured_output", form)
        assign("speculation", SpeculationParams.of(self.speculation))
        self._check()

    @property
    def greedy(self) -> bool:
        """True if the target's choice is its argmax."""
        return self.temperature < GREEDY_BELOW

    def knows_chance(self, verifier: str) -> bool:
        """True if an earlier output may have used the random numbers of this request's next tokens.

        This holds for multi-step sampling with a seed. Guesses from such an output would change the
        distribution of the text. `verifier` is the engine's, for requests that do not set one.
        """
        return (self.speculation.verifier or verifier) == "mss" and not self.greedy and self.seed is not None

    def _check(self) -> None:
        """Raise RequestError for values of the right type that are not allowed, or contradict others."""
        if self.best_of is not None:
            raise RequestError(
                f"best_of is {self.best_of!r}; it is not supported: set n and logprobs, and choose the best "
                "completion by its log-probabilities",
                "best_of",
            )
        for word in self.bad_words:
            if not word.strip():
                raise RequestError(
                    f"bad_words has {word!r}; allowed: strings that are not blank", "bad_words"
                )
        if self.allowed_token_ids == ():
            raise RequestError(
                "allowed_token_ids is empty; allowed: at least one token id, or None", "allowed_token_ids"
            )
        if self.thinking is not None and not isinstance(self.thinking, ThinkingBudget):
            raise RequestError(
                f"thinking is {self.thinking!r}; allowed: a ThinkingBudget, or None", "thinking"
            )
        if self.structured_output is not None and self.ignore_eos:
            raise RequestError(
                f"ignore_eos is True with {self.structured_output.parameter}, whose form ends the text; "
                "remove one of them",
                "ignore_eos",
            )
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}; allowed: True or False", name)
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}; allowed: at most max_tokens ({self.max_tokens}); lower it",
                "min_tokens",
            )
        if self.logprobs_mode not in get_args(LogprobsMode):
            raise RequestError(
                f"logprobs_mode is {self.logprobs_mode!r}; allowed: raw, processed", "logprobs_mode"
            )
        for pin in self.cache_pins:
            if len(self.cache_pins) > _MAX_PINS or len(pin) != 2 or not all(map(_is_integer, pin)):
                raise RequestError(
                    f"cache_pins is {self.cache_pins!r}; allowed: at most {_MAX_PINS} pairs of a number of "
                    "tokens and of seconds",
                    "cache_pins",
                )
        salt = self.cache_salt
        if salt is not None and (not isinstance(salt, str) or not 0 < len(salt) <= _MAX_SALT):
            given = f"a string of {len(salt)} characters" if isinstance(salt, str) and salt else repr(salt)
            raise RequestError(
                f"cache_salt is {given}; allowed: a string of 1 to {_MAX_SALT} characters, or None",
                "cache_salt",
            )


def _expansion(value: object) -> Expansion:
    try:
        return Expansion.of(value)
    except ConfigError as error:
        raise RequestError(f"speculation.{error}") from None


def _speculators(value: object) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else ()
    if not names or any(not isinstance(name, str) or not name for name in names):
        raise RequestError(
            f"speculation.speculators is {value!r}; allowed: names of speculators, at least one; "
            "to switch speculation off, set enabled to false"
        )
    return names


def _number(
    name: str, value: object, kind: Callable[[Any], float], low: float, high: float, allowed: str
) -> float:
    """Return the value as a `kind`, float or int; raises RequestError unless it is one in [low, high]."""
    number = math.nan
    if isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer larger than any float
            number = kind(value)
    if not low <= number <= high:
        raise RequestError(f"{name} is {value!r}; allowed: {allowed}")
    return number


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _strings(name: str, values: object) -> tuple[str, ...]:
    allowed = "non-empty strings"
    items = (values,) if isinstance(values, str) else _items(name, values, allowed)
    for item in items:
        if not isinstance(item, str) or not item:
            raise RequestError(f"{name} has {item!r}; allowed: {allowed}", name)
    return items


def _token_ids(name: str, values: object) -> tuple[int, ...]:
    allowed = "token ids >= 0"
    items = _items(name, values, allowed)
    if set(map(type, items)) == {int} and min(items) >= 0:
        return items
    for token in items:
        if not _is_integer(token) or token < 0:
            raise RequestError(f"{name} has {token!r}; allowed: {allowed}", name)
    return tuple(map(int, items))


def _items(name: str, values: object, allowed: str) -> tuple[Any, ...]:
    if values is None:
        return ()
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping)):
        raise RequestError(f"{name} is {values!r}; allowed: {allowed}", name)
    return tuple(values)


@naming("logit_bias")
def _biases(given: object) -> dict[int, float]:
    """Return biases by token id; keys may be digits, as JSON has only strings for keys."""
    allowed = f"token ids, each with a number in [-{_MAX_BIAS:g}, {_MAX_BIAS:g}]"
    if not isinstance(given, Mapping):
        raise RequestError(f"logit_bias is {given!r}; allowed: a mapping of {allowed}")
    biases: dict[int, float] = {}
    for key, bias in given.items():
        token = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key
        if not _is_integer(token) or token < 0:
            raise RequestError(f"logit_bias has the key {key!r}; allowed: {allowed}")
        if token in biases:
            raise RequestError(f"logit_bias has token {token} twice; remove one of them")
        biases[int(token)] = _number(
            f"logit_bias of token {token}", bias, float, -_MAX_BIAS, _MAX_BIAS, allowed
        )
    return biases
