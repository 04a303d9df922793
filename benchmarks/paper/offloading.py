"""A model larger than its memory, whose layers are streamed: gains of drafts, and other engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from benchmarks.machines.memory_group import NoGroupError
from benchmarks.offload.cells import Job
from benchmarks.paper.lab import Lab
from benchmarks.paper.question import Cells, Figures, NotHereError, Question, Verdict
from benchmarks.peers.engines import WeightsError
from benchmarks.peers.process import WorkerError
from benchmarks.study import row, span

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PLAIN: Final = "incremental"
_DRAFTS: Final = ("self", "small")
_OTHERS: Final = "others"
_PAPER: Final = (2.6, 3.5)  # over FlexGen's incremental decoding
_ROWS: Final[Mapping[str, Sequence[str]]] = {  # of a key's last word
    "58": (_PLAIN, *_DRAFTS, "auto"),
    "87": (_PLAIN, *_DRAFTS, "auto"),
    "31": (_PLAIN, "auto"),  # less than `self` needs
    "135": (_PLAIN, "self"),  # the buffers of a small model are as large as its layers
    _OTHERS: (
        *(_PLAIN, *_DRAFTS),
        *("llama.cpp", "llama.cpp + small", "accelerate", "accelerate + small"),
    ),
}


def keys(lab: Lab) -> list[str]:
    """A key is DATASET,TEMPERATURE,PERCENT of the model's bytes in memory, and perhaps `others`."""
    full = [f"{name},{law},58" for law in ("0", "0.8") for name in ("Alpaca", "humaneval")]
    full += ["Alpaca,0,87", "humaneval,0,87", "Alpaca,0,31", f"Alpaca,0,58,{_OTHERS}"]
    return lab.pick(full=full, quick=["Alpaca,0,135"], toy=["Alpaca,0,135"])


def measure(lab: Lab, key: str) -> Figures:
    name, law, percent, *_ = key.split(",")
    model = lab.pick(full=lab.target, quick=lab.small, toy=lab.target)
    job = Job(
        model=model,
        draft=lab.draft,
        questions=lab.questions(name, lab.pick(full=4, quick=2, toy=1)),
        temperature=float(law),
        max_tokens=lab.pick(full=64, quick=32, toy=8),
        rounds=lab.pick(full=2, quick=1, toy=1),
        share=int(percent) / 100,
        spare=lab.pick(full=0, quick=0, toy=256 << 20),  # more than a plan keeps free beside a tiny model
        limited=lab.size != "toy",
    )
    lab.elsewhere(model, *([lab.draft] if lab.size == "full" else []))
    try:
        return job.answered(_ROWS[key.rpartition(",")[2]])
    except (NoGroupError, WeightsError, WorkerError) as error:
        raise NotHereError(str(error)) from error


def page(cells: Cells) -> list[str]:
    header = (
        *("prompts", "T", "memory", "guesses, or engine", "tokens/s", "over incremental"),
        *("tokens a pass", "MB a pass", "texts as in memory"),
    )
    lines = [
        "The weights are in bfloat16, of a 4-bit file, each moved at random within half a step. A memory "
        "cgroup gives the process the named share of their bytes beyond what Python takes, pages of files "
        "included; the layers that do not fit are read from the disk in every pass. Drafts are the model "
        "itself in int4 (`self`) and a small model in int4. `auto` chooses, and looks guesses up in the "
        "text. llama.cpp maps its file, accelerate keeps layers on the disk; they have a separate run. "
        "Gains are over incremental decoding in the same run, batch 1.",
        "",
        row(*header),
        row(*["---"] * len(header)),
    ]
    for key, cell in cells.items():
        name, law, percent, *_ = key.split(",")
        for engine, figures in cell.items():
            lines.append(
                row(
                    *(name, law, f"{percent}%", engine, f"{figures['tokens_per_s']:.2f}"),
                    *(f"{figures['gain']:.2f}", f"{figures['tokens_per_pass']:.1f}"),
                    f"{figures['mb_per_pass']:.0f}" if figures["mb_per_pass"] else "",
                    f"{figures['same']} of {figures['texts']}" if figures["texts"] else "",
                )
            )
    ours = [
        one for cell in cells.values() for name, one in cell.items() if name in (_PLAIN, *_DRAFTS, "auto")
    ]
    same = sum(one["same"] == one["texts"] for one in ours)
    best = _best(cells)
    return [
        *lines,
        "",
        f"The better draft of a cell has {span(best, 1) if best else 'no figure'} times the speed without "
        f"guesses, where the paper has {span(_PAPER, 1)} times FlexGen's. In {same} of our {len(ours)} rows "
        "all texts are those of the model in memory.",
    ]


def plot(cells: Cells, figure: Figure) -> None:
    axes = figure.subplots()
    shown = {key: cell for key, cell in cells.items() if not key.endswith(_OTHERS)}
    for number, name in enumerate((*_DRAFTS, "auto")):
        bars = [
            (at + 0.27 * number, one[name]["gain"]) for at, one in enumerate(shown.values()) if name in one
        ]
        if bars:
            axes.bar(*zip(*bars, strict=True), width=0.27, label=name)
    axes.axhspan(*_PAPER, alpha=0.2, color="#7f7f7f", label="the paper, over FlexGen")
    names = ["{}\nT = {}\n{}%".format(*key.split(",")) for key in shown]
    axes.set_xticks([at + 0.27 for at in range(len(shown))], names, fontsize=8)
    axes.set(ylabel="speed over incremental decoding")
    axes.legend(fontsize=8, ncols=2)


def verdict(cells: Cells) -> Verdict:
    best = _best(cells)
    alone = [cell["auto"]["gain"] for cell in cells.values() if "auto" in cell and not {*_DRAFTS} & {*cell}]
    ours = [f"{span(best, 1)} over our own, with a draft"] if best else []
    ours += [f"{span(alone, 1)} with lookups alone"] if alone else []
    least = min(best, default=0.0)
    return Verdict(
        paper=f"{span(_PAPER, 1)} over FlexGen",
        ours=", ".join(ours),
        outcome="surpassed" if least > _PAPER[1] else "reproduced" if least >= _PAPER[0] else "did not hold",
        why="" if least >= _PAPER[0] else f"a draft gains {least:.1f} in its worst cell",
    )


def _best(cells: Cells) -> list[float]:
    """Return the gain of the better draft of each cell that has one."""
    each = [[cell[name]["gain"] for name in _DRAFTS if name in cell] for cell in cells.values()]
    return [max(gains) for gains in each if gains]


QUESTION: Final = Question(
    name="offloading",
    asks="How fast is a model larger than its memory?",
    keys=keys,
    measure=measure,
    page=page,
    plot=plot,
    verdict=verdict,
)
