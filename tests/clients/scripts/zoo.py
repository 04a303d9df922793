"""What the script of a Python client needs: where the server is, and checks that report to the runner.

This runs in the client's environment, with the standard library alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import sys
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

ROOT = os.environ["ZOO_URL"]
URL = ROOT + "/v1"
MODEL = os.environ["ZOO_MODEL"]
TOKENIZER = os.environ["ZOO_TOKENIZER"]  # a folder with the model's tokenizer, as transformers reads it

RIVERS = "Name three rivers of Europe."
FRANCE = "What is the capital of France?"  # whose answer is short
LISBON = "What is the weather in Lisbon?"
JSON = 'Answer with the JSON object {"city": "Lisbon", "warm": true}.'
# A small model cannot be trusted to end a text of its own, so what it fills in is chosen from a few.
City = Literal["Lisbon", "Porto"]
Unit = Literal["celsius", "fahrenheit"]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": list(get_args(City))},
        "unit": {"type": "string", "enum": list(get_args(Unit))},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells the weather of a city.", "parameters": WEATHER},
}


_LOOP = asyncio.Runner()  # one for all checks: clients keep connections, which belong to a loop


def check(body: Callable[[], Any]) -> None:
    """Run a check, a coroutine function too, and report its outcome under its name."""
    outcome = {"check": body.__name__.replace("_", " "), "note": ""}
    try:
        done = body()
        if inspect.iscoroutine(done):
            _LOOP.run(done)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        places = [
            frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == sys.argv[0]
        ]
        said = " ".join(str(error).split()) or (places[-1].line if places else "")
        outcome["note"] = f"{type(error).__name__}: {said}"
    _report({**outcome, "passed": not outcome["note"]})


@contextlib.contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[None]:
    """What the block asks is refused by the server, and the client raises `kind` with these words."""
    try:
        yield
    except kind as error:
        said = str(error)
    else:
        raise AssertionError(f"no {kind.__name__} was raised")
    _report({"refused": 1})
    missing = [word for word in words if word not in said]
    assert not missing, f"{missing} not in {said}"


def ask(path: str, **fields: Any) -> dict[str, Any]:
    """The answer to a plain POST: the same request without a client."""
    body = json.dumps({"model": MODEL, **fields}).encode()
    request = urllib.request.Request(ROOT + path, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        _report({"plain": answer.headers["X-Request-Id"]})
        return json.load(answer)


def says(question: str, **fields: Any) -> str:
    """What the model answers to one question, without a client."""
    messages = [{"role": "user", "content": question}]
    return ask("/v1/chat/completions", messages=messages, **fields)["choices"][0]["message"]["content"]


def holds_to_weather(arguments: dict[str, Any] | str) -> bool:
    """Whether arguments of the tool are what its schema asks for."""
    read = json.loads(arguments) if isinstance(arguments, str) else arguments
    return (
        read.keys() == {"city", "unit"} and read["city"] in get_args(City) and read["unit"] in get_args(Unit)
    )


def _report(line: dict[str, Any]) -> None:
    with open(os.environ["ZOO_REPORT"], "a", encoding="utf-8") as report:
        report.write(json.dumps(line) + "\n")
