"""Which tokens two vocabularies have in common."""

from __future__ import annotations

from specinfer.tokenizer import Tokenizer
from specinfer.tokenizer.detokenizer import shared_tokens
from specinfer.tokenizer.gguf_vocabulary import read_vocabulary as load
from tests.foreign import byte_level

from .made_up import sentencepiece_header


def spelled(one: Tokenizer, other: Tokenizer, target: int = 999, draft: int = 999) -> list[tuple[str, str]]:
    shared = shared_tokens(one, other, target, draft)
    assert list(shared.target) == sorted(set(shared.target.tolist()))
    assert len(set(shared.draft.tolist())) == len(shared)
    pairs = zip(shared.target.tolist(), shared.draft.tolist(), strict=True)
    return [(str(one.id_to_token(i)), str(other.id_to_token(j))) for i, j in pairs]


def of(singles: str, words: list[str], specials: list[str]) -> Tokenizer:
    return Tokenizer(byte_level([ord(c) for c in singles], words, specials), eos_token_ids=[])


def test_tokens_are_shared_by_their_bytes_and_special_ones_by_their_names() -> None:
    one = of("abcd", ["ab", "dc"], ["<s>", "<end>"])
    other = of("dcba", ["cd", "ab"], ["<end>", "<tool>"])
    found = spelled(one, other)
    assert found == [("a", "a"), ("b", "b"), ("c", "c"), ("d", "d"), ("ab", "ab"), ("<end>", "<end>")]


def test_only_ids_that_have_logits_count() -> None:
    one, other = of("abcd", ["ab"], []), of("dcba", ["ab"], [])
    assert spelled(one, other, target=3) == [("a", "a"), ("b", "b"), ("c", "c")]
    assert spelled(one, other, draft=2) == [("c", "c"), ("d", "d")]
    assert spelled(one, of("xyz", [], [])) == []


def test_a_space_and_a_byte_mean_the_same_however_they_are_spelled() -> None:
    one = load(sentencepiece_header(["\u2581", "a", "\u2581a"]))
    other = Tokenizer(byte_level([0x20, ord("a"), 0xC3], [" a"]), eos_token_ids=[])
    # "a" and the byte 61 are equal; the spelled token counts
    assert spelled(one, other) == [
        ("<0xC3>", "\u00c3"),
        ("\u2581", "\u0120"),
        ("a", "a"),
        ("\u2581a", "\u0120a"),
    ]
