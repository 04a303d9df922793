"""Masks, single tokens, parallel paths, forced text, white space, commits and the end of grammars."""

import itertools
import json
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.errors import RequestError
from specinfer.grammar.grammar import Cursor, GrammarCompiler
from specinfer.grammar.lark import lark_of_gbnf
from specinfer.structured_output import structured_output
from specinfer.tokenizer.gguf_vocabulary import read_vocabulary
from tests.schemas import closed
from tests.unit.grammar import vocabulary as words
from tests.unit.grammar.vocabulary import END, TOKENIZER, accepts, byte_id, grammar_of, ids, schema_format
from tests.unit.tokenizer.made_up import sentencepiece_header


def test_texts_of_the_form_and_no_others_are_legal():
    json_object = {"response_format": {"type": "json_object"}}
    few = schema_format({"type": "array", "items": {"enum": ["x", 1]}, "maxItems": 2})
    spaced = 'preamble: (/[^;]*/ ";" form)?\nform: " "'
    named = {"grammar": 'start: "{" preamble "}" // }\npreamble: "x"', "preamble": 'preamble: "a"*'}
    quoted = ["yes", "no", "none", '\u00d6l/"\\']
    for asked, good, bad in (
        (
            json_object,
            ["{}", '{"a": [1, {"b": null}]}', '{\n  "a": "\u00d6\\n"\n}'],
            ["[]", "3", '{"a": }', "{}}", '{"a" \n\n\n: 1}'],
        ),
        ({"response_format": few}, ["[]", '["x"]', '["x", 1]'], ["[2]", "[1, 1, 1]", "{}"]),
        ({"regex": r"\d{3}-\d{4}"}, ["123-4567"], ["123-456", "1234567", "123-45678"]),
        ({"regex": "a/b\n\"c'|\\\\d"}, ["a/b\n\"c'", "\\d"], ["a/b", "d"]),
        ({"regex": "^(yes|no)$"}, ["yes", "no"], ["", "yesno"]),
        ({"regex": "[a-z]*"}, ["", "abc"], ["A"]),
        ({"choice": quoted}, quoted, ["", "ye", "non"]),
        ({"choice": ["a|b", "c*"]}, ["a|b", "c*"], ["a", "b", "cc"]),
        ({"grammar": 'start: "hi" " "+ NAME\nNAME: /[A-Z][a-z]*/'}, ["hi Bo", "hi  X"], ["hi", "hi bo"]),
        ({"grammar": 'root ::= [a-z]+ "x" | "1"'}, ["ax", "xxx", "1"], ["x", "a", "1x"]),
        ({"grammar": 'root ::= "(" root? ")" | [a-z]+ "x"'}, ["()", "(())", "(abx)", "axx"], ["(", "(a)"]),
        (
            {"regex": "[a-z]{2}", "preamble": spaced},  # names are each one's own
            ["ab", "A1; ab", "; ab"],
            [" ab", "A1;ab", "A1;  ab", "A1; ab;", "A1; "],
        ),
        (named, ["{x}", "aa{x}"], ["aa", "{a}", "a{}"]),
        ({"choice": ["b", "c"], "preamble": "preamble: /a+/"}, ["ab", "aac"], ["b", "a", "abb"]),
        ({"grammar": 'root ::= "b"', "preamble": "preamble: /a+/"}, ["ab"], ["b"]),
        (json_object | {"preamble": "preamble: /a*/"}, ["a{}", "{}"], ["a []", "a {}"]),
        ({"grammar": "root ::= [^a\\u00d6]{2} ."}, ["bc\n", "\u00e4b\U0001f600"], ["abc", "\u00d6bc", "bc"]),
    ):
        grammar = grammar_of(**asked)
        assert [text for text in good if not accepts(grammar, text)] == [], asked
        assert [text for text in bad if accepts(grammar, text)] == [], asked


def test_end_of_text_special_and_padding_ids_are_never_text():
    state = grammar_of(regex="(?s:.)*").state()
    allowed = np.flatnonzero(state.allowed()).tolist()
    text_ids = [i for i in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes[i]]
    assert END in allowed
    assert words.SPECIAL["<tool>"] in allowed
    assert set(allowed) < {*text_ids, END}
    assert state.allowed().shape == (words.VOCAB,)
    for token in (words.SPECIAL["<|bos|>"], words.VOCAB - 1, words.VOCAB, -1):
        assert not state.permits((), token)
        assert not state.permits(ids("a"), token)
        assert not state.permits((token,), ids("a")[0])


def test_a_lark_grammar_may_name_a_special_token_but_not_the_end():
    state = grammar_of(grammar='start: <|bos|> "a" <[*]>').state()
    assert np.flatnonzero(state.allowed()).tolist() == [words.SPECIAL["<|bos|>"]]
    assert END not in np.flatnonzero(state.allowed([words.SPECIAL["<|bos|>"], *ids("a")]))
    with pytest.raises(RequestError, match=r"grammar cannot be used: .*unknown special token"):
        grammar_of(grammar="start: <|im_end|>")


@pytest.mark.parametrize("vocab", [words.VOCAB, *range(END + 1, END + 10), 1000])
def test_masks_equal_the_librarys_except_for_special_tokens_and_the_end(vocab):
    grammar = GrammarCompiler(TOKENIZER, vocab).compile(structured_output(regex="(yes|no|(?s:.)\u00d6l?)*"))
    state = grammar.state()
    textless = [i for i in range(vocab) if not grammar.vocabulary.is_text(i)]
    for text in ("", "yes", "ye", "x", "x\u00d6", "nono"):
        path = ids(text)
        matcher = grammar.exact.first.deep_copy()
        assert matcher.consume_tokens(path) or not path
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        expected = np.unpackbits(bits, count=vocab, bitorder="little").astype(bool)
        expected[textless] = False
        expected[END] = matcher.is_accepting()
        np.testing.assert_array_equal(state.allowed(path), expected)
        assert state.allowed(path).dtype == np.bool_
        assert [state.permits(path, i) for i in range(-1, vocab + 1)] == [False, *expected, False]


def test_characters_may_be_split_between_tokens():
    state = grammar_of(regex="[\U0001f600\u00d6]+x").state()
    first, *rest = [byte_id(byte) for byte in "\U0001f600".encode()]
    assert state.permits((), ids("\U0001f600")[0])  # one token of four bytes
    assert state.permits((), first)
    assert state.permits([first], rest[0])
    assert not state.permits([first], first)
    assert not state.permits([first], END)
    assert not state.permits([first], byte_id(ord("x")))
    assert state.permits([first, *rest], byte_id(ord("x")))
    state.commit([first, rest[0]])
    assert np.flatnonzero(state.allowed()).tolist() == [rest[1]]


def test_a_sentencepiece_vocabulary_is_followed_too():
    pieces = ["\u2581", *"yesno", "ye", "yes", "\u2581n", "\u2581no", "\u2581ye", "\u2581yes"]
    tokenizer = read_vocabulary(sentencepiece_header(pieces))
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    state = compiler.compile(structured_output(choice=["yes no"])).state()
    forced = state.forced((), 9)
    assert [tokenizer.id_to_token(token) for token in forced] == ["yes", "\u2581no"]
    assert state.permits((), tokenizer.encode("yes", add_special=False)[0]) is False  # it has a space
    state.commit(forced)
    assert state.finished
    assert np.flatnonzero(state.allowed()).tolist() == sorted(tokenizer.eos_token_ids)


def test_an_illegal_commit_is_a_bug_of_ours():
    state = grammar_of(choice=["no", "none"]).state()
    state.commit(ids("now"))
    with pytest.raises(AssertionError, match="not allowed by choice"):
        state.allowed()
    state = grammar_of(choice=["no", "none"]).state()
    with pytest.raises(AssertionError, match="may not end here"):
        state.commit([END])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "asked",
    [
        {"grammar": 'start: "a" start'},
        {"grammar": 'root ::= "yes" root'},
        {"grammar": 'root ::= "a" | "b" list\nlist ::= [c-e] list'},
        {"response_format": schema_format(closed({"a": {"$ref": "#"}}))},
        {"response_format": schema_format({"type": "array", "items": {"$ref": "#"}, "minItems": 1})},
    ],
)
def test_a_form_without_a_finite_text_goes_on_until_it_is_cut(asked):
    state, rng = grammar_of(**asked).state(), np.random.default_rng(1)
    state.commit([byte_id(ord("b"))] if "list" in asked.get("grammar", "") else [])
    for _ in range(200):
        allowed = state.allowed()
        assert not allowed[END]
        assert not state.finished
        state.commit([int(rng.choice(np.flatnonzero(allowed)))])
        assert len(state.forced((), 8)) <= 8


def test_text_that_is_forced_is_spelled_as_the_tokenizer_spells_it():
    state = grammar_of(response_format=schema_format({"const": {"name": True, "n": None}})).state()
    path = ids('{"n')
    assert [TOKENIZER.decode([token]) for token in state.forced(ids('{"'), 9)] == ["name"]
    assert state.forced(path, 9) != ()
    assert state.forced((), 9) == ()  # { and {" both may begin the text
    assert state.forced(ids('{"'), 0) == ()
    assert state.forced(ids("yes"), 9) == ()  # not legal
    assert words.legal(state, ids('{"')) == {"n", "na", "nam", "name"}  # the matcher stands where it stood


SAID = ["yes, no name", "say <|im_end|> now", "\u00d6l \U0001f600 \u00e4", "<tool>x", "12\n12"]


@pytest.mark.parametrize("text", SAID)
def test_forced_tokens_are_legal_and_spell_the_text(text):
    state = grammar_of(choice=[text]).state()
    forced = state.forced((), 1000)
    assert TOKENIZER.decode(forced) == text
    if "<|" not in text:  # the name of a special token is spelled in bytes
        assert list(forced) == ids(text)
    for i in range(len(forced)):
        assert state.permits(forced[:i], forced[i])
        assert state.forced(forced[:i], 3) == forced[i : i + 3] or "<|" in text
    assert state.permits(forced, END)
    assert state.forced(forced, 3) == ()


def test_long_forced_text_is_computed_once_and_checked_on_demand(monkeypatch):
    text, asked, query = "yes " * 6000, [], Cursor.query  # more than one automaton can follow
    state, expected = grammar_of(choice=[text]).state(), ids(text)
    monkeypatch.setattr(Cursor, "query", lambda *args: asked.append(len(args[1])) or query(*args))
    for step in range(100):
        forced = state.forced((), 8)
        assert list(forced) == expected[8 * step : 8 * step + 8]
        state.commit(forced)
    assert asked == [0, *[8] * 100]


@cache
def schema_grammar(name):
    schema = next(entry["schema"] for entry in words.SCHEMAS if entry["name"] == name)
    return grammar_of(response_format=schema_format(schema, strict=True))


@pytest.mark.thorough
@given(
    name=st.sampled_from(["person", "tree", "tuple", "unicode_keys", "one_of_by_const", "anything"]),
    seed=st.integers(0, 3),
    cut=st.integers(0, 30),
    looks=st.lists(st.tuples(st.integers(0, 6), st.integers(0, words.VOCAB - 1)), max_size=6),
)
def test_looking_around_equals_a_new_matcher_that_consumed_everything(name, seed, cut, looks):
    grammar = schema_grammar(name)
    document = words.legal_document(grammar, seed)
    text, rest = document[:cut], document[cut:]
    state = grammar.state()
    state.commit(text)
    for depth, astray in looks:
        path = rest[:depth]
        fresh = grammar.state()
        fresh.commit([*text, *path])
        assert state.permits(path, astray) == bool(fresh.allowed()[astray])
        assert not state.allowed([*path, astray]).any() or fresh.permits((), astray)
        np.testing.assert_array_equal(state.allowed(path), fresh.allowed())
        assert state.forced(path, 5) == fresh.forced((), 5)
    state.commit(rest)
    assert state.permits((), END)


BLANKS = [byte_id(byte) for byte in b" \n\t\r"]
INTEGERS = {"type": "array", "items": {"type": "integer"}}
NUMBERS = closed({"a": INTEGERS, "b": {"type": ["null", "boolean"]}})
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


BOUNDED = {"compact", "usual", "spaced", "indented", "by tabs"}
TAKEN = {"bounded": BOUNDED, "any": set(PRETTY), "none": {"compact"}}


def test_white_space_follows_the_option():
    for form, (whitespace, taken) in itertools.product(FORMS, TAKEN.items()):
        grammar = grammar_of(**FORMS[form], json_whitespace=whitespace)
        found = {name for name, text in PRETTY.items() if accepts(grammar, text)}
        assert found == taken, (form, whitespace)


BODIES = [
    # the body of a rule, texts that it matches, and texts that it does not
    ('"a" "b"', ["ab"], ["a", "abb"]),
    ('"a" | "b" |\n  "c"', ["a", "b", "c"], ["ab", ""]),
    ('"a"?', ["", "a"], ["aa"]),
    ('"a"*', ["", "aaa"], ["b"]),
    ('"a"+', ["a", "aaa"], [""]),
    ('"a"{3}', ["aaa"], ["aa", "aaaa"]),
    ('"a"{2,}', ["aa", "aaaaa"], ["a"]),
    ('"a" { 2 , 3 }', ["aa", "aaa"], ["a", "aaaa"]),
    ('("a" | "b")+', ["abba"], [""]),
    ("other", ["o"], ["other"]),
    ("[a-c] [^a-c_]", ["ax", "c-"], ["xa", "a_", "ab"]),
    (r"[-a] [b-] [\]\\^]", ["-b]", "a-\\", "a-^"], ["xb]", "ab["]),
    (r"[\x00-\x1F\u00e9\U0001F600\-]", ["\n", "\u00e9", "\U0001f600", "-"], ["e", " "]),
    ("[a-z&&b] [[/]", ["a[", "&/"], ["a]"]),
    (". .", ["\n\u00e9"], ["a"]),
    (r'"\n\t\"\\\u00e9a\x41\U0001F600"', ['\n\t"\\\u00e9aA\U0001f600'], ["n"]),
    ('"a" # a remark\\\n', ["a"], ["ab"]),
    ('"" "a"', ["a"], [""]),
    ('"a" | ""', ["a", ""], ["b"]),
]


def test_a_grammar_matches_its_texts_and_no_others():
    for body, good, bad in BODIES:
        for way, start in {"/": "body", "(": 'body | "(" root ")"'}.items():
            text = f'root ::= {start}\nother ::= "o"\nbody ::= {body}\n'
            assert lark_of_gbnf(text).startswith(f"start: {way}"), "recursion makes rules"
            grammar = grammar_of(grammar=text)
            nested = [] if way == "/" else [f"(({one}))" for one in good]
            found = {one: accepts(grammar, one) for one in [*good, *nested, *bad]}
            assert found == {one: one not in bad for one in found}, text
