"""Prompts for training heads: our own, and short ones of data sets with a suitable licence.

    python benchmarks/head_recipes/prompts.py chat|code [FILE.jsonl ...] > prompts.jsonl

    chat   forms times topics (chat.json), of the kinds of MT-Bench (writing, role play, reasoning,
           mathematics, coding, extraction, science, the humanities, advice, and others), then those of files
    code   functions (code.json: name, parameters, result, purpose, a call and its result), each to be
           completed, written, tested and translated, mixed with prompts of files

Our prompts contain none of MT-Bench's or HumanEval's. Rows of files count if their "prompt" is short:
answers train the head, while reading a prompt only takes time. The output is deterministic.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

Row = dict[str, str | int]

PER_FORM: Final = 100  # prompts; repeated ones are left out
LONGEST: Final = 350  # max characters of a prompt from a file
OTHERS: Final = 2  # prompts from files after each function, while there are any

TYPING: Final = ("Any", "Dict", "List", "Optional", "Tuple")
FUNCTIONS: Final = (
    '{imports}def {name}({parameters}) -> {result}:\n    """ {does}\n    >>> {call}\n    {gives}\n    """\n',
    '{imports}def {name}({parameters}) -> {result}:\n    """\n    {does}\n\n    {call} -> {gives}\n    """\n',
    "def {name}({names}):\n    '''{does}\n    {call} == {gives}\n    '''\n",
    "Write a Python function `{name}({names})`. {does} For example, `{call}` gives `{gives}`.",
    'Write unit tests with pytest for this:\n\ndef {name}({parameters}) -> {result}:\n    """{does}"""',
    "Write this function in JavaScript, with a comment that explains it: {name}({names}). {does}",
    "How would you write `{name}({parameters}) -> {result}` in Python? {does} Explain its complexity.",
    "Write a Java method that does the following, and a main method that tries it: {does}",
)


def chat() -> Iterator[Row]:
    """Yield all forms times topics, in a fixed order."""
    parts = _read("chat.json")
    dice = random.Random(14)
    seen: set[str] = set()
    for category, forms in parts["forms"].items():
        for form in forms:
            for _ in range(PER_FORM):
                text = filled(form, parts["topics"], dice)
                if text not in seen:
                    seen.add(text)
                    yield {"question_id": len(seen), "category": category, "prompt": text}


def filled(form: str, topics: Mapping[str, Sequence[str]], dice: random.Random) -> str:
    """Return a form filled with topics and numbers."""
    words = {name: dice.choice(choices) for name, choices in topics.items()}
    others = {
        f"{name}2": dice.choice([one for one in topics[name] if one != words[name]])
        for name in ("thing", "name")
    }
    a, c, d = dice.randint(3, 12), dice.randint(2, 30), dice.randint(2, 9)
    # The solution of the equation and the middle of three numbers are integers.
    b = a * dice.randint(3, 9) + c
    numbers = {"a": a, "b": b, "c": c, "d": d, "e": 3 * dice.randint(4, 60), "hour": dice.randint(6, 20)}
    return form.format(**words, **others, **numbers)


def code() -> Iterator[Row]:
    """Yield all tasks about functions, form by form."""
    for form in FUNCTIONS:
        for name, parameters, result, does, call, gives in _read("code.json"):
            signature = f"{parameters} -> {result}"
            used = ", ".join(one for one in TYPING if re.search(rf"\b{one}\b", signature))
            text = form.format(
                imports=f"from typing import {used}\n\n" if used else "",
                name=name,
                parameters=parameters,
                names=", ".join(one.split(":")[0] for one in parameters.split(", ") if ":" in one),
                result=result,
                does=does,
                call=call,
                gives=gives,
            )
            yield {"category": "code", "prompt": text}


def short(files: Sequence[str]) -> Iterator[Row]:
    """Yield the short prompts of JSON lines files, in their order."""
    for file in files:
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            if len(prompt := json.loads(line)["prompt"]) < LONGEST:
                yield {"prompt": prompt}


def in_turns(ours: Iterable[Row], others: Iterable[Row]) -> Iterator[Row]:
    """Yield one of `ours`, then `OTHERS` of `others`, until both end."""
    theirs = iter(others)
    for own in ours:
        yield own
        yield from islice(theirs, OTHERS)
    yield from theirs


def main() -> None:
    """Print the prompts for a kind of head."""
    known = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known.add_argument("kind", choices=("chat", "code"))
    known.add_argument("files", nargs="*", metavar="FILE.jsonl")
    args = known.parse_args()
    others = short(args.files)
    for row in chain(chat(), others) if args.kind == "chat" else in_turns(code(), others):
        sys.stdout.write(json.dumps(row) + "\n")


def _read(name: str) -> Any:
    return json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
