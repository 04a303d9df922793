"""`specinfer demo`: a real model answers through token trees; then what that gained, honestly."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

import click

from specinfer.cli.options import DEFAULT_MODEL

if TYPE_CHECKING:
    from specinfer.llm import LLM
    from specinfer.request import RequestOutput
    from specinfer.sampling_params import SamplingParams

HEAD = "smollm2-135m-head"  # a draft head that comes with the package, for DEFAULT_MODEL
# An ordinary question, and the kind of request that gains most: the answer repeats what was asked.
QUESTION = "Why is the sky blue, and why is it red in the evening? Explain it to a child."
REWRITE = """Fix the spelling mistakes in this text and write the whole text again:

The quick brown fox jumps over the lazy dog. The dog was asleap in the garden, and the fox was on its way
to the river. When the dog woke up, the fox was gone, and the garden was quiet agian. The river was cold,
but the fox did not mind the cold water."""
PROMPTS = {"a question": QUESTION, "a text to be written again": REWRITE}
ROUNDS = 3

Pairs = Sequence[tuple["RequestOutput", "RequestOutput"]]  # without speculation and with it


@click.command()
def demo() -> None:
    """Answer a question with SmolLM2-135M through token trees, then compare with no speculation.

    A small head that comes with specinfer guesses, and what stands in the text already is looked up.
    """
    from specinfer.config import NO_SPECULATION
    from specinfer.llm import LLM
    from specinfer.progress import ProgressBar
    from specinfer.sampling_params import SamplingParams

    with LLM(
        DEFAULT_MODEL,
        drafts=[HEAD],
        draft_quantization="int8",
        ngram=True,
        max_context=2048,
        progress=ProgressBar(),
    ) as speculative:
        plain = speculative.variant(replace(speculative.config, speculation=NO_SPECULATION))
        params = SamplingParams(temperature=0, max_tokens=160)
        click.echo(f"{DEFAULT_MODEL} on {speculative.models.target.device}, {_dtype(speculative)}\n")
        click.echo(f"> {QUESTION}\n")
        _answer(speculative, QUESTION, params, echo=True)
        click.echo("\n")
        # The answer above warmed everything up; now both take turns, so that a slow moment hits both.
        compared = {
            name: [
                (_answer(plain, prompt, params), _answer(speculative, prompt, params)) for _ in range(ROUNDS)
            ]
            for name, prompt in PROMPTS.items()
        }
    _show(compared)


def _answer(llm: LLM, prompt: str, params: SamplingParams, *, echo: bool = False) -> RequestOutput:
    last = None
    for last in llm.stream_chat([{"role": "user", "content": prompt}], params):
        if echo:
            click.echo(last.new_text, nl=False)
            sys.stdout.flush()
    assert last is not None, "an answer has at least one step"
    return last


def _show(compared: Mapping[str, Pairs]) -> None:
    """A row for each prompt, and whether texts are the same."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "tokens/s for", "without", "with token trees", "speedup", "tokens per step", box=None, pad_edge=False
    )
    for name, pairs in compared.items():
        without, trees = (median(map(_rate, outputs)) for outputs in zip(*pairs, strict=True))
        per_step = pairs[0][1].figures.tokens_per_step
        table.add_row(name, f"{without:.1f}", f"{trees:.1f}", f"{trees / without:.2f}x", f"{per_step:.2f}")
    Console(highlight=False).print(table)
    identical = all(a.token_ids == b.token_ids for pairs in compared.values() for a, b in pairs)
    click.echo(
        f"\nmedians of {ROUNDS} rounds, after the prompt; identical texts: {'yes' if identical else 'NO'}"
    )
    click.echo("Guesses come from a small draft head, and from the text itself where it says things again.")
    click.echo("""See the trees: specinfer generate --show-trees 'Write the word "river" ten times.'""")


def _rate(output: RequestOutput) -> float:
    """Tokens per second after the first token, which comes with the prompt."""
    timing = output.timing
    assert timing.first_token is not None
    assert timing.finished is not None
    return (len(output.token_ids) - 1) / max(timing.finished - timing.first_token, 1e-9)


def _dtype(llm: LLM) -> str:
    return str(llm.models.target.dtype).removeprefix("torch.")
