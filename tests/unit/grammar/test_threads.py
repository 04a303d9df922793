"""Any thread compiles formats while others compile or follow theirs; each has a large stack."""

import threading
from concurrent.futures import ThreadPoolExecutor

import llguidance
import pytest

from specinfer.grammar import grammar as grammar_file
from specinfer.grammar.grammar import Grammar, GrammarCompiler
from specinfer.grammar.library_vocabulary import LibraryVocabulary
from specinfer.structured_output import structured_output
from tests.unit.grammar.vocabulary import SCHEMAS, TOKENIZER, VOCAB, legal_document, schema_format

THREADS = 6


def at_once(work):
    """Return the results of work(0), work(1), ... in threads that start together."""
    together = threading.Barrier(THREADS)

    def run(number):
        together.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


@pytest.fixture
def compiler():
    return GrammarCompiler(TOKENIZER, VOCAB)


def test_a_form_that_many_threads_ask_for_is_compiled_once(compiler, monkeypatch):
    compiled = []
    monkeypatch.setattr(grammar_file, "Grammar", lambda *given: compiled.append(given[0]) or Grammar(*given))
    forms = [structured_output(choice=[text]) for text in ("yes", "no", "true", "name")]
    found = at_once(lambda number: [compiler.compile(forms[(number + i) % 4]) for i in range(4)])
    assert sorted(form.source for form in compiled) == sorted(form.source for form in forms)
    for number, grammars in enumerate(found):
        assert grammars == [compiler.compile(forms[(number + i) % 4]) for i in range(4)]


def test_a_form_that_takes_long_holds_up_no_other(compiler, monkeypatch):
    slow, quick, kept = (structured_output(choice=[text]) for text in ("yes", "no", "true"))
    expected = compiler.compile(kept)
    began, go_on = threading.Event(), threading.Event()

    def compile_it(spec, vocabulary):
        if spec == slow:
            began.set()
            assert go_on.wait(60)
        return Grammar(spec, vocabulary)

    monkeypatch.setattr(grammar_file, "Grammar", compile_it)
    with ThreadPoolExecutor(4) as pool:
        try:
            waiting = [pool.submit(compiler.compile, slow) for _ in range(2)]
            assert began.wait(60)
            assert pool.submit(compiler.compile, kept).result(60) is expected
            assert pool.submit(compiler.compile, quick).result(60).spec == quick
            assert not any(future.done() for future in waiting)
        finally:
            go_on.set()
        assert waiting[0].result().spec == slow
        assert waiting[1].result() is waiting[0].result()


def test_masks_and_forced_text_are_the_same_while_others_compile(compiler):
    entries = [entry for entry in SCHEMAS if entry["name"] in ("person", "tree", "tuple", "one_of_by_const")]
    forms = [structured_output(response_format=schema_format(entry["schema"])) for entry in entries]
    documents = [legal_document(compiler.compile(form), seed=0)[:60] for form in forms]

    def walk(grammar, document):
        """The masks and the forced text at every place of a document, in steps of three tokens."""
        state, seen = grammar.state(), []
        for at in range(0, len(document), 3):
            path = document[at : at + 3]
            cuts = [path[:depth] for depth in range(3)]
            seen += [(state.allowed(cut).tobytes(), state.forced(cut, 5)) for cut in cuts]
            state.commit(path)
        return seen

    expected = list(map(walk, map(compiler.compile, forms), documents))
    shared = GrammarCompiler(TOKENIZER, VOCAB)  # unused automata

    def go(number):
        found = {}
        for i in range(len(forms)):
            which = (number + i) % len(forms)
            found[which] = walk(shared.compile(forms[which]), documents[which])
            shared.compile(structured_output(regex=f"new{number}{i}"))
        return [found[which] for which in range(len(forms))]

    assert at_once(go) == [expected] * THREADS


def test_an_exception_of_the_library_comes_back_as_itself(monkeypatch):
    def fail(*_, **__):
        raise MemoryError("no room for this grammar")

    vocabulary = LibraryVocabulary(TOKENIZER, VOCAB)
    with monkeypatch.context() as patched:
        patched.setattr(llguidance, "LLMatcher", fail)
        patched.setattr(fail, "grammar_from_lark", str, raising=False)
        with pytest.raises(MemoryError, match="no room for this grammar"):
            vocabulary.matcher('start: "a"')
    assert not vocabulary.matcher('start: "a"').is_error()  # the next one is made as ever


def test_a_vocabulary_is_read_once_and_stacks_of_other_threads_are_as_before(monkeypatch):
    vocabulary, read = LibraryVocabulary(TOKENIZER, VOCAB), []
    library, usual = llguidance.LLTokenizer, threading.stack_size()
    monkeypatch.setattr(llguidance, "LLTokenizer", lambda *a, **k: read.append(a) or library(*a, **k))
    found = at_once(lambda number: vocabulary.matcher(f'start: "{number}"').compute_ff_bytes())
    assert found == [str(number).encode() for number in range(THREADS)]
    assert len(read) == 1
    assert threading.stack_size() == usual
