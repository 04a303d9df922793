"""A text in another model's tokens, however it grew, and the tokens that two vocabularies have in common."""

import random
from collections.abc import Sequence

import pytest

from specinfer.tokenizer import Tokenizer
from specinfer.tokenizer.detokenizer import Respelling, complete, shared_tokens
from specinfer.tokenizer.gguf_vocabulary import read_vocabulary as load
from tests.foreign import byte_level

from .made_up import sentencepiece_header

BYTES = list(range(256))
TEXT = "hello hell, helping no \u00e9\u4e2d one; " * 12 + "x" * 300 + " hello"


def of(words: list[str], specials: list[str] = [], singles: Sequence[int] = BYTES) -> Tokenizer:  # noqa: B006
    return Tokenizer(byte_level(singles, words, specials), eos_token_ids=[])


WRITER = of(["hel", " no", "lo h"], ["<s>", "<end>"])
READERS = {
    "finer": of([]),
    "coarser": of(["hello", " hell", "lping", "xxxx", "\u00e9"], ["<end>"]),
    "sentencepiece": load(sentencepiece_header(["\u2581", "he", "hel", "\u2581he", "\u2581hel", "\u00e9"])),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize("seed", range(4))
def test_respelling_equals_tokenizing_the_whole_text(reader: Tokenizer, seed: int) -> None:
    tokens, chance = WRITER.encode(TEXT), random.Random(seed)
    text = Respelling(WRITER, reader, {})
    head = len(text.ids)
    while text.taken < len(tokens):
        before = list(text.ids)
        kept = text.extend(tokens[text.taken : text.taken + chance.choice([1, 2, 5, 40])])
        assert text.ids[:kept] == before[:kept]
        assert text.ids[kept : kept + 1] != before[kept : kept + 1] or kept in (len(before), len(text.ids))
    assert text.whole
    assert b"".join(reader.token_bytes[i] for i in text.ids) == TEXT.encode()
    if not reader.token_bytes.strips_first_space:
        assert text.ids[head:] == reader.encode(TEXT, add_special=False)


def test_an_incomplete_end_is_spelled_again() -> None:
    text = Respelling(WRITER, READERS["coarser"], {})
    [hel], [ell], [o] = map(WRITER.encode, ("hel", "l", "o"))
    assert text.extend([hel, ell]) == 0
    assert [READERS["coarser"].text_of(i) for i in text.ids] == ["hell"]
    assert text.extend([o]) == 0
    assert [READERS["coarser"].text_of(i) for i in text.ids] == ["hello"]
    assert text.extend(WRITER.encode(" x")) == 1
    assert text.extend([]) == 3


def test_special_tokens_are_those_of_the_same_name_or_nothing() -> None:
    reader = READERS["coarser"]
    [start], [end], [theirs] = WRITER.encode("<s>"), WRITER.encode("<end>"), reader.encode("<end>")
    text = Respelling(WRITER, reader, {end: theirs})
    text.extend([start, *WRITER.encode("hel"), end, *WRITER.encode("lo")])
    assert text.ids == [*reader.encode("hel"), theirs, *reader.encode("lo")]
    assert text.extend(WRITER.encode("!")) == len(text.ids) - 1


def test_a_begin_of_text_token_stands_once() -> None:
    backend = byte_level(BYTES, [], ["<s>"])
    from tokenizers.processors import TemplateProcessing

    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    reader = Tokenizer(backend, eos_token_ids=[], bos_token_id=256)
    [start] = WRITER.encode("<s>")
    with_one, without = Respelling(WRITER, reader, {start: 256}), Respelling(WRITER, reader, {start: 256})
    with_one.extend([start, 65])
    without.extend([65])
    assert with_one.ids == without.ids == [256, 65]


def test_a_text_is_cut_before_half_a_character() -> None:
    for encoded, text, rest in (
        *((b"", "", b""), (b"ab", "ab", b""), (b"ab\xc3", "ab", b"\xc3"), (b"\xe4\xb8", "", b"\xe4\xb8")),
        *((b"\xe4\xb8\xad", "\u4e2d", b""), (b"\xf0\x9f\x98", "", b"\xf0\x9f\x98")),
        *((b"a\xb8", "a\ufffd", b""), (b"\x80\x80\x80\x80", "\ufffd" * 4, b"")),
    ):
        assert complete(encoded) == (text, rest)


def spelled(one: Tokenizer, other: Tokenizer, target: int = 999, draft: int = 999) -> list[tuple[str, str]]:
    shared = shared_tokens(one, other, target, draft)
    assert list(shared.target) == sorted(set(shared.target.tolist()))
    assert len(set(shared.draft.tolist())) == len(shared)
    pairs = zip(shared.target.tolist(), shared.draft.tolist(), strict=True)
    return [(str(one.id_to_token(i)), str(other.id_to_token(j))) for i, j in pairs]


def test_tokens_are_shared_by_their_bytes_and_special_ones_by_their_names() -> None:
    one = of(["ab", "dc"], ["<s>", "<end>"], b"abcd")
    other = of(["cd", "ab"], ["<end>", "<tool>"], b"dcba")
    found = spelled(one, other)
    assert found == [("a", "a"), ("b", "b"), ("c", "c"), ("d", "d"), ("ab", "ab"), ("<end>", "<end>")]


def test_only_ids_that_have_logits_count() -> None:
    one, other = of(["ab"], singles=b"abcd"), of(["ab"], singles=b"dcba")
    assert spelled(one, other, target=3) == [("a", "a"), ("b", "b"), ("c", "c")]
    assert spelled(one, other, draft=2) == [("c", "c"), ("d", "d")]
    assert spelled(one, of([], singles=b"xyz")) == []


def test_a_space_and_a_byte_mean_the_same_however_they_are_spelled() -> None:
    one = load(sentencepiece_header(["\u2581", "a", "\u2581a"]))
    other = of([" a"], singles=b" a\xc3")
    # "a" and the byte 61 are equal; the spelled token counts
    byte, space = ("<0xC3>", "\u00c3"), ("\u2581", "\u0120")
    assert spelled(one, other) == [byte, space, ("a", "a"), ("\u2581a", "\u0120a")]
