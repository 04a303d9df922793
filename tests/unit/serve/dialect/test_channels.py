"""Harmony, the format of gpt-oss: reasoning, content and calls in channels; and Gemma 4's reasoning."""

import json
from functools import partial

import pytest

from specinfer.errors import RequestError
from specinfer.grammar.grammar import GrammarCompiler
from specinfer.processors.thinking import ThinkingState
from specinfer.serve.dialect.call_format import CallFormat, ToolChoice
from specinfer.serve.dialect.call_grammar import call_grammar
from specinfer.serve.dialect.channels import Channels
from specinfer.serve.dialect.dialect import Dialect
from specinfer.structured_output import structured_output
from specinfer.tokenizer import Rendered, Tokenizer
from tests.schemas import closed
from tests.unit.serve.dialect.families import Family, tokenizer, tools_of, verdict, verdict_of_form
from tests.unit.serve.dialect.whole_answers import said

AUTO, REQUIRED = ToolChoice("auto"), ToolChoice("required")
HARMONY = (
    "namespace functions "
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    """{# max 1 tool call per message #}
{% for m in messages %}<|start|>{{ m.role }}{% if m.tool_calls %}
{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}
{% set f = m.tool_calls[0].function %} to=functions.{{ f.name }}<|channel|>commentary json<|message|>
{{- f.arguments | tojson }}<|call|>{% else %}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
)
HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|end|>")
TOOLS = tools_of({"name": "get", "parameters": closed({"city": {"type": "string"}})}, {"name": "get_time"})
FAMILY = Family(HARMONY, HARMONY_MARKS)
DIALECT = FAMILY.dialect
THOUGHT = "<|channel|>analysis<|message|>Hm: <b|.<|end|><|start|>assistant"
NOTE = "<|channel|>commentary<|message|>So:<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Yes.\n"
ARGUMENTS = '{"city": "Oslo"}'
CALL = f"<|channel|>commentary to=functions.get <|constrain|>json<|message|>{ARGUMENTS}"
ROLE = f" to=functions.get<|channel|>commentary json<|message|>{ARGUMENTS}"
GOT = [("get", ARGUMENTS)]


def read(*pieces, dialect=DIALECT, tools=TOOLS, inside=False):
    return said(dialect, tools, *pieces, inside=inside)


def test_an_answer_is_reasoning_content_and_a_call_however_it_is_cut():
    other = "<|channel|>commentary to=functions.put <|constrain|>json<|message|>{}"
    cases = [
        (FINAL, ("", "Yes.\n", [])),
        (THOUGHT + FINAL, ("Hm: <b|.", "Yes.\n", [])),
        (THOUGHT + NOTE + THOUGHT + FINAL, ("Hm: <b|." * 2, "So:\n\nYes.\n", [])),
        (CALL, ("", "", GOT)),
        (ROLE, ("", "", GOT)),
        (f"{THOUGHT}{CALL}<|call|>", ("Hm: <b|.", "", GOT)),
        (THOUGHT + NOTE + ROLE, ("Hm: <b|.", "So:", GOT)),
        # a function that is not offered, and damaged answers
        (other, ("", "{}", [])),
        (CALL.replace(ARGUMENTS, "oops"), ("", "oops", [])),
        (THOUGHT.partition("<|end")[0], ("Hm: <b|.", "", [])),
        (f"{THOUGHT}<|channel|>comm", ("Hm: <b|.", "", [])),
        ("hello", ("", "hello", [])),
        ("Plain <|weird|> text <|", ("", "Plain <|weird|> text <|", [])),
        (FINAL + "<|return|>", ("", "Yes.\n", [])),
        (" to=functions.get<|channel|>comm", ("", "", [])),
        ("", ("", "", [])),
    ]
    for text, parts in cases:
        assert read(*text) == parts, text
        for cut in range(len(text)):
            assert read(text[:cut], text[cut:]) == parts, text[:cut]
    assert read("Yes.", inside=True) == ("", "Yes.", [])
    assert read(THOUGHT + CALL, tools=()) == ("Hm: <b|.", ARGUMENTS, [])


def test_answers_are_messages_and_calls_follow_their_schemas():
    in_family = partial(call_grammar, FAMILY.format, TOOLS, reasoning=DIALECT.reasoning)
    free, forced = in_family(AUTO), in_family(REQUIRED)
    calls = [CALL, ROLE, CALL.replace(" <|constrain|>json", ""), THOUGHT + CALL, f"{CALL}<|call|>"]
    for text in [*calls, FINAL, THOUGHT + FINAL, THOUGHT + NOTE + ROLE, "<|channel|>analysis<|message|>Hm"]:
        assert verdict(FAMILY, free, text) is None, text
        assert (verdict(FAMILY, forced, text) is None) == (text in calls), text
    bad = CALL.replace('"Oslo"', "3")
    for grammar in (free, forced):
        assert verdict(FAMILY, grammar, bad) == bad.partition("3")[0]
        assert verdict(FAMILY, grammar, CALL.replace(".get", ".put")) is not None
    assert verdict(FAMILY, in_family(AUTO, starts_inside=True), "more text") is None
    # An end of calls that ends the text is no part of the grammar.
    ids = [257 + HARMONY_MARKS.index("<|call|>"), 256]
    ended = Tokenizer(FAMILY.tokenizer.backend, eos_token_ids=ids, templates=FAMILY.tokenizer.templates)
    dialect = Dialect.of(ended)
    grammar = call_grammar(dialect.calls, TOOLS, REQUIRED, reasoning=dialect.reasoning)
    state = GrammarCompiler(ended, ended.vocab_size).compile(structured_output(grammar=grammar)).state()
    state.commit([*ended.encode(CALL, add_special=False), ids[0]])
    assert state.finished


def test_a_form_is_in_the_final_message():
    form = structured_output(response_format={"type": "json_object"})
    grammar = call_grammar(FAMILY.format, TOOLS, AUTO, reasoning=DIALECT.reasoning, form=form)
    final = "<|channel|>final <|constrain|>json<|message|>{}"
    for text in (CALL, THOUGHT + CALL, final, THOUGHT + final):
        assert verdict(FAMILY, grammar, text) is None, text
    assert verdict(FAMILY, grammar, FINAL) == FINAL.partition("Yes")[0]
    rules = "\n".join(f"{name}: {body}" for name, body in DIALECT.reasoning.preamble_rules(False).items())
    alone = structured_output(preamble=rules, regex="[a-z]+")
    for text in ("<|channel|>final<|message|>ab", f"{THOUGHT}<|channel|>final<|message|>ab"):
        assert verdict_of_form(FAMILY, alone, text) is None, text
        assert read(*text)[1] == "ab"
    assert verdict_of_form(FAMILY, alone, "ab") == ""


def test_the_template_is_recognised_and_its_calls_are_read():
    assert (FAMILY.format.name, FAMILY.format.native, FAMILY.format.single) == ("harmony", True, True)
    calls = [{"id": i, "type": "function", "function": {"name": "get", "arguments": ARGUMENTS}} for i in "ab"]
    asked = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": calls[:1]},
    ]
    answer = FAMILY.prompt(asked, TOOLS).partition("<|start|>assistant")[2].removesuffix("<|start|>assistant")
    assert read(*answer) == ("Hm.", "", [("get", ARGUMENTS)])
    both = [asked[0], asked[1] | {"tool_calls": calls}]
    assert FAMILY.prompt(both, TOOLS).count("to=functions.get") == 2  # one call each
    assert DIALECT.reasoning.state(Rendered("x<|start|>assistant")) == (False, False)
    with pytest.raises(RequestError, match="the tool format is 'hermes'; allowed: auto, harmony; auto"):
        CallFormat.of(FAMILY.tokenizer, "hermes")
    with pytest.raises(RequestError, match="an unsupported format"):
        CallFormat.of(tokenizer(HARMONY))  # without its special tokens


def test_channels_and_calls_need_the_same_tokens():
    others = [mark for mark in HARMONY_MARKS if mark != "<|call|>"]
    ids = [256, 257 + HARMONY_MARKS.index("<|end|>")]
    ended = Tokenizer(FAMILY.tokenizer.backend, eos_token_ids=ids, templates=FAMILY.tokenizer.templates)
    cases = [("no <|call|>", tokenizer(HARMONY, others), True), ("an end that ends texts", ended, False)]
    for missing in others:
        rest = [mark for mark in HARMONY_MARKS if mark != missing]
        cases.append((f"no {missing}", tokenizer(HARMONY, rest), False))
    for case, tokens, is_harmony in cases:
        dialect = Dialect.of(tokens)
        found = isinstance(dialect.reasoning, Channels), dialect.calls is not None
        assert found == (is_harmony, is_harmony), case
    # The first form that a template shows decides for both.
    both = Dialect.of(tokenizer(HARMONY + "{# <tool_call> #}", HARMONY_MARKS))
    assert (both.calls.name, both.reasoning) == ("hermes", None)


def test_gemma_4_reasons_in_a_channel_of_its_own():
    template = "{% if false %}<|channel>thought\n<channel|>{% endif %}{{ tools }}<|tool_call>{{ tool_calls }}"
    marks = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
    family = Family(template, marks)
    dialect = family.dialect
    assert (dialect.reasoning.open, dialect.calls.name) == ("<|channel>thought", "gemma4")
    thought = "<|channel>thought\nHm.\n<channel|>"
    call = '<|tool_call>call:get{city:<|"|>Oslo<|"|>}<tool_call|>'
    for choice in (AUTO, REQUIRED):
        grammar = call_grammar(dialect.calls, TOOLS, choice, reasoning=dialect.reasoning)
        assert verdict(family, grammar, thought + call) is None
    for cut in range(len(thought + call)):
        pieces = (thought + call)[:cut], (thought + call)[cut:]
        assert read(*pieces, dialect=dialect) == ("Hm.", "", [("get", json.dumps({"city": "Oslo"}))])
    assert dialect.reasoning.state(Rendered(f"<|turn>model\n{thought}")) == (False, True)


def test_a_spent_budget_of_analysis_is_followed_by_the_final_message_or_by_a_call():
    encode, prompt = partial(FAMILY.tokenizer.encode, add_special=False), Rendered("")
    for calls, tail in ((False, "<|channel|>final<|message|>"), (True, "")):
        bound = DIALECT.reasoning.bound(5, prompt, FAMILY.tokenizer, calls=calls)
        thinking = ThinkingState(bound, FAMILY.tokenizer.bytes_of)
        thinking.commit(encode("<|channel|>analysis<|message|>Hm."))
        thinking.commit(encode(f"<|end|><|start|>assistant{NOTE}<|channel|>analysis<|message|>"))
        path = []
        while (token := thinking.required((*encode("ab"), *path))) is not None:
            path.append(token)
        assert path == encode(f"<|end|><|start|>assistant{tail}"), calls
        thinking.commit((*encode("ab"), *path))
        begun = encode("<|channel|>")
        # With calls no analysis follows, which would end at once and begin again.
        assert thinking.barred(begun) == (tuple(encode("a")) if calls else ()), calls
        assert not thinking.barred((*begun, *encode("comment"))), calls
