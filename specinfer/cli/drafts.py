"""`specinfer drafts`: lists the known drafts for a model, and measures those on this machine."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from specinfer.cli.options import FILE, Command, build_llm, model_options
from specinfer.engine.automatic_draft import FAULTS
from specinfer.errors import ConfigError
from specinfer.hub.known_drafts import LocalDraft, drafts_for, local_drafts
from specinfer.progress import ProgressBar, format_bytes
from specinfer.speculation_config import NO_SPECULATION, OWN_HEAD

if TYPE_CHECKING:
    from specinfer.bench.run import Comparison
    from specinfer.engine.drafts import FoundModel
    from specinfer.llm import LLM
    from specinfer.report.dataset import Dataset

_MAX_TOKENS: Final = 128  # of an answer
_OWN: Final = "its own MTP head"


@click.command(cls=Command)
@click.option("--try", "trying", is_flag=True, help="Measure each draft that is on this machine.")
@click.option("--prompts", type=FILE, metavar="FILE.jsonl", help='Rows with "prompt" or "turns", for --try.')
@click.option("--seconds", type=click.FloatRange(1), default=60.0, help="Time for each draft, for --try.")
@model_options
def drafts(*, trying: bool, prompts: Path | None, seconds: float, **options: Any) -> None:
    """List the known drafts for a model.

    With --try, answers are timed without speculation and, in turns, with each draft and with lookups alone.
    """
    if prompts is not None and not trying:
        raise ConfigError("--prompts is for --try, which measures; add it, or leave --prompts out")
    from specinfer.engine.drafts import find

    how = {name: options[name] for name in ("max_context", "trust_remote_code") if options[name]}
    target = find(options["model"], ProgressBar(), options["model_impl"] or "auto", **how)
    here = local_drafts(target.files)
    if trying:
        from specinfer.report.dataset import built_in, read_dataset

        data = built_in() if prompts is None else read_dataset(prompts)
        if prompts is None:  # ordered by kind: every fourth prompt has all kinds within a minute
            spread = [one for start in range(4) for one in data.conversations[start::4]]
            data = replace(data, conversations=tuple(spread))
        own = {OWN_HEAD: _OWN} if target.has_own_head else {}
        _print(*_tried({**own, **{str(one.path): one.name for one in here}}, data, seconds, options))
    else:
        _list(target, here)


def _list(target: FoundModel, here: list[LocalDraft]) -> None:
    rows = drafts_for(target.files)
    if not rows and not target.has_own_head:
        click.echo(f"no draft is known for {target.files.name}; lookups need none")
        return
    known = {one.row.draft: one for one in reversed(here)}  # the first of several
    shown = [("draft", "kind", "size", "", "measured")]
    if target.has_own_head:
        shown.append((_OWN, "MTP", "-", f"--draft {OWN_HEAD}", "not measured"))
    for row in rows:
        local = known.get(row.draft)
        size = row.size if local is None else format_bytes(local.bytes)
        place = f"specinfer pull {row.name_for(target.files)}" if local is None else f"--draft {local.path}"
        shown.append((row.draft, row.form, size, place, row.measured or "not measured"))
    _print(*shown)


def _tried(
    names: dict[str, str], prompts: Dataset, seconds: float, options: dict[str, Any]
) -> list[tuple[str, ...]]:
    """Measure lookups alone and each draft of `names`, by its option; the fastest is first, behind the heads.

    A line says why a draft cannot be used.
    """
    from specinfer.bench.report import BUSY

    found: list[tuple[Comparison, str]] = []
    with _with_all(tuple(names), options) as whole:
        for path, name in {"": "lookups", **names}.items():
            drafts = (path,) if path else ()
            try:
                with _built(drafts, options) if whole is None else whole.variant(drafts=drafts) as llm:
                    found.append((_compared(llm, name, prompts, seconds), path))
            except FAULTS as error:
                if not path:
                    raise
                click.echo(f"{name} is left out: {error}", err=True)
    rows = [
        (
            names.get(path, "lookups alone"),
            f"{result.baseline.output_throughput:.1f}",
            f"{result.speculative.output_throughput:.1f}",
            f"{result.speedup:.2f}",
            f"{result.speculative.figures.tokens_per_step:.2f}",
            f"{result.identical} of {len(result.pairs)}",
            f"--draft {path}" if path else "--no-draft",
        )
        for result, path in sorted(found, key=lambda pair: -pair[0].speedup)
    ]
    busy, cores = max(result.busy_elsewhere for result, _ in found), os.cpu_count() or 1
    if busy > BUSY * cores:
        click.echo(f"other programs used {busy:.1f} of {cores} cores: the speeds are unreliable", err=True)
    heads = ("draft", "tokens/s without", "with", "speedup", "tokens a step", "same texts", "options")
    return [heads, *rows]


def _with_all(drafts: tuple[str, ...], options: dict[str, Any]) -> AbstractContextManager[LLM | None]:
    """Load the target once, with all drafts; None if each draft needs its own target.

    Each does if one has a fault, if memory does not suffice for all, or if the target is divided or streamed.
    """
    streamed = options["offload"] not in (None, "never")
    if not streamed and not any(options[name] for name in ("tensor_parallel", "pipeline_parallel")):
        with suppress(*FAULTS):
            return _built(drafts, options)
    return nullcontext()


def _built(drafts: tuple[str, ...], options: dict[str, Any]) -> LLM:
    given = {"drafts": drafts} if drafts else {"no_draft": True}
    return build_llm({**options, **given}, max_batch_size=1)


def _compared(llm: LLM, name: str, prompts: Dataset, seconds: float) -> Comparison:
    """Measure the draft of an LLM, or its lookups alone; raises UserError."""
    from specinfer.bench.run import Load, compare
    from specinfer.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS, seed=0)
    load = Load(params=params, chat=llm.tokenizer.has_chat_template)
    with (
        llm.variant(replace(llm.config, speculation=NO_SPECULATION)) as plain,
        ProgressBar().showing(None, f"trying {name}", "requests"),
    ):
        return compare(plain, llm, prompts, load, seconds=seconds)


def _print(*rows: tuple[str, ...]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
