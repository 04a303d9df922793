"""Bad words: where their last token is banned, and what a tokenizer makes of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.errors import RequestError
from specinfer.processors.changes import BadWords, tokenize_bad_words


def test_the_last_token_is_banned_behind_the_others() -> None:
    for words, output, banned in (
        ([[5]], [], [5]),  # one token: nowhere
        ([[5]], [1, 2], [5]),
        ([[1, 5]], [], []),
        ([[1, 5]], [1], [5]),
        ([[1, 5]], [1, 2], []),  # only right behind its beginning
        ([[1, 2, 5]], [2], []),  # the output is shorter than the beginning
        ([[1, 2, 5]], [9, 1, 2], [5]),
        ([[1, 1, 5]], [1, 1, 1], [5]),  # an occurrence may overlap itself
        ([[2, 1, 6], [1, 5], [7]], [2, 1], [7, 5, 6]),  # shorter beginnings first
        ([[1, 5], [1, 5]], [1], [5]),
        ([[3, 1]], [1, 5], []),
    ):
        for cut in range(len(output) + 1):  # for every start of the path
            found = BadWords(words)
            found.commit(output[:cut])
            assert found.completions(output[cut:]) == banned, (words, output)
            assert found.completions(output[cut:]) == banned, "looking leaves no trace"


@given(
    words=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=4),
    tokens=st.lists(st.integers(0, 2), max_size=30),
)
def test_a_text_that_heeds_the_bans_holds_no_bad_word(words: list[list[int]], tokens: list[int]) -> None:
    found, text = BadWords(words), list[int]()
    for token in tokens:
        if token not in found.completions(()):
            text.append(token)
            found.commit([token])
    for word in words:
        assert word not in [text[i : i + len(word)] for i in range(len(text))]


# Tokenizations of texts by a tokenizer with added words.
TEXTS = {
    "cat": [1],
    " cat": [2],  # the same length, another token: both forms are banned
    "dog": [3, 4],
    " dog": [5],  # shorter: both are, too, or the word could be said
    "owl": [6, 7],
    " owl": [6, 7],  # the tokenizer puts a space before every text
    "\u00e9": [],
    " \u00e9": [9],
}


def test_the_tokens_of_a_word_at_the_start_of_a_text_and_behind_a_space() -> None:
    for words, tokens in (
        (["cat"], [[1], [2]]),
        ([" cat"], [[1], [2]]),  # blanks in front are the tokenizer's business
        (["dog"], [[3, 4], [5]]),
        (["owl", "cat"], [[6, 7], [1], [2]]),
        ([], []),
    ):
        assert tokenize_bad_words(words, TEXTS.__getitem__) == tokens, words


def test_a_word_the_tokenizer_cannot_write_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        tokenize_bad_words(["cat", "\u00e9"], TEXTS.__getitem__)
    assert str(caught.value) == "bad_words has '\u00e9', for which the model has no token; remove it"
