"""Markdown of answers: rendering, the sanitizer, streaming, copying, and marks of tokens."""

import pytest

from tests.scripted_server import says_in_steps, steps_of
from tests.unit.serve.page.asking import Page, Serving, ask

pytestmark = pytest.mark.thorough

CASES = {  # a text, and a part of its HTML; the page's own frames and buttons are not shown here
    "a *b* **c** ~~d~~ `e*f*`": "<p>a <em>b</em> <strong>c</strong> <del>d</del> <code>e*f*</code></p>",
    "# One\n\nTwo": "<h3>One</h3><p>Two</p>",
    "one\ntwo": "<p>one<br>two</p>",
    "- a\n- b\n  1. c": "<ul><li>a</li><li>b<ol><li>c</li></ol></li></ul>",
    "- [x] done\n- [ ] open": "<ul><li>\u2611 done</li><li>\u2610 open</li></ul>",
    "3. c\n4. d": '<ol start="3"><li>c</li><li>d</li></ol>',
    "```js\nlet a = '<b>';\n```": "<pre><code class=\"language-js\">let a = '&lt;b&gt;';</code></pre>",
    "```\nx\n```\n\nafter": "<pre><code>x</code></pre><p>after</p>",
    "```\nnot closed": "<pre><code>not closed</code></pre>",
    "|a|b|\n|-|-:|\n|1|2<br>3|": '<td>1</td><td align="right">2<br>3</td>',
    "[x](https://a.example)": 'href="https://a.example"',
    "[x][1] and\n\n[1]: https://b.example": 'href="https://b.example"',
    "![a cat](https://a.example/c.png)": '<a href="https://a.example/c.png">a cat</a>',
    r"Let \(a_1 * b_2 * c\) be": r'<p>Let <span class="math">\(a_1 * b_2 * c\)</span> be</p>',
    "$a_1$ and $b_1$": '<span class="math">$a_1$</span> and <span class="math">$b_1$</span>',
    "Use $HOME/$USER here": "$HOME/$",
    "$$\n\n```\nx\n```": "<pre><code>x</code></pre>",
    "It costs $5, or $6-$7, or US$8.": "<p>It costs $5, or $6-$7, or US$8.</p>",
    "\\[\nx_1 * y\n\n= \\frac{a}{b}\n\\]\nso": '<div class="math">\\[\nx_1 * y\n\n= \\frac{a}{b}\n\\]</div>',
    "$$\na < b\n$$": '<div class="math">$$\na &lt; b\n$$</div>',
    "$$\na_1\nb_1": '<div class="math">$$\na_1\nb_1</div>',
    r"\*not\* and \# not": "<p>*not* and # not</p>",
    "a\r\nb\r\n\r\n- c": "<p>a<br>b</p><ul><li>c</li></ul>",
}
HOSTILE = (
    '<script>document.title = "taken"</script>',
    '<img src=x onerror="document.title=1">',
    "<style>body { display: none }</style>",
    '<iframe srcdoc="<script>parent.document.title=1</script>"></iframe>',
    '<svg><a xlink:href="javascript:document.title=1"><text>x</text></a></svg>',
    '<form action="https://a.example"><input name=key></form>',
    "[x](javascript:document.title=1) [y](JaVaScRiPt&colon;alert(1)) [z](data:text/html,<script>1</script>)",
    '[x](https://a.example "t\\" onclick=\\"document.title=1")',
    '![x](" onerror="document.title=1)',
    '```"><script>document.title=1</script>\nx\n```',
    "$<script>document.title=1</script>$ \\(<b>x</b>\\)",
    "<details open ontoggle=document.title=1>x</details>",
)
PROSE = """async ([texts, size]) => {
    const { Prose } = await import("/page/prose.js");
    return texts.map((text) => {
        const into = document.createElement("div");
        const prose = new Prose(into, () => ({ on: false, inCode: false }), () => {});
        for (let at = 0; at < text.length; at += size) {
            prose.append(text.slice(at, at + size), null);
            if (size < text.length) prose.finish(); // renders what there is
        }
        prose.finish();
        for (const one of into.querySelectorAll(".code-head")) one.remove();
        for (const one of into.querySelectorAll(".code, .table")) one.replaceWith(...one.childNodes);
        for (const one of into.querySelectorAll("pre")) one.removeAttribute("tabindex");
        for (const name of ["target", "rel"])
            for (const one of into.querySelectorAll("a")) one.removeAttribute(name);
        return into.innerHTML;
    });
}"""


def squeezed(html: str) -> str:
    """HTML without the line breaks between elements."""
    return html.replace(">\n", ">").replace("\n<", "<")


def test_markdown_is_rendered_and_the_same_however_it_arrives(page: Page, opened: Serving) -> None:
    opened(says_in_steps("unused"))
    texts = [*CASES, "\n\n".join(CASES), *HOSTILE]
    whole = page.evaluate(PROSE, [texts, 1_000_000])
    for (text, part), html in zip(CASES.items(), whole, strict=False):
        assert squeezed(part) in squeezed(html), f"{text!r} is {html!r}"
    for size in (1, 3, 7):
        for text, one, other in zip(texts, whole, page.evaluate(PROSE, [texts, size]), strict=True):
            assert other == one, f"{text!r}, {size} characters at a time"


def test_html_of_a_model_is_text_and_never_runs(page: Page, opened: Serving) -> None:
    text = "\n\n".join(HOSTILE)
    opened(says_in_steps(text))
    ask(page, text)
    found = page.evaluate(
        """() => [...document.querySelectorAll("#messages *")].flatMap(one => [
            ...(/^(script|img|style|iframe|svg|form|input|object|details)$/.test(one.localName)
                && !one.closest(".strip") ? [one.localName] : []),
            ...[...one.attributes].filter(({ name, value }) => name.startsWith("on") || name === "style"
                && !one.closest(".strip") || /^\\s*(javascript|data):/i.test(value))
                .map(({ name, value }) => `${name}=${value}`),
        ])"""
    )
    assert found == []
    assert page.locator(".user .words").inner_text() == text
    assert '<img src=x onerror="document.title=1">' in page.locator(".prose").inner_text()
    assert page.title().endswith(" - specinfer")
    links = page.locator(".prose a[href]").evaluate_all("all => all.map(one => `${one.rel} ${one.target}`)")
    assert set(links) == {"noopener noreferrer nofollow _blank"}


@pytest.mark.parametrize("host", ["127.0.0.1", "page.test"])
def test_code_and_answers_are_copied_also_without_https(page: Page, serving: Serving, host: str) -> None:
    text = "Try:\n\n```python\nprint(1)\nprint(2)\n```\n\nor **not**."
    page.goto(serving(says_in_steps(text)).url.replace("127.0.0.1", host))
    assert page.evaluate("isSecureContext") == (host == "127.0.0.1")
    page.context.grant_permissions(["clipboard-write"])
    ask(page, "How?")
    assert page.locator(".code-head").inner_text() == "python\nCopy"
    for name, copied in {"Copy code": "print(1)\nprint(2)", "Copy": text}.items():
        button = page.get_by_role("button", name=name, exact=True)
        button.click()
        button.or_(page.locator(":focus")).filter(has_text="Copied").wait_for()
        assert page.evaluate("document.activeElement.textContent") == "Copied"
        page.fill("#words", "")
        page.focus("#words")
        page.keyboard.press("Control+V")
        assert page.input_value("#words") == copied, name


MARKED = (
    "## The *first* word\n\nA `call(x)` of **print** [the list](https://a.example/the/list) & more_or_less, "
    "2 * 3 < 7.\n\n```py\nprint(word, the)\n```\n\n1. the list\n2. un**believ**able\n\n"
    "|the|word|\n|-|-|\n|a|b|\n"
)


@pytest.mark.usefixtures("marking")
def test_each_word_of_markdown_is_marked_as_its_token_but_not_in_code(page: Page, opened: Serving) -> None:
    opened(says_in_steps(MARKED, nodes=9))
    ask(page, "Well?")
    tokens = []
    for _, tree in steps_of(MARKED, nodes=9):
        tokens += [tree["texts"][node] for node in tree["path"]] + [tree["next_text"]]
    spans = """all => all.map(one => [one.mark, one.textContent, Boolean(one.closest("code"))])"""
    found = page.eval_on_selector_all(".prose .token", spans)
    assert [(text, tokens[mark].strip()) for mark, text, _ in found if text not in tokens[mark]] == []
    assert not any(inside for _, _, inside in found)
    words = [text for _, text, _ in found]
    assert " ".join(word for word in words if word not in ",.") == (
        "The first word A of print the list & more_or_less 2 * 3 < 7 the list un believ able the word a b"
    )
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Mark guesses in code, too").check()
    page.get_by_role("button", name="Done").click()
    code = [text for _, text, inside in page.eval_on_selector_all(".prose .token", spans) if inside]
    assert "".join(code) == "call(x)print(word,the)"
    assert page.locator(".prose pre code").inner_text() == "print(word, the)\n"
