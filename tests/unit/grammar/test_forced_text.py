"""Text that a grammar forces, in the tokens of the tokenizer."""

import pytest

from specinfer.grammar.grammar import Cursor
from tests.unit.grammar.vocabulary import END, TOKENIZER, grammar_of, ids, legal, schema_format


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
