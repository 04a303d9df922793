"""Grammars against a byte-level vocabulary of the 256 bytes and the words below."""

import json
import re
import tracemalloc
from datetime import date
from functools import cache
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.errors import RequestError
from specinfer.grammar.cursor import Cursor
from specinfer.grammar.grammar import CACHED_GRAMMARS, CACHED_MASKS, GrammarCompiler, GrammarState
from specinfer.structured_output import structured_output
from specinfer.tokenizer import Tokenizer
from specinfer.tokenizer.gguf_vocabulary import read_vocabulary
from tests.unit.tokenizer.made_up import byte_level_header, sentencepiece_header

SCHEMAS = json.loads((Path(__file__).parent / "schemas.json").read_text())
WORDS = ('{"', '":', '",', "true", "false", "null", "name", "na", "12", "\u00d6l", "\U0001f600", "yes", "no")
PADDING = 7  # logits beyond the tokenizer's ids


def tokenizer_of(header):
    vocabulary = read_vocabulary(header)
    return Tokenizer(
        vocabulary.backend, eos_token_ids=vocabulary.eos_token_ids, bos_token_id=vocabulary.bos_token_id
    )


TOKENIZER = tokenizer_of(byte_level_header(words=WORDS, eos_token_id=None))
SPECIAL = {name: TOKENIZER.encode(name)[0] for name in ("<|bos|>", "<|im_end|>", "<tool>")}
END = SPECIAL["<|im_end|>"]
TOKENIZER.eos_token_ids = frozenset({END})
VOCAB = TOKENIZER.vocab_size + PADDING
COMPILER = GrammarCompiler(TOKENIZER, VOCAB)


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}


def grammar_of(**asked):
    return COMPILER.compile(structured_output(**asked))


def ids(text):
    return TOKENIZER.encode(text, add_special=False)


def accepts(grammar, text):
    """Whether the text, byte by byte, is legal and may end."""
    state = grammar.state()
    for byte in text.encode():
        if not state.permits((), byte_id(byte)):
            return False
        state.commit([byte_id(byte)])
    return state.permits((), END)


@cache
def byte_id(byte):
    return next(i for i in range(256) if TOKENIZER.token_bytes[i] == bytes([byte]))


def legal(state, path=()):
    return {
        TOKENIZER.decode([i]) if i != END else "END" for i in np.flatnonzero(state.allowed(path)).tolist()
    }


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        (
            {"response_format": {"type": "json_object"}},
            ["{}", '{"a": [1, {"b": null}]}', '{\n  "a": "\u00d6\\n"\n}'],
            ["[]", "3", '{"a": }', "{}}", '{"a" \n\n\n: 1}'],
        ),
        (
            {"response_format": schema_format({"type": "array", "items": {"enum": ["x", 1]}, "maxItems": 2})},
            ["[]", '["x"]', '["x", 1]'],
            ["[2]", "[1, 1, 1]", "{}"],
        ),
        ({"regex": r"\d{3}-\d{4}"}, ["123-4567"], ["123-456", "1234567", "123-45678"]),
        ({"regex": "a/b\n\"c'|\\\\d"}, ["a/b\n\"c'", "\\d"], ["a/b", "d"]),
        ({"regex": "^(yes|no)$"}, ["yes", "no"], ["", "yesno"]),
        ({"regex": "[a-z]*"}, ["", "abc"], ["A"]),
        (
            {"choice": ["yes", "no", "none", '\u00d6l/"\\']},
            ["yes", "no", "none", '\u00d6l/"\\'],
            ["", "ye", "non"],
        ),
        ({"choice": ["a|b", "c*"]}, ["a|b", "c*"], ["a", "b", "cc"]),
        ({"grammar": 'start: "hi" " "+ NAME\nNAME: /[A-Z][a-z]*/'}, ["hi Bo", "hi  X"], ["hi", "hi bo"]),
        ({"grammar": 'root ::= [a-z]+ "x" | "1"'}, ["ax", "xxx", "1"], ["x", "a", "1x"]),
        ({"grammar": 'root ::= "(" root? ")" | [a-z]+ "x"'}, ["()", "(())", "(abx)", "axx"], ["(", "(a)"]),
        ({"grammar": "root ::= [^a\\u00d6]{2} ."}, ["bc\n", "\u00e4b\U0001f600"], ["abc", "\u00d6bc", "bc"]),
    ],
)
def test_texts_of_the_form_and_no_others_are_legal(asked, good, bad):
    grammar = grammar_of(**asked)
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


def test_masks_name_the_tokens_that_may_follow():
    state = grammar_of(choice=["yes", "no", "none"]).state()
    assert legal(state) == {"y", "ye", "yes", "n", "no"}
    assert legal(state, ids("no")) == {"END", "n"}
    assert legal(state, ids("yes")) == {"END"}
    assert legal(state, [*ids("yes"), END]) == set()
    assert legal(state, ids("true")) == set()  # a path that is not legal itself


def test_end_of_text_special_and_padding_ids_are_never_text():
    state = grammar_of(regex="(?s:.)*").state()
    allowed = np.flatnonzero(state.allowed()).tolist()
    text_ids = [i for i in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes[i]]
    assert END in allowed
    assert SPECIAL["<tool>"] in allowed
    assert set(allowed) < {*text_ids, END}
    assert state.allowed().shape == (VOCAB,)
    for token in (SPECIAL["<|bos|>"], VOCAB - 1, VOCAB, -1):
        assert not state.permits((), token)
        assert not state.permits(ids("a"), token)
        assert not state.permits((token,), ids("a")[0])


def test_a_lark_grammar_may_name_a_special_token_but_not_the_end():
    state = grammar_of(grammar='start: <|bos|> "a" <[*]>').state()
    assert np.flatnonzero(state.allowed()).tolist() == [SPECIAL["<|bos|>"]]
    assert END not in np.flatnonzero(state.allowed([SPECIAL["<|bos|>"], *ids("a")]))
    with pytest.raises(RequestError, match=r"grammar cannot be used: .*unknown special token"):
        grammar_of(grammar="start: <|im_end|>")


def test_masks_are_kept_within_a_step(monkeypatch):
    state, made, make = grammar_of(choice=["yes", "no"]).state(), [], GrammarState._mask
    monkeypatch.setattr(GrammarState, "_mask", lambda self, matcher: made.append(1) or make(self, matcher))
    first = state.allowed(ids("n"))
    expected, first[:] = first.copy(), True  # the caller's own
    np.testing.assert_array_equal(state.allowed(ids("n")), expected)
    assert state.permits(ids("n"), ids("o")[0])
    state.commit(ids("n"))
    np.testing.assert_array_equal(state.allowed(), expected)  # the path became text; its mask is the root's
    assert len(made) == 1
    state.commit(ids("o"))
    state.allowed()
    assert len(made) == 2


def test_masks_are_kept_as_bits():
    vocab = 152_000
    state = GrammarCompiler(TOKENIZER, vocab).compile(structured_output(regex="(?s:.)*")).state()
    paths = [[byte_id(a), byte_id(b)] for a in range(32, 48) for b in range(32, 50)]
    assert len(paths) > CACHED_MASKS
    state.allowed(paths[0])
    tracemalloc.start()
    for path in paths:
        assert state.allowed(path)[END]
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < CACHED_MASKS * (vocab // 8 + 1000)


@pytest.mark.parametrize("vocab", [VOCAB, *range(END + 1, END + 10), 1000])
def test_masks_are_the_librarys_bit_for_bit_but_for_what_is_no_text_and_the_end(vocab):
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


def test_a_walk_and_siblings_do_not_disturb_each_other():
    #     ""        walk: "", n, no; siblings: y, n; then the other branch and back
    #    /  \
    #   y    n
    #        |
    #        o
    state = grammar_of(choice=["yes", "no", "none"]).state()
    n, o, y = byte_id(ord("n")), byte_id(ord("o")), byte_id(ord("y"))
    assert legal(state) == {"y", "ye", "yes", "n", "no"}
    assert legal(state, [n]) == {"o"}
    assert legal(state, [n, o]) == {"END", "n"}
    assert legal(state, [y]) == {"e"}
    assert state.permits([n, o], n)
    assert not state.permits([n, o], o)
    assert not state.permits([y, o], n)
    state.commit([n])
    assert state.permits([o], END)
    state.commit([o, END])
    assert state.finished


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


def test_text_that_is_forced_is_spelled_as_the_tokenizer_spells_it():
    state = grammar_of(response_format=schema_format({"const": {"name": True, "n": None}})).state()
    path = ids('{"n')
    assert [TOKENIZER.decode([token]) for token in state.forced(ids('{"'), 9)] == ["name"]
    assert state.forced(path, 9) != ()
    assert state.forced((), 9) == ()  # { and {" both may begin the text
    assert state.forced(ids('{"'), 0) == ()
    assert state.forced(ids("yes"), 9) == ()  # not legal
    assert legal(state, ids('{"')) == {"n", "na", "nam", "name"}  # the matcher stands where it stood


@pytest.mark.parametrize(
    "text", ["yes, no name", "say <|im_end|> now", "\u00d6l \U0001f600 \u00e4", "<tool>x", "12\n12"]
)
def test_forced_tokens_are_legal_and_spell_the_text(text):
    state = grammar_of(choice=[text]).state()
    forced = state.forced((), 1000)
    assert TOKENIZER.decode(forced) == text
    if "<|" not in text:  # what reads like a special token is spelled in bytes
        assert list(forced) == ids(text)
    for i in range(len(forced)):
        assert state.permits(forced[:i], forced[i])
        assert state.forced(forced[:i], 3) == forced[i : i + 3] or "<|" in text
    assert state.permits(forced, END)
    assert state.forced(forced, 3) == ()


def test_long_forced_text_is_found_once_and_checked_no_further_than_asked(monkeypatch):
    text, asked, ask = "yes " * 6000, [], Cursor.ask  # more than one automaton can follow
    state, expected = grammar_of(choice=[text]).state(), ids(text)
    monkeypatch.setattr(Cursor, "ask", lambda *args: asked.append(len(args[1])) or ask(*args))
    for step in range(100):
        forced = state.forced((), 8)
        assert list(forced) == expected[8 * step : 8 * step + 8]
        state.commit(forced)
    assert asked == [0, *[8] * 100]


def test_forced_text_that_is_left_for_another_spelling_is_found_anew():
    text = "yes " * 600
    state = grammar_of(choice=[text]).state()
    assert list(state.forced((), 4)) == ids("yes yes ")
    state.commit([byte_id(ord("y")), *ids("es ")])
    assert TOKENIZER.decode(state.forced((), 2000)) == text[4:]
    state.commit(ids("yes " * 500))
    assert TOKENIZER.decode(state.forced((), 2000)) == text[4 + 2000 :]
    assert TOKENIZER.decode(state.forced(ids("yes "), 2)) == "yes "


def test_a_sentencepiece_vocabulary_is_followed_too():
    tokenizer = tokenizer_of(
        sentencepiece_header(
            ["\u2581", *"yesno", "ye", "yes", "\u2581n", "\u2581no", "\u2581ye", "\u2581yes"]
        )
    )
    state = (
        GrammarCompiler(tokenizer, tokenizer.vocab_size).compile(structured_output(choice=["yes no"])).state()
    )
    forced = state.forced((), 9)
    assert [tokenizer.id_to_token(token) for token in forced] == ["yes", "\u2581no"]
    assert state.permits((), tokenizer.encode("yes", add_special=False)[0]) is False  # it has a space
    state.commit(forced)
    assert state.finished
    assert np.flatnonzero(state.allowed()).tolist() == sorted(tokenizer.eos_token_ids)


def test_finished_is_when_only_the_end_may_follow():
    state = grammar_of(choice=["no", "none"]).state()
    assert not state.finished
    state.commit(ids("no"))
    assert not state.finished  # "none" is still possible
    state.commit(ids("ne"))
    assert state.finished
    state.commit([END])
    assert state.finished
    assert not state.allowed().any()


def test_an_illegal_commit_is_a_bug_of_ours():
    state = grammar_of(choice=["no", "none"]).state()
    state.commit(ids("now"))
    with pytest.raises(AssertionError, match="not allowed by choice"):
        state.allowed()
    state = grammar_of(choice=["no", "none"]).state()
    with pytest.raises(AssertionError, match="may not end here"):
        state.commit([END])


def test_compiled_grammars_are_kept_and_the_oldest_are_let_go():
    compiler = GrammarCompiler(TOKENIZER, VOCAB)
    first = compiler.compile(structured_output(regex="a"))
    assert compiler.compile(structured_output(regex="a")) is first
    for i in range(CACHED_GRAMMARS):
        compiler.compile(structured_output(regex=f"b{i}"))
    assert compiler.compile(structured_output(regex="a")) is not first


@cache
def schema_grammar(name):
    schema = next(entry["schema"] for entry in SCHEMAS if entry["name"] == name)
    return grammar_of(response_format=schema_format(schema)), schema


def legal_document(grammar, seed):
    """Token ids from a random walk that soon prefers what closes something."""
    state, rng, document = grammar.state(), np.random.default_rng(seed), []
    closing = np.array([token for text in ('"', "}", "]", '",', "a", "0") for token in ids(text)])
    while True:
        mask = state.allowed()
        assert mask.any(), TOKENIZER.decode(document)
        if mask[END]:
            return document
        wanted = closing[mask[closing]] if len(document) > 10 and rng.random() < 0.8 else closing[:0]
        document.append(int(rng.choice(wanted[:1] if wanted.size else np.flatnonzero(mask))))
        state.commit(document[-1:])
        assert len(document) < 2000, TOKENIZER.decode(document)


CHECKED_FORMATS = jsonschema.FormatChecker(("email", "ipv4", "ipv6", "uuid"))


@CHECKED_FORMATS.checks("date", raises=ValueError)
def is_date(value):
    """RFC 3339 has a year 0000, a leap year; Python has not."""
    return not isinstance(value, str) or bool(date.fromisoformat(re.sub("^0000", "2000", value)))


def test_there_are_a_hundred_schemas():
    assert len({entry["name"] for entry in SCHEMAS}) == len(SCHEMAS) == 100


@pytest.mark.parametrize("name", [entry["name"] for entry in SCHEMAS])
def test_every_document_of_a_schema_is_valid(name):
    grammar, schema = schema_grammar(name)
    validator = jsonschema.Draft202012Validator(schema, format_checker=CHECKED_FORMATS)
    for seed in range(3):
        validator.validate(json.loads(TOKENIZER.decode(legal_document(grammar, seed))))


@given(
    name=st.sampled_from(["person", "tree", "tuple", "unicode_keys", "one_of_by_const", "anything"]),
    seed=st.integers(0, 3),
    cut=st.integers(0, 30),
    looks=st.lists(st.tuples(st.integers(0, 6), st.integers(0, VOCAB - 1)), max_size=6),
)
def test_looking_around_equals_a_new_matcher_that_consumed_everything(name, seed, cut, looks):
    grammar, _ = schema_grammar(name)
    document = legal_document(grammar, seed)
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


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"regex": "(a"}, "regex cannot be used: .*unclosed group; allowed: Rust's regex syntax"),
        ({"regex": "(?=a)b"}, "regex cannot be used: .*look-around"),
        ({"regex": r"(a)\1"}, "regex cannot be used: .*backreferences"),
        ({"regex": r"[^\x00-\x{10ffff}]"}, "regex cannot be met: nothing can follow ''"),
        ({"regex": "(x{1000}){1000}"}, "regex repeats a part 1000000 times, .*allowed: at most 100000"),
        ({"grammar": "start: lost"}, 'grammar cannot be used: .*unknown name: "lost"'),
        ({"grammar": "   "}, "grammar cannot be used: "),
        ({"grammar": 'start: start "a"'}, "grammar cannot be met: nothing can follow ''"),
        ({"grammar": "start: b\nb: c\nc: b"}, "grammar cannot be met: nothing can follow ''"),
        ({"grammar": 'root ::= root "a"'}, "grammar cannot be met: nothing can follow ''"),
        ({"grammar": "root ::= lost"}, "grammar: rule root uses lost"),
        ({"grammar": "start: A\nA: /b/ & /c/"}, "grammar cannot be met: nothing can follow ''"),
        ({"grammar": 'start: "a" A\nA: /b/ & /c/'}, "grammar cannot be met: nothing can follow 'a'"),
        ({"grammar": "start: a\na[max_tokens=3]: /.*/"}, "rule a has the option max_tokens"),
    ],
)
def test_forms_that_cannot_be_followed_are_refused(asked, message):
    with pytest.raises(RequestError, match=message) as caught:
        grammar_of(**asked)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum .5. is greater than maximum .3."),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "incompatible types"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "'a' is unsatisfiable"),
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "text"}, "Invalid type: text"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "Unimplemented keys: ..not"),
        ({"type": "string", "format": "poem"}, "Unknown format: poem"),
        ({"type": "string", "pattern": "(a"}, "unclosed group"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"$ref": "http://example.com/schema"}, "example.com"),
        ({"$ref": "#"}, "nothing can follow ''"),
        (json.loads('{"items":' * 150 + "{}" + "}" * 150), "recursion limit"),
    ],
)
def test_schemas_that_cannot_be_met_or_followed_are_refused(schema, message):
    with pytest.raises(RequestError, match=rf"response_format cannot be (used|met): .*{message}") as caught:
        grammar_of(response_format=schema_format(schema))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "asked",
    [
        {"grammar": 'start: "a" start'},
        {"grammar": 'root ::= "yes" root'},
        {"grammar": 'root ::= "a" | "b" list\nlist ::= [c-e] list'},
        {
            "response_format": schema_format(
                {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
            )
        },
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


def rules(count, rule, last, begin):
    return "\n".join([begin, *(rule.format(i, i + 1) for i in range(count)), last.format(count)])


def nested(depth, schema):
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.parametrize(
    ("asked", "good"),
    [
        ({"grammar": rules(15_000, "r{}: r{}", 'r{}: "x"', "start: r0")}, "x"),
        ({"grammar": rules(200, "r{}: " + "(" * 25 + "r{}" + ")" * 25, 'r{}: "x"', "start: r0")}, "x"),
        ({"grammar": rules(15_000, "R{}: R{}", 'R{}: "x"', "start: R0")}, "x"),
        ({"grammar": rules(40, "r{0} ::= r{1} r{1}", 'r{} ::= "x"?', "root ::= r0")}, "xxx"),
        ({"grammar": rules(200, "r{} ::= r{} root?", 'r{} ::= "x"', "root ::= r0")}, "xxx"),
        ({"grammar": "\n" * 200_000 + 'start: "x"'}, "x"),
        (
            {
                "response_format": schema_format(
                    {
                        "$ref": "#/$defs/d0",
                        "$defs": {
                            **{f"d{i}": nested(20, {"$ref": f"#/$defs/d{i + 1}"}) for i in range(200)},
                            "d200": {"type": "null"},
                        },
                    }
                )
            },
            '{"a":' * 4000 + "null" + "}" * 4000,
        ),
    ],
    ids=["rules", "parts", "terminals", "doubled", "recursive", "lines", "references"],
)
def test_large_forms_are_followed_too(asked, good):
    assert accepts(grammar_of(**asked), good)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"grammar": "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000}, "too deep inside one another"),
        ({"grammar": 'root ::= "a"' + "*" * 50_000}, "too deep inside one another"),
        ({"grammar": rules(10_000, "r{} ::= r{}", 'r{} ::= "x"', "root ::= r0")}, "too deep inside"),
        ({"grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000}, "too deeply nested"),
        ({"grammar": "start: " + "a[" * 50_000}, "grammar cannot be used"),
        ({"regex": "(" * 50_000 + "a" + ")" * 50_000}, "regex cannot be used"),
        ({"regex": r"\p{" * 50_000}, "regex cannot be used"),
    ],
)
def test_forms_too_deep_or_too_broken_are_refused_at_once(asked, message):
    with pytest.raises(RequestError, match=message):
        grammar_of(**asked)


def test_a_vocabulary_that_lacks_what_must_come_is_refused():
    tokenizer = tokenizer_of(byte_level_header())
    tokenizer.eos_token_ids = frozenset({7})
    with pytest.raises(RequestError, match="response_format cannot be met: nothing can follow ''"):
        GrammarCompiler(tokenizer, 64).compile(structured_output({"type": "json_object"}))


EXPLODES = "(.{0,90}a.{0,90}b){9}"  # after some 80 characters of a and b


def test_a_grammar_that_becomes_too_complex_fails_one_request_and_no_other():
    grammar = grammar_of(regex=EXPLODES)
    rng = np.random.default_rng(0)
    text = [byte_id(byte) for byte in rng.choice([ord("a"), ord("b")], 400)]
    greedy, modest = grammar.state(), grammar.state()
    modest.commit(text[:20])
    expected = modest.allowed(text[20:25]).copy()
    with pytest.raises(RequestError, match="regex is too complex to follow"):
        visit_every_node(greedy, text)
    modest.commit(text[20:25])
    np.testing.assert_array_equal(modest.allowed(), expected)
    np.testing.assert_array_equal(grammar.state().allowed(), greedy.allowed())


@pytest.mark.parametrize(
    "regex", ["(([ab]{1,30}c?){1,40}){1,40}", "(a?){500}a{500}", "((a|ab|ba){1,50}){50}"]
)
def test_a_grammar_that_breaks_after_a_commit_says_so_when_it_is_next_asked(regex):
    state = grammar_of(regex=regex).state()
    with pytest.raises(RequestError, match="regex is too complex to follow"):
        commit_one_by_one(state, [byte_id(ord("a"))] * 600)


def commit_one_by_one(state, text):
    for token in text:
        state.commit([token])
        state.forced((), 3)
        state.allowed()


def test_what_one_request_wears_out_another_does_not_notice():
    grammar, a = grammar_of(regex="((a|ab|ba){1,50}){50}"), byte_id(ord("a"))
    greedy, modest = grammar.state(), grammar.state()
    with pytest.raises(RequestError, match="regex is too complex to follow"):
        visit_every_node(greedy, [a] * 600)
    modest.commit([a])  # into an automaton that is full
    np.testing.assert_array_equal(modest.allowed([a]), grammar.state().allowed([a, a]))
    assert modest.permits([a], a)


def visit_every_node(state, path):
    for depth in range(len(path)):
        state.allowed(path[:depth])


def test_a_grammar_does_not_wear_out():
    grammar = grammar_of(regex=EXPLODES)
    rng = np.random.default_rng(1)
    for _ in range(12):  # together they need more than one automaton holds
        state = grammar.state()
        text = [byte_id(byte) for byte in rng.choice([ord("a"), ord("b")], 50)]
        visit_every_node(state, text)
        state.commit(text)
