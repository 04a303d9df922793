"""Masks, single tokens, parallel paths, commits and the end of grammars."""

import numpy as np
import pytest

from specinfer.errors import RequestError
from specinfer.grammar.grammar import GrammarCompiler
from specinfer.structured_output import structured_output
from specinfer.tokenizer.gguf_vocabulary import read_vocabulary
from tests.unit.grammar.vocabulary import (
    END,
    SPECIAL,
    TOKENIZER,
    VOCAB,
    accepts,
    byte_id,
    grammar_of,
    ids,
    schema_format,
)
from tests.unit.tokenizer.made_up import sentencepiece_header


def test_texts_of_the_form_and_no_others_are_legal():
    for asked, good, bad in (
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
        (
            {
                "regex": "[a-z]{2}",
                "preamble": 'preamble: (/[^;]*/ ";" form)?\nform: " "',
            },  # names are each one's own
            ["ab", "A1; ab", "; ab"],
            [" ab", "A1;ab", "A1;  ab", "A1; ab;", "A1; "],
        ),
        (
            {"grammar": 'start: "{" preamble "}" // }\npreamble: "x"', "preamble": 'preamble: "a"*'},
            ["{x}", "aa{x}"],
            ["aa", "{a}", "a{}"],
        ),
        ({"choice": ["b", "c"], "preamble": "preamble: /a+/"}, ["ab", "aac"], ["b", "a", "abb"]),
        ({"grammar": 'root ::= "b"', "preamble": "preamble: /a+/"}, ["ab"], ["b"]),
        (
            {"response_format": {"type": "json_object"}, "preamble": "preamble: /a*/"},
            ["a{}", "{}"],
            ["a []", "a {}"],
        ),
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


@pytest.mark.parametrize("vocab", [VOCAB, *range(END + 1, END + 10), 1000])
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
    tokenizer = read_vocabulary(
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
