import re

import pytest

from specinfer.errors import ModelFileError, RequestError
from specinfer.tokenizer.chat_template import ChatTemplate

HI = [{"role": "user", "content": "hi"}]


def render(source, messages=HI, tools=(), variables=None, **special_tokens):
    return ChatTemplate(source, special_tokens).prepare(messages, True, tools, variables).text


def test_blocks_are_trimmed_as_model_authors_expect():
    source = """\
    {% for m in messages %}
{{ m.role }}: {{ m.content }}
    {% endfor %}
end"""
    assert render(source) == "user: hi\nend"


def test_special_tokens_and_loop_controls_are_there():
    source = (
        "{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}"
    )
    messages = [{"role": "system", "content": "be brief"}, *HI]
    assert render(source, messages, bos_token="<s>") == "<s>hi"


def test_tojson_does_not_escape_unicode_and_html():
    assert render("{{ {'k': '<\u00e9>'} | tojson }}") == '{"k": "<\u00e9>"}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"


def test_deeply_nested_values_are_refused():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="rejects the messages"):
        render("{{ messages | tojson }}", [{"role": "user", "content": "", "more": deep}])


def test_tools_and_variables_reach_the_template():
    assert render("{% if tools %}T{% endif %}{% if not documents %}D{% endif %}") == "D"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert render("{{ tools | tojson }}", tools=tools) == '[{"type": "function", "function": {"name": "f"}}]'
    assert render("{{ enable_thinking is false }}", variables={"enable_thinking": False}) == "True"
    with pytest.raises(RequestError, match=r"rejects the messages: .*multiple values .*'tools'"):
        render("", variables={"tools": tools})


def test_refusals_of_the_template_keep_its_message():
    source = (
        "{% if messages[0].role != 'system' %}"
        "{{ raise_exception('System message must come first') }}{% endif %}"
    )
    with pytest.raises(RequestError, match="rejects the messages: System message must come first"):
        render(source)


def test_a_template_that_stumbles_is_a_request_error():
    for wrong in ("'a' + messages[0].more", "messages[7].content", "messages[0].more.upper()", "1 / 0"):
        with pytest.raises(RequestError, match="rejects the messages"):
            render(f"{{{{ {wrong} }}}}", [{"role": "user", "content": "hi", "more": 3}])


def test_messages_without_a_role_are_refused_before_the_template_runs():
    for messages, words in (
        ([], "messages is empty"),
        ([*HI, {"content": "x"}], "messages[1] is {'content': 'x'}"),
        (["hi"], "messages[0] is 'hi'"),
    ):
        with pytest.raises(RequestError, match=re.escape(words)):
            render("x", messages)


def test_a_template_cannot_reach_python_or_change_the_messages():
    with pytest.raises(RequestError):
        render("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(RequestError):
        render("{{ messages.append(1) }}", messages)
    assert messages == HI


def test_a_template_cannot_read_the_environment(monkeypatch):
    monkeypatch.setenv("SPECINFER_API_KEY", "very-secret")
    for source in (
        # CVE-2025-27516: `attr` finds the method that the sandbox guards when it is called directly.
        "{{ ('{0.__globals__[json].codecs.sys.modules[os].environ}' | attr('format'))(raise_exception) }}",
        "{{ '{0.__globals__}'.format(raise_exception) }}",
        "{{ '%s' | format(raise_exception.__globals__) }}",
        "{{ ['{0.__globals__}'] | map('format', raise_exception) | list }}",
        "{{ cycler.__init__.__globals__.os.environ }}",
    ):
        try:
            shown = render(source)
        except RequestError as error:
            shown = str(error)
        assert "very-secret" not in shown, source
        assert "modules" not in shown, source


def test_a_template_that_does_not_parse_is_the_models_fault():
    for source in ("a\n{% if %}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ " + "9" * 5000 + " }}"):
        with pytest.raises(ModelFileError, match=r"does not parse") as error:
            render(source)
        assert "\n" not in str(error.value)


def test_it_knows_the_variables_a_caller_may_give() -> None:
    for source, variables in (
        ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", set()),
        ("{% if enable_thinking is defined %}{{ raise_exception('no') }}{% endif %}", {"enable_thinking"}),
        ("{% set style = 'a' %}{{ style }}{{ strftime_now('%d') }}{{ tools | tojson }}", set()),
        ("{{ reasoning_effort or 'low' }}{{ range(2) | list }}", {"reasoning_effort"}),
    ):
        assert ChatTemplate(source, {"eos_token": "</s>"}).variables == variables, source


CALL = {"id": "call_abc", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING = [
    *HI,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_abc", "content": "4"},
]
WRITES_IDS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.id }}{% endfor %}"
    "{{ m.tool_call_id }}{% endfor %}"
)


def test_a_template_that_asks_for_ids_of_nine_characters_gets_them():
    for asks in (
        "{% if c.id is not defined or c.id|length != 9 %}{{ raise_exception('9 characters') }}{% endif %}",
        "{% if c['id'] | length == 9 %}{% else %}{{ raise_exception('9 characters') }}{% endif %}",
        "{% if (c.id | string | length) != 9 %}{{ raise_exception('9 characters') }}{% endif %}",
        "[CALL_ID]",
    ):
        shown = render(WRITES_IDS.replace("{{ c.id }}", asks + "{{ c.id }}"), CALLING)
        shown = shown.replace("[CALL_ID]", "")
        assert shown[:9] == shown[9:], asks
        assert (shown.isalnum(), len(shown)) == (True, 18), asks
    assert render(WRITES_IDS, CALLING) == "call_abc" * 2  # others get the ids there are
