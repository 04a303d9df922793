"""What the head that comes with the package is asked: prompts of our own, and short ones of others.

    python benchmarks/shipped_head/prompts.py [FILE.jsonl ...] > prompts.jsonl

Ours are forms times topics (prompts.json), taken from nowhere. Forms are of the kinds of MT-Bench (writing,
role play, reasoning, mathematics, coding, extraction, science, the humanities, advice), none of its questions
among them. Of the files those rows are taken whose "prompt" is short: an answer teaches, reading a prompt
only takes time. The same lines every time.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

PER_FORM = 60  # prompts, of which some come twice and are left out
LONGEST = 350  # characters of a prompt of others


def prompts() -> Iterator[dict[str, str | int]]:
    """All prompts, in the same order every time."""
    parts = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
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
    """A form with topics and numbers."""
    words = {name: dice.choice(choices) for name, choices in topics.items()}
    others = {
        f"{name}2": dice.choice([one for one in topics[name] if one != words[name]])
        for name in ("thing", "name")
    }
    a, c, d = dice.randint(3, 12), dice.randint(2, 30), dice.randint(2, 9)
    # An equation's solution is whole, and so is the middle of three numbers.
    b = a * dice.randint(3, 9) + c
    numbers = {"a": a, "b": b, "c": c, "d": d, "e": 3 * dice.randint(4, 60), "hour": dice.randint(6, 20)}
    return form.format(**words, **others, **numbers)


def short(files: Sequence[str]) -> Iterator[dict[str, str]]:
    """The short prompts of files of JSON lines, in their order."""
    for file in files:
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            if len(prompt := json.loads(line)["prompt"]) < LONGEST:
                yield {"prompt": prompt}


def main() -> None:
    """Print them."""
    for row in (*prompts(), *short(sys.argv[1:])):
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
