import pytest

from specinfer.errors import ModelFileError
from specinfer.tokenizer.gguf_vocabulary import PRE_TOKENIZERS
from specinfer.tokenizer.gguf_vocabulary import read_vocabulary as load

from .made_up import CHARACTER, CONTROL, NORMAL, UNUSED, byte_level_header, header, sentencepiece_header


def pieces(tokenizer, text):
    return [tokenizer.decode([token_id]) for token_id in tokenizer.encode(text, add_special=False)]


def test_byte_level_merges_build_words_and_every_text_survives():
    tokenizer = load(byte_level_header(words=["hello", " wor"]))
    assert pieces(tokenizer, "hello world") == ["hello", " wor", "l", "d"]
    for text in ("", " ", "na\u00efve \u65e5\u672c\u8a9e \U0001f389\r\n\t", "\0\x7f"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


# The rules differ in digits, case of contractions, line breaks after symbols, capitals, and Chinese.
TEXT = "It'S 12345 a.\n\nfooBar  x\u4e00\u4e8c b  \n c"
SPLITS = {
    "gpt-2 phi-2 exaone4 jais": "It|'|S| 12345| a|.|\n|\n|fooBar| | x\u4e00\u4e8c| b|  \n| c",
    "smollm command-r exaone": "It|'|S| |1|2|3|4|5| a|.|\n|\n|fooBar| | x\u4e00\u4e8c| b|  \n| c",
    "default falcon": "It|'|S| |123|45| a|.|\n|\n|fooBar| | x\u4e00\u4e8c| b|  \n| c",
    "qwen2 stablelm2 megrez qwen35": "It|'S| |1|2|3|4|5| a|.\n\n|fooBar| | x\u4e00\u4e8c| b|  \n| c",
    "llama-bpe llama3 falcon3 pixtral glm4 chatglm-bpe minicpm5": (
        "It|'S| |123|45| a|.\n\n|fooBar| | x\u4e00\u4e8c| b|  \n| c"
    ),
    "tekken": "It|'S| |1|2|3|4|5| a|.\n\n|foo|Bar| | x\u4e00\u4e8c| b|  \n| c",
    "gpt-4o llama4 minimax-m2": "It'S| |123|45| a|.\n\n|foo|Bar| | x\u4e00\u4e8c| b|  \n| c",
    "tiny_aya cohere2moe": "It'S| |12|345| a|.\n\n|foo|Bar| | x\u4e00\u4e8c| b|  \n| c",
    "deepseek-llm": "It|'|S| |12345| a|.|\n|\n|fooBar| | x|\u4e00\u4e8c| b|  |\n| c",
    "deepseek-coder": "It|'|S| |1|2|3|4|5| a|.|\n|\n|fooBar| | x|\u4e00\u4e8c| b|  |\n| c",
    "deepseek-v3 hunyuan-dense": "It|'S| |123|45| a|.\n\n|fooBar| | x|\u4e00\u4e8c| b|  \n| c",
    "poro-chat bloom": "It'S| 12345| a|.\n\n|fooBar| | x\u4e00\u4e8c| b|  \n| c",
    "viking": "It'S| |1|2|3|4|5| a|.\n\n|fooBar| | x\u4e00\u4e8c| b|  \n| c",
    "superbpe": "It'S |12|345| a.\n\nfooBar  x\u4e00\u4e8c b  \n c",
    "seed-coder": "It|'S| |1|2|3|4|5| a|.|\n\n|fooBar| | x\u4e00\u4e8c| b|  \n| c",
}


def test_the_named_pre_tokenizer_decides_where_words_end():
    for names, words in SPLITS.items():
        for name in names.split():
            splitter = load(byte_level_header(name)).backend.pre_tokenizer
            found = [TEXT[start:end] for _, (start, end) in splitter.pre_tokenize_str(TEXT)]
            assert "|".join(found) == words, name


def test_every_known_pre_tokenizer_keeps_the_text():
    text = "Don't  panic:\t12345 caf\u00e9s, \u0939\u093f\u0928\r\n\n  x = a/b//c;\u3000\U0001f468\u200d "
    for pre in PRE_TOKENIZERS:
        tokenizer = load(byte_level_header(pre, words=["Don", " x"]))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_qwen_composes_and_llama_does_not():
    decomposed = "e\u0301"
    assert pieces(load(byte_level_header("qwen2", words=["\u00e9"])), decomposed) == ["\u00e9"]
    assert "".join(pieces(load(byte_level_header("llama-bpe", words=["\u00e9"])), "e")) == "e"
    llama = load(byte_level_header("llama-bpe", words=["\u00e9"]))
    assert llama.decode(llama.encode(decomposed)) == decomposed


def test_control_tokens_are_read_and_left_out_user_defined_ones_are_shown():
    tokenizer = load(byte_level_header())
    bos, im_end, tool = (tokenizer.vocab_size - k for k in (4, 3, 2))
    assert tokenizer.encode("<|bos|>a<tool><|im_end|>") == [bos, ord("a"), tool, im_end]
    assert tokenizer.decode([bos, ord("a"), tool, im_end]) == "a<tool>"
    assert tokenizer.is_special(im_end)
    assert not tokenizer.is_special(tool)


def test_unused_tokens_have_an_id_but_are_never_read():
    tokenizer = load(byte_level_header())
    pad = tokenizer.vocab_size - 1
    assert tokenizer.id_to_token(pad) == f"[PAD{pad}]"
    assert pad not in tokenizer.encode(f"[PAD{pad}]")


def test_end_tokens_are_the_named_eos_and_known_control_tokens():
    assert load(byte_level_header()).eos_token_ids == {257}  # <|im_end|>, though no eos is named
    assert load(byte_level_header(eos_token_id=256)).eos_token_ids == {256, 257}
    assert load(byte_level_header(eot_token_id=65)).eos_token_ids == {65, 257}
    # In Gemma's vocabulary </s> is an HTML tag.
    html = sentencepiece_header([], user_defined=["<end_of_turn>"], eos_token_id=1)
    assert load(html).eos_token_ids == {1, 2}
    # <|end|> ends Phi's text, and in gpt-oss only a message of it.
    for names, ends in ((["<|end|>"], {256}), (["<|end|>", "<|return|>", "<|call|>"], {257, 258})):
        types = [NORMAL] * 256 + [CONTROL] * len(names)
        tokens = [*(CHARACTER[byte] for byte in range(256)), *names]
        assert load(byte_level_header(tokens=tokens, token_type=types, bos_token_id=65)).eos_token_ids == ends


def test_bos_and_eos_are_added_as_the_file_says():
    bos = 256
    assert load(byte_level_header()).encode("a") == [97]
    assert load(byte_level_header(add_bos_token=True)).encode("a") == [bos, 97]
    assert load(byte_level_header(add_bos_token=True)).encode("a", add_special=False) == [97]
    assert load(byte_level_header("llama-bpe")).encode("a") == [bos, 97]
    both = load(byte_level_header(add_bos_token=True, add_eos_token=True, eos_token_id=257))
    assert both.encode("a") == [bos, 97, 257]
    assert load(sentencepiece_header(["\u2581", "a", "\u2581a"])).encode("a")[0] == 1
    assert load(sentencepiece_header(["\u2581", "a", "\u2581a"], add_bos_token=False)).encode("a")[0] != 1


def test_sentencepiece_merges_the_best_score_first():
    # "abc": bc scores better than ab, and abc can be built from a + bc.
    tokenizer = load(sentencepiece_header(["bc", "ab", "abc", "a", "b", "c"], add_space_prefix=False))
    assert pieces(tokenizer, "abc") == ["abc"]
    assert pieces(tokenizer, "abcab") == ["abc", "ab"]
    without = load(sentencepiece_header(["bc", "ab", "a", "b", "c"], add_space_prefix=False))
    assert pieces(without, "abc") == ["a", "bc"]


def test_gemma_4_has_merges_in_place_of_scores():
    words, merges = ["a", "b", "\u2581", "\n", "ab", "\u2581ab", "\n\n"], ["a b", "\u2581 ab", "\n \n"]
    found = load(sentencepiece_header(words, model="gemma4", merges=merges, add_space_prefix=False))
    assert pieces(found, "ab ab\n\nab\n a") == ["ab", " ab", "\n\n", "ab", "\n", " ", "a"]
    assert found.decode(found.encode("ab \u00e9\n\n\nb")) == "ab \u00e9\n\n\nb"


def test_sentencepiece_falls_back_to_bytes():
    tokenizer = load(sentencepiece_header(["a"], add_space_prefix=False, add_bos_token=False))
    first_byte = 3
    assert tokenizer.encode("\u00e9a") == [first_byte + 0xC3, first_byte + 0xA9, first_byte + 256]
    assert tokenizer.decode(tokenizer.encode("\u00e9a\U0001f389")) == "\u00e9a\U0001f389"


def test_the_space_prefix_is_put_in_front_and_taken_away_again():
    tokenizer = load(sentencepiece_header(["\u2581", "a", "\u2581a"]))
    tokens = [tokenizer.id_to_token(i) for i in tokenizer.encode("a a")]
    assert tokens == ["<s>", "\u2581a", "\u2581a"]
    assert tokenizer.decode(tokenizer.encode("a a")) == "a a"
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"


def test_runs_of_spaces_that_are_user_defined_are_cut_out_longest_first():
    for spaces in ("  ", "\u2581\u2581"):  # files of different age write it either way
        runs, plain = [spaces, spaces + spaces[0]], {"add_space_prefix": False, "add_bos_token": False}
        tokenizer = load(sentencepiece_header(["\u2581", "a", "\u2581a"], user_defined=runs, **plain))
        assert tokenizer.encode("a   a  a") == [261 + 1, 4, 261 + 1, 3, 261 + 1]
        assert tokenizer.decode(tokenizer.encode("a     a")) == "a     a"


def test_damaged_and_unsupported_vocabularies_are_refused():
    texts, numbers = "allowed: a list of texts", "allowed: a list of numbers"
    for made_up, message in (
        (byte_level_header("mystery"), "'mystery'; known: gpt-2, .*qwen2"),
        (header(model="t5", tokens=["a"]), "'t5'; supported: 'gpt2'"),
        (header(), r"no tokenizer\.ggml\.model"),
        (byte_level_header(merges=None), r"no tokenizer\.ggml\.merges"),
        (byte_level_header(merges=["abc"]), "a merge is not a pair"),
        (byte_level_header(merges=["a nothing"]), "is damaged"),
        (byte_level_header(token_type=[UNUSED]), "1 token types"),
        (sentencepiece_header(["a"], scores=[0.0, 0.0]), "2 scores"),
        (byte_level_header(tokens=3), rf"tokenizer\.ggml\.tokens is 3; {texts}"),
        (byte_level_header(tokens=[1, 2]), rf"tokenizer\.ggml\.tokens is \[1, 2\]; {texts}"),
        (byte_level_header(tokens="abc"), r"tokenizer\.ggml\.tokens is 'abc'"),
        (byte_level_header(merges=[1.5]), r"tokenizer\.ggml\.merges is \[1\.5\]"),
        (byte_level_header(token_type=1), rf"tokenizer\.ggml\.token_type is 1; {numbers}"),
        (byte_level_header(pre=["gpt-2"]), r"\['gpt-2'\]; known: gpt-2"),
        (byte_level_header(chat_template=3), r"tokenizer\.chat_template is 3; allowed: a text"),
        (sentencepiece_header(["a"], scores="0"), rf"tokenizer\.ggml\.scores is '0'; {numbers}"),
    ):
        with pytest.raises(ModelFileError, match=rf"made-up\.gguf.*{message}"):
            load(made_up)
