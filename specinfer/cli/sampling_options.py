"""The options that become SamplingParams."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from specinfer.errors import RequestError

if TYPE_CHECKING:
    from specinfer.sampling_params import SamplingParams

_Command = TypeVar("_Command", bound=Callable[..., Any])

_LAW = [
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy."),
    click.option("--top-k", type=int, default=0, help="Keep the k most likely tokens; 0: all."),
    click.option("--top-p", type=float, default=1.0, help="Keep the likeliest with this mass."),
    click.option("--min-p", type=float, default=0.0, help="Keep tokens with p >= min-p * max p."),
    click.option("--seed", type=int, help="The same seed gives the same text."),
    click.option("--presence-penalty", type=float, default=0.0, help="On tokens said already; -2 to 2."),
    click.option("--frequency-penalty", type=float, default=0.0, help="The same, for each time; -2 to 2."),
    click.option("--repetition-penalty", type=float, default=1.0, help="On prompt and answer; 1 is none."),
    click.option("--logit-bias", multiple=True, metavar="ID=BIAS", help="Added to a logit; repeatable."),
    click.option("--bad-word", "bad_words", multiple=True, metavar="TEXT", help="Never say; repeatable."),
    click.option("--allowed-token-id", "allowed_token_ids", multiple=True, type=int, metavar="ID"),
]
_FORM = [
    click.option("--json-object", is_flag=True, help="Answer with a JSON object."),
    click.option("--json-schema", type=Path, metavar="FILE", help="Answer with JSON of this schema."),
    click.option("--regex", metavar="REGEX", help="The whole answer matches."),
    click.option("--choice", multiple=True, metavar="TEXT", help="Answer with one of these; repeatable."),
    click.option("--grammar", type=Path, metavar="FILE", help="Answer by a Lark or GBNF grammar."),
]
_END = [
    click.option("--max-tokens", type=int, default=256, show_default=True),
    click.option("--min-tokens", type=int, default=0, help="Do not end before."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable."),
    click.option("--stop-token-id", "stop_token_ids", multiple=True, type=int, metavar="ID"),
    click.option("--ignore-eos", is_flag=True, help="Go on past the end of text."),
]
_GUESS = [
    click.option("--prediction", type=Path, metavar="FILE", help="A guess of the answer, to save time."),
    click.option("--speculation", metavar="JSON", help='For this request: false, or {"max_nodes": 8, ...}.'),
]
_PLAIN = (
    *("temperature", "top_k", "top_p", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words", "regex"),
    *("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
)


def sampling_options(command: _Command) -> _Command:
    """The options of one request: its law, its form, its end, and guesses of it."""
    for option in reversed([*_LAW, *_FORM, *_END, *_GUESS]):
        command = option(command)
    return command


def sampling_params(options: dict[str, Any], **more: Any) -> SamplingParams:
    """Take the sampling options out of `options`; raises RequestError for a value that is not allowed."""
    from specinfer.sampling_params import SamplingParams

    values = {name: options.pop(name) for name in _PLAIN}
    grammar, prediction = options.pop("grammar"), options.pop("prediction")
    return SamplingParams(
        **values,
        **more,
        logit_bias=_biases(options.pop("logit_bias")),
        allowed_token_ids=options.pop("allowed_token_ids") or None,
        choice=options.pop("choice") or None,
        response_format=_response_format(options.pop("json_object"), options.pop("json_schema")),
        grammar=None if grammar is None else _read("grammar", grammar),
        prediction=None if prediction is None else _read("prediction", prediction),
        speculation=_speculation(options.pop("speculation")),
    )


def _biases(given: Sequence[str]) -> Any:
    biases: dict[str, float] = {}
    for text in given:
        token, _, bias = text.partition("=")
        try:
            biases[token] = float(bias)
        except ValueError:
            raise RequestError(
                f"logit bias is {text!r}; allowed: a token id = a number, like 42=-5"
            ) from None
    return biases or None


def _response_format(json_object: bool, schema: Path | None) -> dict[str, Any] | None:
    if json_object and schema is not None:
        raise click.UsageError("--json-object and --json-schema are given; give one of them")
    if json_object:
        return {"type": "json_object"}
    if schema is None:
        return None
    return {
        "type": "json_schema",
        "json_schema": {"name": schema.stem, "schema": _parsed(f"{schema}", _read("JSON schema", schema))},
    }


def _speculation(text: str | None) -> Any:
    return None if text is None else _parsed("--speculation", text)


def _parsed(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"{where} is not JSON at line {error.lineno}: {error.msg}") from None


def _read(what: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RequestError(f"cannot read the {what} from {path}: {reason}") from None
