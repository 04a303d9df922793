"""Fill-in-the-middle prompts."""

import pytest
from tokenizers import AddedToken, normalizers, processors

from specinfer.errors import RequestError
from specinfer.tokenizer import Tokenizer
from specinfer.tokenizer.fill_in import FAMILIES
from specinfer.tokenizer.gguf_vocabulary import read_vocabulary
from tests.foreign import byte_level

from .made_up import CONTROL, byte_level_header, sentencepiece_backend

QWEN = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")


def tokenizer(*special: str, bos: bool = False) -> Tokenizer:
    """A token per byte, then <s> (256) and the special tokens."""
    made = byte_level(range(256), [], ["<s>", *special])
    if bos:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return Tokenizer(made, eos_token_ids=[], bos_token_id=256)


def written(made: Tokenizer, ids: list[int]) -> str:
    """Ids as text, special tokens by name."""
    names = [made.text_of(i) if made.is_special(i) else chr(i) for i in ids]
    return "".join(names)


def test_the_middle_follows_prefix_and_suffix() -> None:
    made = tokenizer(*QWEN)
    ids = made.encode_fill_in("a = ", "\nprint(a)")
    assert written(made, ids) == "<|fim_prefix|>a = <|fim_suffix|>\nprint(a)<|fim_middle|>"
    assert {made.id_to_token(i) for i in made.fill_in.ends} == set(QWEN)
    made = tokenizer(*QWEN, bos=True)
    assert written(made, made.encode_fill_in("a", "b")) == "<s><|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"


def test_without_a_middle_token_the_suffix_comes_first() -> None:
    made = tokenizer("[PREFIX]", "[SUFFIX]", bos=True)
    assert written(made, made.encode_fill_in("def f(", "return a")) == "<s>[SUFFIX]return a[PREFIX]def f("


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.prefix)
def test_every_family_is_known_by_its_tokens(family: tuple[str, ...]) -> None:
    prefix, suffix, middle, *_ = family
    made = tokenizer(*(name for name in (prefix, suffix, middle) if name))
    ids = made.encode_fill_in("a", "b")
    wanted = f"{prefix}a{suffix}b{middle}" if middle else f"{suffix}b{prefix}a"
    assert written(made, ids) == wanted


def test_other_files_stand_before_with_their_names() -> None:
    made = tokenizer(*QWEN)
    files = [("one.py", "A = 1\n"), ("", "B = 2\n")]
    ids = made.encode_fill_in("a", "b", files)
    behind = "<|file_sep|>filename\n<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    begin, behind = "<|repo_name|>myproject\n", "<|file_sep|>filename\nB = 2\n" + behind
    assert written(made, ids) == begin + "<|file_sep|>one.py\nA = 1\n" + behind
    fewer = made.encode_fill_in("a", "b", files, max_tokens=len(ids) - 1)
    assert written(made, fewer) == begin + behind


def test_names_of_fill_in_tokens_in_texts_are_text() -> None:
    made = tokenizer(*QWEN)
    code = 'x = "<|fim_suffix|>"  # <|fim_middle|><|fim_pad|>'
    ids = made.encode_fill_in(code, "")
    assert ids == [257, *code.encode(), 259, 258]


def test_a_vocabulary_without_these_tokens_says_which_were_looked_for() -> None:
    made = tokenizer("<|fim_prefix|>", "<|fim_suffix|>")  # no middle
    assert made.fill_in is None
    message = r"no fill-in-the-middle .* its vocabulary; looked for <\|fim_prefix\|>, <fim_prefix>"
    with pytest.raises(RequestError, match=message):
        made.encode_fill_in("a", "b")


def test_sentencepiece_puts_its_space_before_the_prefix_alone() -> None:
    made = sentencepiece_backend()
    mark = "\u2581"
    made.normalizer = normalizers.Sequence([normalizers.Prepend(mark), normalizers.Replace(" ", mark)])
    names = ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", "\u2581<EOT>")
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    loaded = Tokenizer(made, eos_token_ids=[])
    assert loaded.encode_fill_in("a", "b") == [257, 256, ord("a"), 258, ord("b"), 259]
    assert loaded.fill_in.ends == (257, 258, 259, 260)


OWN = ("<before>", "<behind>", "<between>")


@pytest.mark.parametrize("keys", ["fim_{}_token_id", "{}_token_id"])
def test_a_gguf_file_may_say_which_tokens_they_are(keys: str) -> None:
    header = byte_level_header()
    tokens, types = header.metadata["tokenizer.ggml.tokens"], header.metadata["tokenizer.ggml.token_type"]
    short = ("pre", "suf", "mid") if keys.startswith("fim") else ("prefix", "suffix", "middle")
    ids = {keys.format(name): len(tokens) + i for i, name in enumerate(short)}
    header = byte_level_header(tokens=[*tokens, *OWN], token_type=[*types, *[CONTROL] * 3], **ids)
    made = read_vocabulary(header)
    assert written(made, made.encode_fill_in("a", "b")) == "<before>a<behind>b<between>"
