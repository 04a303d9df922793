"""A model larger than its memory, whose layers are streamed: gains of drafts, and other engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks.machines.memory_group import NoGroupError
from benchmarks.offload.cells import Job
from benchmarks.paper.lab import Lab
from benchmarks.paper.plots import INK, bars
from benchmarks.paper.question import Cells, Figure, Figures, NotHereError, Outcome, Verdict
from benchmarks.peers.engines import WeightsError
from benchmarks.peers.process import WorkerError
from benchmarks.study import shown, span, table

ASKS: Final = "How fast is a model larger than its memory?"
_PLAIN: Final = "incremental"
_DRAFTS: Final = ("self", "small")
_OTHERS: Final = "others"
_PAPER: Final = (2.6, 3.5)  # over FlexGen's incremental decoding
_ALL: Final = (_PLAIN, *_DRAFTS, "auto")
_PEERS: Final = ("llama.cpp", "llama.cpp + small", "accelerate", "accelerate + small")
_ROWS: Final[Mapping[str, Sequence[str]]] = {  # of a key's last word
    **{"58": _ALL, "87": _ALL, _OTHERS: (_PLAIN, *_DRAFTS, *_PEERS)},
    "31": (_PLAIN, "auto"),  # less than `self` needs
    "135": (_PLAIN, "self"),  # the buffers of a small model are as large as its layers
}


def keys(lab: Lab) -> list[str]:
    """A key is DATASET,TEMPERATURE,PERCENT of the model's bytes in memory, and perhaps `others`."""
    full = [f"{name},{law},58" for law in ("0", "0.8") for name in ("Alpaca", "humaneval")]
    full += ["Alpaca,0,87", "humaneval,0,87", "Alpaca,0,31", f"Alpaca,0,58,{_OTHERS}"]
    return lab.pick(full=full, quick=["Alpaca,0,135"], toy=["Alpaca,0,135"])


def measure(lab: Lab, key: str) -> Figures:
    name, law, percent, *_ = key.split(",")
    model = lab.pick(full=lab.target, quick=lab.small, toy=lab.target)
    count, tokens, rounds = lab.pick(full=(4, 64, 2), quick=(2, 32, 1), toy=(1, 8, 1))
    toy = lab.size == "toy"
    job = Job(
        model=model,
        draft=lab.draft,
        questions=lab.questions(name, count),
        temperature=float(law),
        max_tokens=tokens,
        rounds=rounds,
        share=int(percent) / 100,
        spare=256 << 20 if toy else 0,  # more than a plan keeps free beside a tiny model
        limited=not toy,
    )
    lab.elsewhere(model, *([lab.draft] if lab.size == "full" else []))
    try:
        return job.answered(_ROWS[key.rpartition(",")[2]])
    except (NoGroupError, WeightsError, WorkerError) as error:
        raise NotHereError(str(error)) from error


def page(cells: Cells) -> list[str]:
    rows: list[Sequence[object]] = []
    for key, cell in cells.items():
        name, law, percent, *_ = key.split(",")
        for engine, one in cell.items():
            figures = *shown([one["tokens_per_s"], one["gain"]]), *shown([one["tokens_per_pass"]], 1)
            texts = f"{one['same']} of {one['texts']}" if one["texts"] else ""
            read = *shown([one["mb_per_pass"] or None], 0), texts
            rows.append((name, law, f"{percent}%", engine, *figures, *read))
    found = [item for cell in cells.values() for item in cell.items()]
    same = [one["same"] == one["texts"] for name, one in found if name in _ALL]
    best = _best(cells)
    return [
        "The weights are in bfloat16, of a 4-bit file, each moved at random within half a step. A memory "
        "cgroup gives the process the named share of their bytes beyond what Python takes, pages of files "
        "included; the layers that do not fit are read from the disk in every pass. Drafts are the model "
        "itself in int4 (`self`) and a small model in int4. `auto` chooses, and looks guesses up in the "
        "text. llama.cpp maps its file, accelerate keeps layers on the disk. Both have a separate run with "
        "one prompt and 8 tokens, which says little of a long answer. "
        "Gains are over incremental decoding in the same run, batch 1.",
        *table(
            "prompts | T | memory | guesses, or engine | tokens/s | over incremental | tokens a pass | "
            "MB a pass | texts as in memory",
            rows,
        ),
        f"The better draft of a cell has {span(best, 1) if best else 'no figure'} times the speed without "
        f"guesses, where the paper has {span(_PAPER, 1)} times FlexGen's. In {sum(same)} of our {len(same)} "
        "rows all texts are those of the model in memory.",
    ]


def plot(cells: Cells, figure: Figure) -> None:
    axes = figure.subplots()
    found = {key: cell for key, cell in cells.items() if not key.endswith(_OTHERS)}
    names = (*_DRAFTS, "auto")
    gains = {name: [cell.get(name, {"gain": 0})["gain"] for cell in found.values()] for name in names}
    axes.axhspan(*_PAPER, alpha=0.2, color=INK, label="the paper, over FlexGen")
    bars(axes, ["{}\nT = {}\n{}%".format(*key.split(",")) for key in found], gains)
    axes.set(ylabel="speed over incremental decoding")


def verdict(cells: Cells) -> Verdict:
    best = _best(cells)
    alone = [cell["auto"]["gain"] for cell in cells.values() if "auto" in cell and not {*_DRAFTS} & {*cell}]
    ours = [f"{span(best, 1)} over our own, with a draft"] if best else []
    ours += [f"{span(alone, 1)} with lookups alone"] if alone else []
    least = min(best, default=0.0)
    outcome: Outcome = "surpassed" if least > _PAPER[1] else "reproduced"
    against = "" if least >= _PAPER[0] else f"a draft gains {least:.1f} in its worst cell"
    return Verdict(", ".join(ours), f"{span(_PAPER, 1)} over FlexGen", outcome, against)


def _best(cells: Cells) -> list[float]:
    """Return the gain of the better draft of each cell that has one."""
    each = [[cell[name]["gain"] for name in _DRAFTS if name in cell] for cell in cells.values()]
    return [max(gains) for gains in each if gains]
