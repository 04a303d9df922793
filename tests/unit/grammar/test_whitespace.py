"""White space between the parts of JSON follows the option, whatever a model prefers."""

import itertools
import json

import numpy as np

from tests.unit.grammar.vocabulary import END, TOKENIZER, accepts, byte_id, grammar_of, ids, schema_format

BLANKS = [byte_id(byte) for byte in b" \n\t\r"]
NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": ["null", "boolean"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMS = {
    "schema": {"response_format": schema_format(NUMBERS)},
    "strict schema": {"response_format": schema_format(NUMBERS, strict=True)},
    "behind a preamble": {"response_format": schema_format(NUMBERS), "preamble": 'preamble: "="?'},
}


def blank_text(grammar, seed):
    """Return a text with a blank at every position that allows one."""
    state, rng, text = grammar.state(), np.random.default_rng(seed), []
    while True:
        mask = state.allowed()
        if mask[END]:
            return TOKENIZER.decode(text)
        blanks = [token for token in BLANKS if mask[token]]
        closing = [token for one in ("]", "}", ",", "0", "null") for token in ids(one) if mask[token]]
        text.append(int(rng.choice(blanks or closing or np.flatnonzero(mask))))
        state.commit(text[-1:])
        assert len(text) < 2000, TOKENIZER.decode(text)


def runs(text):
    return [len(list(run)) for is_blank, run in itertools.groupby(text, str.isspace) if is_blank]


def test_a_text_of_blanks_comes_to_its_end():
    for form, seed in itertools.product(FORMS, range(3)):
        text = blank_text(grammar_of(**FORMS[form]), seed)
        assert set(json.loads(text.lstrip("="))) == {"a", "b"}, (form, seed)
        assert 5 < len(runs(text)) < 30, (form, seed)
        assert max(runs(text)) <= 33, (form, seed)  # a line break and indentation


PRETTY = {
    "compact": '{"a":[1,2],"b":null}',
    "usual": '{"a": [1, 2], "b": null}',
    "spaced": '{ "a": [ 1, 2 ], "b": null }',
    "indented": json.dumps({"a": [1, 2], "b": None}, indent=4),
    "by tabs": json.dumps({"a": [1, 2], "b": None}, indent="\t"),
    "two spaces": '{"a":  [1, 2], "b": null}',
    "an empty line": '{\n\n"a": [1, 2], "b": null}',
    "carriage returns": '{\r\n"a": [1, 2], "b": null}',
}


TAKEN = {
    "bounded": {"compact", "usual", "spaced", "indented", "by tabs"},
    "any": set(PRETTY),
    "none": {"compact"},
}


def test_white_space_follows_the_option():
    for form, (whitespace, taken) in itertools.product(FORMS, TAKEN.items()):
        grammar = grammar_of(**FORMS[form], json_whitespace=whitespace)
        found = {name for name, text in PRETTY.items() if accepts(grammar, text)}
        assert found == taken, (form, whitespace)
