"""Helpers for scripts of Python clients: the server's URL, and checks that report to the runner.

This module runs in the client's environment and uses only the standard library.
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
TOKENIZER = os.environ["ZOO_TOKENIZER"]  # a folder with the model's tokenizer, in transformers' format

RIVERS = "Name three rivers of Europe."
GREETING = "Say hello."  # has a short answer
LISBON = "What is the weather in Lisbon?"
JSON = 'Copy this JSON object: {"city": "Lisbon", "warm": true}'
# A small model may not end a free text, so fields are enumerations.
City = Literal["Lisbon", "Porto"]
Unit = Literal["celsius", "fahrenheit"]
ENUMS = {"city": list(get_args(City)), "unit": list(get_args(Unit))}
FIELDS = {name: {"type": "string", "enum": values} for name, values in ENUMS.items()}
WEATHER = {"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False}
DESCRIBED = {"name": "weather", "description": "Returns the weather of a city.", "parameters": WEATHER}
TOOL = {"type": "function", "function": DESCRIBED}


_LOOP = asyncio.Runner()  # one for all checks, because clients keep connections, which belong to a loop


def check(body: Callable[[], Any]) -> None:
    """Run a check, which may be a coroutine function, and report its outcome under its name."""
    outcome = {"check": body.__name__.replace("_", " "), "note": ""}
    try:
        done = body()
        if inspect.iscoroutine(done):
            _LOOP.run(done)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename == sys.argv[0]]
        message = " ".join(str(error).split()) or (frames[-1].line if frames else "")
        outcome["note"] = f"{type(error).__name__}: {message}"
    _report({**outcome, "passed": not outcome["note"]})


@contextlib.contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[None]:
    """Context in which the server must refuse the request, and the client raise `kind` with these words."""
    try:
        yield
    except kind as error:
        message = str(error)
    else:
        raise AssertionError(f"no {kind.__name__} was raised")
    _report({"refused": 1})
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in {message}"


def ask(path: str, **fields: Any) -> dict[str, Any]:
    """Return the answer to a plain POST, without a client."""
    body = json.dumps({"model": MODEL, **fields}).encode()
    request = urllib.request.Request(ROOT + path, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        _report({"plain": answer.headers["X-Request-Id"]})
        return json.load(answer)


def says(question: str, **fields: Any) -> str:
    """Return the model's answer to one question, without a client."""
    messages = [{"role": "user", "content": question}]
    return ask("/v1/chat/completions", messages=messages, **fields)["choices"][0]["message"]["content"]


def holds_to_weather(arguments: dict[str, Any] | str) -> bool:
    """Return whether arguments of the tool satisfy its schema."""
    read = json.loads(arguments) if isinstance(arguments, str) else arguments
    return read.keys() == ENUMS.keys() and all(read[name] in values for name, values in ENUMS.items())


def _report(line: dict[str, Any]) -> None:
    with open(os.environ["ZOO_REPORT"], "a", encoding="utf-8") as report:
        report.write(json.dumps(line) + "\n")
