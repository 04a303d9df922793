"""`specinfer demo`: answers three prompts with and without token trees, and explains the difference."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING
from uuid import uuid4

import click

from specinfer.cli.options import DEFAULT_MODEL, Command

if TYPE_CHECKING:
    from specinfer.llm import LLM
    from specinfer.request import RequestOutput

    _Pairs = Sequence[
        tuple[RequestOutput, RequestOutput]
    ]  # two answers of a round: without speculation, and with it

HEAD = "smollm2-135m-head"  # a draft head that comes with the package, for DEFAULT_MODEL
TEXT = (
    "The lighthose on the northern cape was built in 1871, after three ships had been lost on the same reef "
    "in one winter. Its lamp burned oil until 1924, when a cable brought electricity from the village. For "
    "ninety years a keeper lived in the tower with his family and wrote down the weather four times a day. "
    "Since 1989, the light has run by itself, and the keeper's house is a small museum that opens in summer."
)
MAX_TOKENS = 160
ROUNDS = 3
GAIN = 1.05  # a smaller ratio of speeds counts as no gain
_WIDTH = 96  # of lines, in characters
_INDENT = "   "


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of the demo; `source` completes a sentence: the accepted tokens come from ..."""

    name: str
    question: str
    source: str
    prediction: str | None = None


PROMPTS = (
    Prompt(
        "A question",
        "What are the benefits of regular exercise?",
        "the draft head, which was trained on this model's answers",
    ),
    Prompt(
        "An edit",
        f"Correct the spelling:\n\n{TEXT}",
        "the old text, which the request sends as its `prediction`",
        TEXT,
    ),
    Prompt(
        "Code",
        "Write a Python function that checks whether a number is prime.",
        "the draft head and from earlier lines, as code is regular and repeats itself",
    ),
)


@click.command(cls=Command)
def demo() -> None:
    """Answer a question, an edit and a coding task with and without speculation.

    The model is SmolLM2-135M. A small draft head that comes with specinfer proposes tokens, and so does
    prompt lookup. Exit status 1: a text differs with speculation.
    """
    from specinfer.llm import LLM
    from specinfer.progress import ProgressBar
    from specinfer.speculation_config import NO_SPECULATION

    with LLM(
        DEFAULT_MODEL,
        drafts=[HEAD],
        draft_quantization="int8",
        max_context=2048,
        progress=ProgressBar(),
    ) as speculative:
        plain = speculative.variant(replace(speculative.config, speculation=NO_SPECULATION))
        target = speculative.models.target
        click.echo(
            f"{DEFAULT_MODEL} on {target.device}, {str(target.dtype).removeprefix('torch.')}.\n"
            "Its draft head and prompt lookup propose token trees. The model verifies a tree in one step\n"
            "and keeps the tokens that it agrees with.\n"
        )
        answers: list[_Pairs] = []
        for number, prompt in enumerate(PROMPTS, 1):
            click.secho(f"{number}. {prompt.name}", bold=True)
            click.echo(_wrapped(prompt.question, "> ") + "\n")
            answer(speculative, prompt, show=True)
            # The answer above has warmed both up; they take turns, so that a slow moment affects both.
            pairs = [(answer(plain, prompt), answer(speculative, prompt)) for _ in range(ROUNDS)]
            answers.append(pairs)
            show_comparison(prompt, pairs)
    show_end(answers)


def answer(llm: LLM, prompt: Prompt, *, show: bool = False) -> RequestOutput:
    """The finished answer to a prompt, printed as it is generated with `show`."""
    from specinfer.sampling_params import SamplingParams

    # The salt is new for each answer, so that lookup finds nothing in the answers of earlier rounds.
    params = SamplingParams(
        temperature=0, max_tokens=MAX_TOKENS, prediction=prompt.prediction, cache_salt=uuid4().hex
    )
    last = None
    for last in llm.stream_chat([{"role": "user", "content": prompt.question}], params):
        if show:
            click.echo(last.new_text, nl=False)
    assert last is not None, "an answer has at least one step"
    if show:
        click.echo()
    return last


def _wrapped(text: str, mark: str = "") -> str:
    """Return a text in indented lines that begin with `mark`."""
    indent = _INDENT + mark
    return click.wrap_text(text, _WIDTH, indent, indent, preserve_paragraphs=True)


def show_comparison(prompt: Prompt, pairs: _Pairs) -> None:
    """Print the figures of a prompt, median tokens per second among them, and why it gained or not."""
    without, trees = (median(map(_rate, outputs)) for outputs in zip(*pairs, strict=True))
    per_step = pairs[-1][1].figures.tokens_per_step
    rows = [
        ("", "tokens per step", "tokens per second"),
        ("without speculation", "1.00", f"{without:.1f}"),
        ("with speculation", f"{per_step:.2f}", f"{trees:.1f}"),
    ]
    click.echo()
    for name, steps, rate in rows:
        click.echo(f"{_INDENT}{name:<20}{steps:>17}{rate:>20}")
    click.echo(_wrapped(reason(prompt, trees / without, per_step)) + "\n")


def reason(prompt: Prompt, speedup: float, per_step: float) -> str:
    """A sentence on why speculation gained on a prompt, or did not."""
    cost = per_step / speedup
    if per_step < GAIN:
        return "No gain: hardly any proposal was accepted, so a step makes about one token."
    if speedup < GAIN:
        return (
            f"No gain: a step makes {per_step:.2f} tokens, but takes {cost:.2f} times as long as a step "
            "without a tree on this machine."
        )
    return (
        f"{speedup:.2f} times as fast: a step makes {per_step:.2f} tokens and takes {cost:.2f} times as long "
        f"as a step without a tree; the accepted tokens come from {prompt.source}."
    )


def show_end(answers: Sequence[_Pairs]) -> None:
    """Print how to see the trees, and whether all texts are identical; exits with 1 if not."""
    click.echo("""See the trees: specinfer generate --show-trees 'Write the word "river" ten times.'""")
    click.echo("Chat with the model in a browser: specinfer serve")
    differing = [a.token_ids != b.token_ids for pairs in answers for a, b in pairs]
    if any(differing):
        click.echo(
            f"\nDIFFERENT texts: {sum(differing)} of {len(differing)} answers differ with speculation."
        )
        sys.exit(1)
    click.echo(f"\nIdentical texts: all {len(differing)} answers are the same with and without speculation.")


def _rate(output: RequestOutput) -> float:
    """Tokens per second after the first token, which comes with the prefill."""
    timing = output.timing
    assert timing.first_token is not None
    assert timing.finished is not None
    return (len(output.token_ids) - 1) / max(timing.finished - timing.first_token, 1e-9)
