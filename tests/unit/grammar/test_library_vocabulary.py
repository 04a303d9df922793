"""Matchers are built in a thread with a deep stack, which other threads do not see."""

import threading

import llguidance
import pytest

from specinfer.grammar.library_vocabulary import LibraryVocabulary
from tests.unit.grammar.vocabulary import TOKENIZER, VOCAB


@pytest.fixture(scope="module")
def vocabulary():
    return LibraryVocabulary(TOKENIZER, VOCAB)


def test_an_exception_of_the_library_comes_back_as_itself(vocabulary, monkeypatch):
    def fail(*_, **__):
        raise MemoryError("no room for this grammar")

    with monkeypatch.context() as patched:
        patched.setattr(llguidance, "LLMatcher", fail)
        patched.setattr(fail, "grammar_from_lark", str, raising=False)
        with pytest.raises(MemoryError, match="no room for this grammar"):
            vocabulary.matcher('start: "a"')
    assert not vocabulary.matcher('start: "a"').is_error()  # the next one is made as ever


def test_threads_may_ask_at_the_same_time(monkeypatch):
    vocabulary, read = LibraryVocabulary(TOKENIZER, VOCAB), []
    library, usual = llguidance.LLTokenizer, threading.stack_size()
    monkeypatch.setattr(llguidance, "LLTokenizer", lambda *a, **k: read.append(a) or library(*a, **k))
    together, legal = threading.Barrier(4), {}

    def query(letter):
        together.wait()
        matcher = vocabulary.matcher(f'start: "{letter}"')
        legal[letter] = matcher.compute_ff_bytes()

    threads = [threading.Thread(target=query, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert legal == {letter: letter.encode() for letter in "abcd"}
    assert len(read) == 1, "the vocabulary is read once"
    assert threading.stack_size() == usual, "put back"
