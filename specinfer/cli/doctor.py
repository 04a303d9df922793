"""`specinfer doctor` and `--version`: facts about this machine for bug reports and slow runs."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specinfer.cli.options import FILE, Command, complete_model
from specinfer.errors import ConfigError
from specinfer.kernels.build import packaged_library
from specinfer.kernels.machine import architecture, levels_here
from specinfer.version import VERSION

if TYPE_CHECKING:
    from specinfer.check.doctor import DiskFacts, MachineFacts, PassCost


@click.command(cls=Command)
@click.option(
    "--model",
    "-m",
    "models",
    multiple=True,
    metavar="NAME",
    shell_complete=complete_model,
    help="Time a pass of this model; repeatable.",
)
@click.option(
    "--quantization",
    "quantizations",
    multiple=True,
    help="Quantization: auto (the default), none, int8, int4 or gguf; repeatable.",
)
@click.option(
    "--offload-folder",
    type=FILE,
    metavar="FOLDER",
    help="Time the disk of this folder instead of the cache's.",
)
@click.option("--json", "json_output", is_flag=True, help="Print one JSON object instead of the text.")
def doctor(
    models: tuple[str, ...],
    quantizations: tuple[str, ...],
    offload_folder: Path | None,
    json_output: bool,
) -> None:
    """Print versions, CPU, kernels, threads and speeds, for a bug report.

    The speeds are those of the memory and of the disk from which layers would stream. If that disk has no
    model, a file of 256 MB is written and removed. With --model: the time of a pass on the CPU, compared with
    reading its bytes, the time to the first token, and the memory, by default of the quantization that other
    commands choose. Kernels that are not compiled yet are compiled first, and their results are compared with
    PyTorch's.
    """
    if quantizations and not models:
        raise ConfigError("--quantization is for models, and none is named; add --model NAME")
    from specinfer.config import EngineConfig

    configs = [
        EngineConfig.from_options(model, {"device": "cpu", "quantization": quantization})
        for model in models
        for quantization in quantizations or ("auto",)
    ]
    from specinfer.hub import resolve
    from specinfer.progress import ProgressBar

    progress = ProgressBar()
    for model in models:  # a wrong name fails before anything is compiled or measured
        resolve(model, progress=progress)
    from specinfer.check.doctor import disk_facts, find_kernels, machine_facts, pass_cost
    from specinfer.files import cache_dir
    from specinfer.kernels.disk import Bandwidth
    from specinfer.report.provenance import commit

    found = find_kernels(progress)
    bandwidth = None if found.library is None else Bandwidth(found.library)
    facts, sha = machine_facts(found, bandwidth), commit()
    disk = disk_facts((offload_folder or cache_dir() / "prepared").expanduser().absolute())
    if not json_output:
        click.echo("\n".join([*_machine_lines(facts, disk, sha), *_level_lines(facts)]))
    passes: list[dict[str, Any]] = []
    for number, config in enumerate(configs):
        cost = pass_cost(config, bandwidth, progress)
        passes.append(asdict(cost))
        if not json_output:
            click.echo(("" if number else "\n") + _pass_line(cost))
    if json_output:
        others = {"disk": asdict(disk), "passes": passes}
        click.echo(json.dumps({"commit": sha, **asdict(facts), **others}))


def _machine_lines(facts: MachineFacts, disk: DiskFacts, commit: str | None) -> list[str]:
    versions = [f"{name} {version}" for name, version in facts.versions.items()]
    versions[0] += f" (commit {commit})" if commit else ""
    quota = "no cgroup quota" if facts.cgroup_cpus is None else f"a cgroup quota of {facts.cgroup_cpus:g}"
    rows = [
        ("versions", ", ".join(versions)),
        ("system", facts.system),
        ("CPU", f"{facts.cpu} ({facts.architecture})"),
        ("kernels", _kernels(facts)),
        (
            "variables",
            ", ".join(f"{k}={v}" for k, v in facts.variables.items()) or "none set",
        ),
        (
            "threads",
            f"{facts.threads}; usable cores: {facts.usable_cores}, of {facts.physical_cores or 'unknown'} "
            f"physical ones, {facts.allowed_cpus} logical CPUs allowed, {quota}",
        ),
        (
            "memory",
            "not measured, as there are no native kernels"
            if facts.memory_bytes_per_second is None
            else f"streams at {facts.memory_bytes_per_second / 1e9:.1f} GB/s",
        ),
        ("disk", _disk(disk)),
    ]
    return _aligned(rows)


def _kernels(facts: MachineFacts) -> str:
    if facts.kernels == "nothing":
        return f"none: {facts.kernels_fault}"
    if facts.kernels == "torch":
        return f"PyTorch's, which are slow: {facts.kernels_fault}"
    used = next(level for level in facts.levels if level.standing == "used")
    where = "from the wheel" if facts.library_from == "wheel" else "compiled into the cache"
    results = "with PyTorch's results"
    if facts.wrong_result is not None:
        results = f"WITH WRONG RESULTS ({facts.wrong_result}): report this, and use --kernels torch"
    return f"native, {used.words}, {where}, {results}: {_short(facts.library or '')}"


def _disk(disk: DiskFacts) -> str:
    if disk.rate is None:
        return f"not measured in {_short(disk.folder)}: {disk.fault}"
    file = "a file made for it" if disk.file is None else disk.file
    return f"streams {_short(disk.folder)} at {disk.rate} ({file})"


def _level_lines(facts: MachineFacts) -> list[str]:
    if not facts.levels:
        return ["", f"no native kernels exist for {facts.architecture}"]
    rows = [
        (level.name, level.words, level.standing + (f": {level.reason}" if level.reason else ""))
        for level in facts.levels
    ]
    return ["", f"native kernels for {facts.architecture}:", *_aligned(rows)]


def _pass_line(cost: PassCost) -> str:
    weights = cost.dtype if cost.quantization == "none" else f"{cost.quantization}, {cost.dtype}"
    floor = "" if cost.times_floor is None else f", {cost.times_floor:.2f} times the floor of its bytes"
    experts = "" if cost.experts is None else ", of {} experts of {} a layer".format(*cost.experts)
    attention = "" if cost.attention == "native" else ", with PyTorch's attention"
    pays = " and ".join(cost.int8_cache_pays)
    return (
        f"{Path(cost.model).name} ({weights}): {cost.milliseconds:.2f} ms a pass after {cost.text} tokens "
        f"({cost.bytes / 1e6:.1f} MB{experts}{floor}), first token in {cost.prompt_milliseconds:.0f} ms, "
        f"{cost.memory / 1e6:.0f} MB of memory{attention}"
        + (f"; --kv-cache-dtype int8 would pay {pays}" if pays else "")
    )


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as aligned columns; the last cell may have several lines and is not wrapped."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    margin = sum(widths) + 2 * len(widths)
    lines = []
    for *first, last in rows:
        cells = [cell.ljust(width) for cell, width in zip(first, widths, strict=True)]
        lines.append("  ".join([*cells, last.replace("\n", "\n" + " " * margin)]))
    return lines


def _short(path: str) -> str:
    """The path with ~ for the home folder, which has the user's name in it."""
    home = str(Path.home())
    return "~" + path.removeprefix(home) if path.startswith(home + "/") else path


def version_text() -> str:
    """The version, and what it runs on: Python, torch and the level of the CPU kernels.

    Nothing is compiled or tried, and torch is not imported. `specinfer doctor` tries the kernels.
    """
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    return f"specinfer {VERSION} (Python {platform.python_version()}, torch {torch}, CPU kernels: {_best()})"


def _best() -> str:
    """The best level that is prebuilt, else the one that is compiled on first use."""
    try:
        levels = levels_here()
    except ConfigError as error:  # SPECINFER_CPU names a level that this CPU lacks
        return str(error)
    if not levels:
        return f"none for this {architecture()} CPU, PyTorch computes"
    best = levels[0]
    if packaged_library(best).is_file():
        return f"{best.words}, prebuilt"
    return f"{best.words}, compiled on first use"
