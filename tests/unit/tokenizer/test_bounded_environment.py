"""Time and memory limits of chat templates, and their low cost."""

import threading
import tracemalloc

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specinfer.errors import ModelFileError, RequestError
from specinfer.tokenizer import template_budget
from specinfer.tokenizer.chat_template import ChatTemplate

pytestmark = pytest.mark.thorough

HI = [{"role": "user", "content": "hi & <b>"}, {"role": "assistant", "content": "yo\nyo"}]
LONG = "{% set long = 'a' * 100000 %}"
DOUBLE = "{% set n = namespace(x=['a']) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"


def render(source, messages=HI, **variables):
    return ChatTemplate(source, {"bos_token": "<s>"}).prepare(messages, True, (), variables).text


@pytest.fixture
def memory():
    """The most bytes that Python had since the test began."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


STEPS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a loop with a text": "{% for i in range(99999) %}{% for j in range(99) %}"
    + "a" * 5000
    + "{% endfor %}{% endfor %}",
    "a macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "a block": (
        "{% set n = namespace(i=0) %}{% block a %}{% set n.i = n.i + 1 %}"
        "{% if n.i < 900000 %}{{ self.a() }}{% endif %}{% endblock %}"
    ),
    "a recursive loop": (
        "{% for x in [0] recursive %}{% if loop.depth < 60 %}{{ loop([0, 1]) }}{% endif %}{% endfor %}"
    ),
    "filters": "{% for i in range(99999) %}{% set x = range(99999) | map('abs') | list %}{% endfor %}",
}
_NESTED = "{% set n = namespace(x=(1,)) %}{% for i in range(40) %}{% set n.x = (n.x, n.x) %}{% endfor %}"
SIZES = {
    "a key that takes long to hash": _NESTED + "{{ {}[n.x] }}",
    "a key of a dict that takes long to hash": _NESTED + "{% set d = {n.x: 1} %}",
    "strip": "{{ ('a' * 400000).strip('b' * 400000 ~ 'a') }}",
    "trim": "{{ ('a' * 400000) | trim('b' * 400000 ~ 'a') }}",
    "a product": "{{ 'a' * 2000000000 }}",
    "a product turned round": "{{ 2000000000 * ['a'] }}",
    "a constant filter": "{{ 'a' | center(2000000000) }}",
    "center": "{{ messages[0].content | center(2000000000) }}",
    "a method": "{{ messages[0].content.ljust(2000000000) }}",
    "zfill": "{{ '1'.zfill(2000000000) }}",
    "expandtabs": "{{ ('\t' * 1000).expandtabs(2000000) }}",
    "sums": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "tildes": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "blocks": (
        "{% set n = namespace(x='a') %}{% for i in range(60) %}"
        "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}"
    ),
    "replace": LONG + "{{ long | replace('a', long) }}",
    "replace nothing": LONG + "{{ long | replace('', long) }}",
    "the method replace": LONG + "{{ long.replace('a', long) }}",
    "join": LONG + "{{ long | join(long) }}",
    "join of a generator": LONG + "{{ range(9999) | map('string') | join(long) }}",
    "the method join": LONG + "{{ long.join(long) }}",
    "indent": LONG + "{{ (long | replace('a', '\n')) | indent(1000000) }}",
    "batch": "{{ [1] | batch(2000000000, 'x') | list }}",
    "slice": "{{ [1] | slice(2000000000) | list }}",
    "percent": "{{ '%2000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (2000000000, 1) }}",
    "percent names": LONG + "{{ ('%(a)s' * 9999) % {'a': long} }}",
    "the filter format": "{{ '%2000000000d' | format(1) }}",
    "format": "{{ '{:2000000000d}'.format(1) }}",
    "a nested format": "{{ '{:{}}'.format(1, 2000000000) }}",
    "format_map": LONG + "{{ ('{a}' * 9999).format_map({'a': long}) }}",
    "format by attr": "{{ ('{:2000000000d}' | attr('format'))(1) }}",
    "format by map": "{{ ['%2000000000d'] | map('format', 1) | list }}",
    "powers": "{{ 10 ** 9999999 }}",
    "numbers": "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "bytes": "{{ (1).to_bytes(2000000000, 'big') }}",
    "round": "{{ 1.5 | round(2000000000, 'floor') }}",
    "JSON with blanks": "{{ messages | tojson(indent=2000000000) }}",
    "JSON with separators": LONG + "{{ [1, 2] | tojson(separators=(long * 9, ':')) }}",
    "sum": LONG + "{{ [long | list] * 999 | sum(start=[]) }}",
    "wordwrap of a word": LONG + "{{ long | wordwrap(1) }}",
    "wordwrap at a long end": LONG + "{{ ('a b ' * 9999) | wordwrap(1, true, long) }}",
    "written": DOUBLE + "{{ n.x }}",
    "as JSON": DOUBLE + "{{ n.x | tojson }}",
    "as indented JSON": DOUBLE + "{{ n.x | tojson(indent=1) }}",
    "as a text": DOUBLE + "{{ n.x | string | length }}",
    "with a tilde": DOUBLE + "{% set y = n.x ~ '' %}",
    "compared": DOUBLE.replace("n.x, n.x", "n.x, n.x")
    + "{% set y = namespace(x=n.x[0]) %}{{ n.x[1] == y.x }}",
    "of a namespace": DOUBLE + "{{ n }}",
    "sorted": DOUBLE + "{{ [n.x, n.x] | sort }}",
    "slices": LONG + "{% for i in range(999) %}{% set y = long[1:] %}{% endfor %}",
    "split": LONG + "{{ long.split('a') | length }}",
    "split at blanks": LONG + "{{ (long * 9).replace('aa', 'a ').split() | length }}",
    "letters": LONG + "{{ long | list | length }}",
    "letters mapped": LONG + "{{ long | map('upper') | join | length }}",
    "words": LONG + "{{ long | wordcount }}",
    "codecs": LONG + "{{ long.encode('punycode') }}",
    "translated": LONG + "{{ long.translate({97: long}) }}",
}


@pytest.mark.parametrize("source", STEPS.values(), ids=STEPS)
def test_a_template_that_does_not_end_is_stopped(source, monkeypatch):
    monkeypatch.setattr(template_budget, "MAX_STEPS", 20_000)
    with pytest.raises(RequestError, match="rejects the messages: ") as error:
        render(source)
    message = str(error.value)
    assert "20000 steps" in message or "too long" in message or "recursion" in message
    assert "\n" not in message


@pytest.mark.parametrize("source", SIZES.values(), ids=SIZES)
def test_a_template_that_takes_all_memory_is_stopped(source, memory, monkeypatch):
    monkeypatch.setattr(template_budget, "_BASE_SIZE", 1 << 20)
    with pytest.raises(RequestError, match="rejects the messages: it ") as error:
        render(source)
    assert "\n" not in str(error.value)
    assert memory() < 50 << 20


def test_a_template_ends_after_some_seconds(monkeypatch):
    now = iter(range(10**9))
    monkeypatch.setattr(template_budget.time, "monotonic", lambda: next(now))
    with pytest.raises(RequestError, match="it takes more than 10 seconds"):
        render("{% for i in range(100) %}{% endfor %}")


def test_limits_grow_with_the_size_of_the_input():
    long = "word " * 4_000_000  # 20 million characters
    source = "{% for m in messages %}{{ m.content | trim }}{{ m.content.split('x')[-1] + '.' }}{% endfor %}"
    assert len(render(source, [{"role": "user", "content": long}])) == 2 * len(long)


def test_each_rendering_and_each_thread_has_separate_limits(monkeypatch):
    monkeypatch.setattr(template_budget, "MAX_STEPS", 150)
    template = ChatTemplate("{% for i in range(100) %}{{ i % 10 }}{% endfor %}", {})
    source = "0123456789" * 10
    monkeypatch.setattr(template_budget, "MAX_STEPS", 250)
    made = []
    threads = [
        threading.Thread(target=lambda: made.append(template.prepare(HI, True).text)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [source] * 8
    assert [template.prepare(HI, True).text for _ in range(3)] == [source] * 3


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "9" * 5000 + " }}",
        "{{ 'a' | pprint }}",
        "{{ 1 +",
    ],
)
def test_a_template_that_cannot_be_compiled_is_refused(source):
    with pytest.raises(ModelFileError, match="does not parse") as error:
        render(source)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}",
        "{% for m in messages[::-1] %}{{ loop.index0 }}{{ loop.last }}{{ m['content'][1:3] }}{% endfor %}",
        "{{ messages | map(attribute='content') | join(', ') }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list }}",
        "{{ [[1], [2, 3]] | sum(start=[]) }}{{ [1, 2.5] | sum }}{{ [{'n': 2}] | sum(attribute='n') }}",
        "{{ [3, 1] | min }}{{ [3, 1] | max }}{{ messages | map(attribute='content') | max }}{{ [] | max }}",
        "{{ ('one two ' * 9) | wordwrap(12) }}{{ ('one two ' * 9) | wordwrap(12, false, '~') }}",
        "{{ ('one two ' * 9) | truncate(12) }}{{ ('one two ' * 9) | truncate(12, true, '', 0) }}",
        "{{ messages | length }}{{ messages[0].content | upper | replace('H', 'J') | indent(2) | e }}",
        "{{ messages[1].content.split('\n') }}{{ '{} and {:>4}'.format(1, 'a') }}{{ '%s-%03d' % ('a', 7) }}",
        "{% macro f(a, b='x') %}[{{ a }}{{ b }}{{ varargs }}]{% endmacro %}{{ f(1) }}{{ f(1, 2, 3) }}",
        "{% macro f() %}{{ caller('c') }}{% endmacro %}{% call(x) f() %}{{ x }}{% endcall %}",
        "{% set n = namespace(a=1) %}{% for i in range(5) %}"
        "{% set n.a = n.a * 2 + i % 3 %}{% endfor %}{{ n.a ** 2 }}",
        "{{ none }}{{ undefined_one }}{{ true }}{{ 1.50 }}"
        "{{ [1, 'a', none] }}{{ {'a': 1} }}{{ 1 ~ 'a' ~ none }}",
        "{% filter upper %}a{{ 'b' }}{% endfilter %}{% set x %}c{{ 'd' }}{% endset %}{{ x | length }}{{ x }}",
        "{{ messages | groupby('role') | list | length }}"
        "{{ [3, 1, 2] | sort | reverse | list }}{{ 'abc' | reverse }}",
        "{{ 'a' in 'abc' }}{{ messages[0] == messages[1] }}"
        "{{ 1 < 2 < 3 }}{{ messages[0].role is in ['user'] }}",
        "{{ {'a': 1}.items() | list }}{% for k, v in {'a': [1, 2]} | items %}"
        "{{ k }}{{ v | sum }}{% endfor %}",
        "{% for x in [1, [2, 3]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
        "{{ [1, 2, 3, 4] | batch(3, 0) | list }}{{ [1, 2, 3] | slice(2) | list }}{{ 2.567 | round(1) }}",
        "{{ cycler('a', 'b').next() }}{{ dict(a=1) }}{{ (1).to_bytes(2, 'big') }}{{ 'a'.ljust(3) + '|' }}",
        "{{ 'one two' | title | center(20) }}{{ 'a b'.split() }}{{ 'a'.encode('utf-8') }}"
        "{{ [[1, 2], [3]] | map('first') | list }}{{ 'a' | default('b') }}",
        "{% for m in messages if m.role == 'user' %}{{ m.content | trim | first }}{% else %}none{% endfor %}",
    ],
)
def test_ordinary_templates_are_rendered_as_jinja_renders_them(source):
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    expected = plain.from_string(source).render(messages=HI, add_generation_prompt=True, tools=None)
    assert render(source) == expected
