"""`specinfer demo`: a real model answers through token trees; then what that gained, honestly."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from specinfer.cli.options import DEFAULT_MODEL

if TYPE_CHECKING:
    from specinfer.llm import LLM
    from specinfer.request import RequestOutput
    from specinfer.sampling_params import SamplingParams

# Rewriting repeats most of the prompt: the kind of request where looking guesses up in the text pays. A
# story would gain next to nothing, and the demo says so.
PROMPT = """Fix the spelling mistakes in this text and write the whole text again:

The quick brown fox jumps over the lazy dog. The dog was asleap in the garden, and the fox was on its way
to the river. When the dog woke up, the fox was gone, and the garden was quiet agian. The river was cold,
but the fox did not mind the cold water."""
ROUNDS = 3


@click.command()
def demo() -> None:
    """Answer a built-in prompt with SmolLM2-135M through token trees, then compare with no speculation."""
    from specinfer.config import NO_SPECULATION
    from specinfer.llm import LLM
    from specinfer.progress import ProgressBar
    from specinfer.sampling_params import SamplingParams

    speculative = LLM(DEFAULT_MODEL, progress=ProgressBar(), ngram=True, max_context=2048)
    plain = speculative.variant(replace(speculative.config, speculation=NO_SPECULATION))
    params = SamplingParams(temperature=0, max_tokens=160)
    click.echo(f"{DEFAULT_MODEL} on {speculative.models.target.device}, {_dtype(speculative)}\n")
    click.echo("\n".join(f"> {line}" for line in PROMPT.splitlines()) + "\n")
    _answer(speculative, params, echo=True)
    click.echo("\n")
    # The answer above warmed everything up; now both take turns, so that a slow moment hits both.
    runs = [(_answer(plain, params), _answer(speculative, params)) for _ in range(ROUNDS)]
    _table([a for a, _ in runs], [b for _, b in runs])


def _answer(llm: LLM, params: SamplingParams, *, echo: bool = False) -> RequestOutput:
    last = None
    for last in llm.stream_chat([{"role": "user", "content": PROMPT}], params):
        if echo:
            click.echo(last.new_text, nl=False)
            sys.stdout.flush()
    assert last is not None, "an answer has at least one step"
    return last


def _table(plain: list[RequestOutput], speculative: list[RequestOutput]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "tokens/s", "tokens per step", "steps", box=None, pad_edge=False)
    rates = []
    for name, outputs in (("without speculation", plain), ("with token trees", speculative)):
        rates.append(sorted(_rate(output) for output in outputs)[len(outputs) // 2])
        figures = outputs[0].figures
        table.add_row(name, f"{rates[-1]:.1f}", f"{figures.tokens_per_step:.2f}", str(figures.steps))
    Console(highlight=False).print(table)
    identical = all(a.token_ids == b.token_ids for a, b in zip(plain, speculative, strict=True))
    click.echo(f"\nspeedup: {rates[1] / rates[0]:.2f}x (medians of {ROUNDS} rounds, after the prompt)")
    click.echo(f"identical texts: {'yes' if identical else 'NO'}")
    click.echo("The guesses are looked up in the text itself, so answers that repeat it gain, others little.")
    click.echo("""See the trees: specinfer generate --show-trees 'Write the word "river" ten times.'""")


def _rate(output: RequestOutput) -> float:
    """Tokens per second after the first token, which comes with the prompt."""
    timing = output.timing
    assert timing.first_token is not None
    assert timing.finished is not None
    return (len(output.token_ids) - 1) / max(timing.finished - timing.first_token, 1e-9)


def _dtype(llm: LLM) -> str:
    return str(llm.models.target.dtype).removeprefix("torch.")
