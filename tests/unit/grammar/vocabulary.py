"""A byte-level vocabulary of the 256 bytes and the words below, and grammars over it."""

import json
from functools import cache
from pathlib import Path

import numpy as np

from specinfer.grammar.grammar import GrammarCompiler
from specinfer.structured_output import structured_output
from specinfer.tokenizer.gguf_vocabulary import read_vocabulary
from tests.unit.tokenizer.made_up import byte_level_header

SCHEMAS = json.loads((Path(__file__).parent / "schemas.json").read_text())
WORDS = ('{"', '":', '",', "true", "false", "null", "name", "na", "12", "\u00d6l", "\U0001f600", "yes", "no")
PADDING = 7  # logits beyond the tokenizer's ids


TOKENIZER = read_vocabulary(byte_level_header(words=WORDS, eos_token_id=None))
SPECIAL = {name: TOKENIZER.encode(name)[0] for name in ("<|bos|>", "<|im_end|>", "<tool>")}
END = SPECIAL["<|im_end|>"]
TOKENIZER.eos_token_ids = frozenset({END})
VOCAB = TOKENIZER.vocab_size + PADDING
COMPILER = GrammarCompiler(TOKENIZER, VOCAB)


def schema_format(schema, strict=False):
    return {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema, "strict": strict}}


def grammar_of(**asked):
    return COMPILER.compile(structured_output(**asked))


def ids(text):
    return TOKENIZER.encode(text, add_special=False)


def accepts(grammar, text):
    """Whether the text, byte by byte, is legal and may end."""
    state = grammar.state()
    for byte in text.encode():
        if not state.permits((), byte_id(byte)):
            return False
        state.commit([byte_id(byte)])
    return state.permits((), END)


@cache
def byte_id(byte):
    return next(i for i in range(256) if TOKENIZER.token_bytes[i] == bytes([byte]))


def legal(state, path=()):
    allowed = np.flatnonzero(state.allowed(path)).tolist()
    return {TOKENIZER.decode([i]) if i != END else "END" for i in allowed}


def legal_document(grammar, seed):
    """Token ids from a random walk that soon prefers what closes something."""
    state, rng, document = grammar.state(), np.random.default_rng(seed), []
    closing = np.array([token for text in ('"', "}", "]", '",', "a", "0") for token in ids(text)])
    while True:
        mask = state.allowed()
        assert mask.any(), TOKENIZER.decode(document)
        if mask[END]:
            return document
        wanted = closing[mask[closing]] if len(document) > 10 and rng.random() < 0.8 else closing[:0]
        document.append(int(rng.choice(wanted[:1] if wanted.size else np.flatnonzero(mask))))
        state.commit(document[-1:])
        assert len(document) < 2000, TOKENIZER.decode(document)
