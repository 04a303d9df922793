"""Call formats of chat templates."""

import pytest

from specinfer.errors import RequestError
from specinfer.serve.dialect.call_format import CallFormat, format_in
from tests.unit.serve.dialect.families import (
    FAMILIES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    MISTRAL_IDS,
    PLAIN,
    QWEN,
    tokenizer,
)

CODER = "{{ tools }}<tool_call>\n<function=f>\n<parameter=a>{{ arguments }}</function>\n</tool_call>"
OTHER = "{% for t in tools %}<|tool|>{{ t }}{% endfor %}"


def test_a_template_shows_the_form():
    cases = [
        (QWEN, "hermes"),
        (LLAMA, "llama3"),
        (LLAMA.replace('"', '\\"'), "llama3"),
        (MISTRAL, "mistral"),
        (MISTRAL_ARGS, "mistral_args"),
        (MISTRAL_IDS, "mistral_ids"),
        ("<|start_header_id|>" + QWEN, "hermes"),  # Hermes has models of Llama's, too
        ("", None),
        (PLAIN, None),
        (QWEN.replace("tools", "xtools"), None),
        (CODER, "qwen3_coder"),
        (CODER.replace("<parameter=", "<argument="), None),
        (CODER.replace("<function=", "<arg_key>"), None),
        (OTHER, None),
    ]
    for template, name in cases:
        assert format_in(template) == name, template


def test_a_model_without_a_supported_format_is_refused():
    cases = [
        (None, "the model has no chat template to describe tools in; leave tools out"),
        (PLAIN, "the model's chat template has no tools; leave tools out, or serve with --call-format her"),
        (
            OTHER,
            "the model's chat template writes tool calls in an unsupported format; leave tools out",
        ),
    ]
    for template, begins in cases:
        with pytest.raises(RequestError) as caught:
            pytest.fail(f"{template!r}: {CallFormat.of(tokenizer(template))}")
        assert str(caught.value).startswith(begins), template
        assert caught.value.parameter == "tools", template


def test_a_format_may_be_chosen_by_name():
    assert CallFormat.of(tokenizer(LLAMA), "llama3") == CallFormat.of(tokenizer(LLAMA))
    assert CallFormat.of(tokenizer(QWEN), "hermes").native
    for template in (LLAMA, None):
        forced = CallFormat.of(tokenizer(template), "hermes")
        assert (forced.name, forced.native, forced.single) == ("hermes", False, False)
    with pytest.raises(RequestError, match="the tool format is 'llama3'; allowed: auto, hermes; auto is the"):
        CallFormat.of(tokenizer(QWEN), "llama3")


def test_other_properties_of_the_template():
    formats = {name: family.format for name, family in FAMILIES.items()}
    assert [name for name, found in formats.items() if found.single] == ["llama3"]
    assert [name for name, found in formats.items() if found.name == "mistral_ids"] == ["mistral_ids"]
    assert [name for name, found in formats.items() if not found.native] == ["hermes, described"]


def test_marks_that_are_special_tokens_have_to_be_visible():
    visible = {name: tuple(family.format.special.values()) for name, family in FAMILIES.items()}
    assert visible["qwen"] == visible["hermes"] == ()  # there they are text
    assert visible["hermes, special"] == (257, 258)
    assert visible["mistral_ids"] == (257, 259, 258)
    for name, family in FAMILIES.items():
        marks = family.format.special
        assert [family.tokenizer.text_of(i) for i in visible[name]] == list(marks)
