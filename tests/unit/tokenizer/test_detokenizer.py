from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer.tokenizer import Detokenizer
from specinfer.tokenizer.gguf_vocabulary import read_vocabulary as load
from tests.operations import bytes_allocated, lines_run

from .made_up import byte_level_header, sentencepiece_header

BYTES = load(byte_level_header(words=["hello", " world"]))
PREFIXED = load(sentencepiece_header(["\u2581", "a", "\u2581a"]))  # drops the first space of a text
SPACED = load(sentencepiece_header(["\u2581", "a", "\u2581a"], user_defined=["  "], add_space_prefix=False))


def test_half_a_character_waits_for_its_other_half():
    detokenizer = Detokenizer(BYTES)
    party = "\U0001f389".encode()
    assert [detokenizer.push([byte]) for byte in party] == ["", "", "", "\U0001f389"]
    assert detokenizer.push([ord("a"), *party[:2]]) == "a"
    assert detokenizer.push([*party[2:], ord("b")]) == "\U0001f389b"
    assert detokenizer.flush() == ""


def test_a_character_that_never_comes_whole_is_replaced():
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push([0xE2, 0x82]) == ""
    assert detokenizer.push([ord("x")]) == "\ufffdx"  # it can no longer become a character
    assert detokenizer.push([0xE2]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_and_unknown_ids_are_silent():
    im_end = BYTES.vocab_size - 3
    assert Detokenizer(BYTES).push([65, im_end, 10**6, 66]) == "AB"


def test_special_tokens_that_are_visible_stand_in_the_text_by_their_names():
    bos, im_end = BYTES.encode("<|bos|><|im_end|>")
    ids = [65, im_end, bos, 0xE2, im_end, *"\u20ac".encode()]
    detokenizer = Detokenizer(BYTES, visible=[im_end, 0xE2, 10**6])
    assert "".join(detokenizer.push([i]) for i in ids) == "A<|im_end|>\ufffd<|im_end|>\u20ac"
    assert Detokenizer(BYTES).push(ids) == "A\ufffd\u20ac"  # visible tokens are per text
    spaced = Detokenizer(PREFIXED, visible=[2])
    assert spaced.push([2, *PREFIXED.encode("a", add_special=False)]) == "</s> a"


def test_a_prompt_that_ends_inside_a_character():
    whole = "\u20ac".encode()
    detokenizer = Detokenizer(BYTES, [*b"price: ", *whole[:2]])
    assert detokenizer.push([whole[2], ord("5")]) == "\u20ac5"


@pytest.mark.thorough
@pytest.mark.parametrize("tokenizer", [BYTES, PREFIXED, SPACED], ids=["bytes", "prefixed", "spaced"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_pieces_always_add_up_to_the_whole(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), min_size=1, max_size=6)))
    detokenizer = Detokenizer(tokenizer, ids[: cuts[0]])
    pieces = [detokenizer.push(ids[start:end]) for start, end in pairwise([*cuts, len(ids)])]
    pieces.append(detokenizer.flush())
    whole, prompt = tokenizer.decode(ids), tokenizer.decode(ids[: cuts[0]])
    # A prompt that ends inside a character shows a U+FFFD that the whole text need not have.
    assert prompt + "".join(pieces) == whole or prompt.endswith("\ufffd")


def test_a_push_costs_the_same_late_as_early():
    detokenizer = Detokenizer(BYTES)
    ids = BYTES.encode("hello world")

    def cost():
        push = partial(detokenizer.push, ids)
        # The list of pieces grows now and then; the minimum over some pushes excludes that.
        return lines_run(push), min(bytes_allocated(push) for _ in range(20))

    detokenizer.push(ids)  # the first one fills a table
    early = cost()
    for _ in range(5_000):
        detokenizer.push(ids)
    assert cost() == early
