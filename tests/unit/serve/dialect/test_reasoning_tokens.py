"""Tokens of reasoning: exact, however an answer is cut, spelled and delayed."""

import pytest

from specinfer.request import Delta, FinishReason
from specinfer.serve.dialect.dialect import Dialect
from specinfer.serve.dialect.reasoning import Reasoning
from tests.unit.serve.dialect.families import FAMILIES, PLAIN, THINKING, tokenizer, tools_of
from tests.unit.serve.dialect.test_channels import FAMILY as HARMONY

MARKS = ("<think>", "</think>")
# How the marks are spelled: several tokens, one token that is text, or a special one.
SPELLINGS = {
    "bytes": tokenizer(PLAIN, tool_template=THINKING),
    "text": tokenizer(THINKING, text=MARKS),
    "special": tokenizer(THINKING, special=MARKS),
}
# Whether the prompt has opened the reasoning, the reasoning with its marks, and the rest.
ANSWERS = [
    (False, "<think>\nHm, \u00e9.\n</think>", "\n\nYes</think>"),
    (False, "\n <think></think>", "Yes"),
    (False, "<think>It never ends </thin", ""),
    (False, "", "<thin"),
    (False, "", "No <think>Hm</think>"),
    (True, "Hm.</think>", "Yes"),
    (True, "Hm <think>", ""),
    (True, "", ""),
]
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|>"
GET = '<|channel|>commentary to=functions.get<|message|>{"city": "Oslo"}<|call|>'
NEXT, FINAL = "<|start|>assistant", "<|channel|>final<|message|>Yes"
NOTE = "<|channel|>commentary<|message|>Hi<|end|>"


def counted(dialect, tokens, ids, *, inside=False, tools=()):
    """Count in deltas of one token, of five, and of all, whose text comes with the last one."""
    found = set()
    for size in (1, 5, max(len(ids), 1)):
        reader = dialect.reader(tools, inside, tokens.bytes_of)
        for start in range(0, len(ids), size):
            reader.read(Delta("", token_ids=tuple(ids[start : start + size])))
        reader.read(Delta("", tokens.decode(ids), finish_reason=FinishReason.STOP))
        found.add(reader.reasoning_tokens)
    [count] = found
    return count


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_tokens_up_to_the_end_mark_are_reasoning(spelling):
    tokens = SPELLINGS[spelling]
    dialect = Dialect(None, "", Reasoning.of(tokens))
    for inside, reasoning, rest in ANSWERS:
        first, second = (tokens.encode(text, add_special=False) for text in (reasoning, rest))
        assert counted(dialect, tokens, first + second, inside=inside) == len(first), (reasoning, rest)


def test_a_token_that_completes_the_mark_is_reasoning_with_all_its_text():
    tokens = tokenizer(THINKING, text=("nk>Yes",))
    ids = tokens.encode("<think>Hm</thi", add_special=False) + tokens.encode("nk>Yes", add_special=False)
    assert len(ids) == 15
    assert counted(Dialect.of(tokens), tokens, [*ids, *b"no"]) == 15


def test_all_analysis_is_reasoning_and_calls_are_not():
    tools = tools_of({"name": "get", "parameters": {"type": "object"}})
    encode, dialect = HARMONY.tokenizer.encode, HARMONY.dialect
    size = len(encode(ANALYSIS, add_special=False))
    both = 2 * size + len(encode(NEXT, add_special=False))
    cases = [
        (ANALYSIS + NEXT + FINAL, size),
        (ANALYSIS + NEXT + ANALYSIS + NEXT + GET, both),
        (ANALYSIS.removesuffix("<|end|>") + FINAL, size),  # the mark that ends it is another one
        (ANALYSIS.removesuffix("<|end|>"), size - 1),
        (GET.replace("commentary", "analysis"), 0),
        (FINAL, 0),
        (NOTE + NEXT + ANALYSIS, both - size),
    ]
    for text, count in cases:
        ids = encode(text, add_special=False)
        assert counted(dialect, HARMONY.tokenizer, ids, tools=tools) == count, text


def test_a_model_that_does_not_reason_has_none():
    family = FAMILIES["hermes"]
    ids = family.tokenizer.encode("<think>Hm</think>Yes", add_special=False)
    assert counted(Dialect(family.format, "", None), family.tokenizer, ids) == 0
