"""Checks of schemas: whether they are enforced fully, in part or not at all, and whether that is sound.

    python -m tests.unit.grammar.schema_verdicts [--questions json_wikiquestions.jsonl]

prints a table of the 300 schemas, and checks the reference answers of a file of questions. No model is used:
texts are random walks through the grammar's masks, or known values of a schema.
"""

import argparse
import json
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import numpy as np
import regex

from specinfer.errors import RequestError
from tests.unit.grammar.schema_families import cases
from tests.unit.grammar.vocabulary import END, TOKENIZER, accepts, grammar_of, ids, schema_format

MAX_TOKENS = 400
ENDS = [token for text in ('"', "}", "]", ",", "0", "a", "1", "A", "true", "null") for token in ids(text)]
FORMATS = jsonschema.FormatChecker(("email", "ipv4", "ipv6", "uuid"))
TIME = r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)"
ANSWER = {
    "type": "object",
    "properties": {"answerable": {"type": "boolean"}, "answer": {"type": "string"}},
    "required": ["answerable", "answer"],
    "additionalProperties": False,
}


@FORMATS.checks("date-time")
def _is_time(value):
    return not isinstance(value, str) or regex.fullmatch(TIME, value) is not None


@FORMATS.checks("json-pointer")
def _is_pointer(value):
    return not isinstance(value, str) or regex.fullmatch("(/([^~/]|~[01])*)*", value) is not None


def _pattern(validator, pattern, instance, schema):
    """Check `pattern` with classes such as \\p{L}, which Python's `re` lacks."""
    if isinstance(instance, str) and not regex.search(pattern, instance):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def validator_of(name, schema):
    """Return a validator of the JSON Schema draft that a case's name gives."""
    draft = jsonschema.Draft202012Validator
    if "draft" in name:
        draft = jsonschema.Draft4Validator if "draft 4" in name else jsonschema.Draft7Validator
    return jsonschema.validators.extend(draft, {"pattern": _pattern})(schema, format_checker=FORMATS)


@dataclass(frozen=True)
class Verdict:
    """How far a schema is enforced, and the texts that show a fault."""

    held: str  # whole, in part, not at all
    left_out: tuple[str, ...]
    refused_wrongly: tuple[str, ...]  # texts of values that the schema allows
    broken: tuple[str, ...]  # invalid texts that the strict grammar accepts
    walks: int = 0


def walk(grammar, seed):
    """Return a random text, biased to its end; None if it does not end within MAX_TOKENS."""
    state, rng, text = grammar.state(), np.random.default_rng(seed), []
    while len(text) < MAX_TOKENS:
        mask = state.allowed()
        assert mask.any(), TOKENIZER.decode(text)
        if mask[END] and rng.random() < 0.7:
            return TOKENIZER.decode(text)
        mask[END] = False
        ends = [token for token in ENDS if mask[token]] if len(text) > 8 and rng.random() < 0.7 else []
        quotes = [token for token in ends if token == ENDS[0] and rng.random() < 0.8]
        chosen = quotes or ends or np.flatnonzero(mask)
        if not len(chosen):
            return TOKENIZER.decode(text)
        text.append(int(rng.choice(chosen)))
        state.commit(text[-1:])
    return None


def verdict(name, case, walks=2):
    """Return the verdict of a case; validates `walks` random texts."""
    texts = [json.dumps(value, ensure_ascii=False) for value in case.valid]
    try:
        loose = grammar_of(response_format=schema_format(case.schema))
    except RequestError as error:
        return Verdict("not at all", (str(error),), (), ())
    left_out = loose.unenforced
    refused = tuple(text for text in texts if not accepts(loose, text))
    try:
        strict = grammar_of(response_format=schema_format(case.schema, strict=True))
    except RequestError:
        return Verdict("in part", left_out, refused, ())
    validator = validator_of(name, case.schema)
    written = [text for seed in range(walks) if (text := walk(strict, seed)) is not None]
    broken = [text for text in written if not validator.is_valid(json.loads(text))]
    broken += [text for text in map(json.dumps, case.invalid) if accepts(strict, text)]
    return Verdict("in part" if left_out else "whole", left_out, refused, tuple(broken), len(written))


def main() -> None:
    """Print a table of the families, and the counts of ignored keywords."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--questions", type=Path, help="JSON lines, each with a reference answer")
    args = options.parse_args()
    logging.disable(logging.WARNING)
    found = {name: verdict(name, case) for name, case in cases().items()}
    print("| family | schemas | whole | in part | not at all | refused wrongly | broken of texts |")
    print("|---|---|---|---|---|---|---|")
    families = dict.fromkeys(name.partition(":")[0] for name in found)
    for family in [*families, ""]:
        some = [one for name, one in found.items() if name.startswith(family)]
        counts = Counter(one.held for one in some)
        texts = sum(one.walks for one in some)
        row = [family or "all", len(some), *(counts[held] for held in ("whole", "in part", "not at all"))]
        row += [sum(len(one.refused_wrongly) for one in some)]
        row += [f"{sum(len(one.broken) for one in some)} of {texts}"]
        print("|", " | ".join(map(str, row)), "|")
    left_out = Counter(keyword for one in found.values() for keyword in one.left_out)
    print("left out:", ", ".join(f"{keyword} {count}" for keyword, count in left_out.most_common()))
    if args.questions is not None:
        grammar = grammar_of(response_format=schema_format(ANSWER, strict=True))
        answers = [json.loads(line)["reference"] for line in args.questions.read_text().splitlines()]
        accepted = sum(accepts(grammar, text) for text in answers)
        print(f"reference answers accepted: {accepted} of {len(answers)}")


if __name__ == "__main__":
    main()
