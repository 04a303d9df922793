"""`specinfer demo`: a real model answers through token trees; then what that gained, honestly."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING
from uuid import uuid4

import click

from specinfer.cli.options import DEFAULT_MODEL

if TYPE_CHECKING:
    from specinfer.llm import LLM
    from specinfer.request import RequestOutput

HEAD = "smollm2-135m-head"  # a draft head that comes with the package, for DEFAULT_MODEL
TEXT = (
    "The lighthose on the northern cape was built in 1871, after three ships had been lost on the same reef "
    "in one winter. Its lamp burned oil until 1924, when a cable brought electricity from the village. For "
    "ninety years a keeper lived in the tower with his family and wrote down the weather four times a day. "
    "Since 1989, the light has run by itself, and the keeper's house is a small museum that opens in summer."
)
MAX_TOKENS = 160
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of the demo, and why speculation gains on it what it gains."""

    name: str
    question: str
    why: str
    prediction: str | None = None


PROMPTS = (
    Prompt(
        "a question",
        "What are the benefits of regular exercise?",
        "the draft head has learned how this model phrases common answers",
    ),
    Prompt(
        "a program",
        "Write a Python function that checks whether a number is prime.",
        "code is regular, and the explanation repeats parts of it",
    ),
    Prompt(
        "a correction",
        f"Correct the spelling:\n\n{TEXT}",
        "the answer repeats the text that was sent as `prediction`",
        TEXT,
    ),
)
Pairs = Sequence[tuple["RequestOutput", "RequestOutput"]]  # without speculation and with it


@click.command()
def demo() -> None:
    """Answer a question with SmolLM2-135M through token trees, then compare with no speculation.

    A small draft head that comes with specinfer proposes tokens, and lookups propose what the text repeats.
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
        click.echo(f"{DEFAULT_MODEL} on {speculative.models.target.device}, {_dtype(speculative)}\n")
        click.echo(f"> {PROMPTS[0].question}\n")
        _answer(speculative, PROMPTS[0], echo=True)
        click.echo("\n")
        # The answer above warmed everything up; now both take turns, so that a slow moment hits both.
        compared = [
            [(_answer(plain, prompt), _answer(speculative, prompt)) for _ in range(ROUNDS)]
            for prompt in PROMPTS
        ]
    _show(compared)


def _answer(llm: LLM, prompt: Prompt, *, echo: bool = False) -> RequestOutput:
    from specinfer.sampling_params import SamplingParams

    # A salt of its own: an answer asked for again must not be looked up in the round before.
    params = SamplingParams(
        temperature=0, max_tokens=MAX_TOKENS, prediction=prompt.prediction, cache_salt=uuid4().hex
    )
    last = None
    for last in llm.stream_chat([{"role": "user", "content": prompt.question}], params):
        if echo:
            click.echo(last.new_text, nl=False)
            sys.stdout.flush()
    assert last is not None, "an answer has at least one step"
    return last


def _show(compared: Sequence[Pairs]) -> None:
    """A row for each prompt, why it gains, and whether texts are the same."""
    from rich.console import Console
    from rich.table import Table

    columns = ("tokens/s for", "without", "with trees", "speedup", "tokens/step", "step cost")
    table = Table(*columns, box=None, pad_edge=False)
    for prompt, pairs in zip(PROMPTS, compared, strict=True):
        without, trees = (median(map(_rate, outputs)) for outputs in zip(*pairs, strict=True))
        speedup, per_step = trees / without, pairs[-1][1].figures.tokens_per_step
        figures = (f"{speedup:.2f}x", f"{per_step:.2f}", f"{per_step / speedup:.2f}x")
        table.add_row(prompt.name, f"{without:.1f}", f"{trees:.1f}", *figures)
    Console(highlight=False).print(table)
    identical = all(a.token_ids == b.token_ids for pairs in compared for a, b in pairs)
    click.echo(
        f"\nmedians of {ROUNDS} rounds, after the prompt; identical texts: {'yes' if identical else 'NO'}\n"
    )
    for prompt in PROMPTS:
        click.echo(f"{prompt.name}: {prompt.why}")
    click.echo(
        "\nspeedup = tokens/step / step cost. A step with a tree checks several tokens at once. That costs\n"
        "little where reading the weights takes most of the time, and more on a CPU without wide vectors."
    )
    click.echo("""\nSee the trees: specinfer generate --show-trees 'Write the word "river" ten times.'""")


def _rate(output: RequestOutput) -> float:
    """Tokens per second after the first token, which comes with the prompt."""
    timing = output.timing
    assert timing.first_token is not None
    assert timing.finished is not None
    return (len(output.token_ids) - 1) / max(timing.finished - timing.first_token, 1e-9)


def _dtype(llm: LLM) -> str:
    return str(llm.models.target.dtype).removeprefix("torch.")
