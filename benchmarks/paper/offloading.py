"""A model larger than its memory, whose layers are streamed: gains of drafts, and other engines."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.machines.dithered import dithered
from benchmarks.machines.memory_group import memory_group
from benchmarks.paper.lab import Lab
from benchmarks.paper.plots import INK, bars
from benchmarks.paper.question import Cells, Figure, Figures, Outcome, Verdict
from benchmarks.peers.engines import OURS, Home
from benchmarks.study import prompt_ids, shown, span, table
from specinfer.hub import resolve
from specinfer.models.open_model import open_model

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
_GUESSES: Final = 16  # length of a peer's chain; a pass takes seconds, so it may be long
_ASSISTANCE: Final = {
    "num_assistant_tokens": _GUESSES,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.0,
}
_INT4: Final = {"draft_quantization": "int4", "lookup": False}
# The engine of each row, the form of its small model (Home.weights) and its options. Incremental has one-node
# trees: no draft, no `offload="auto"` copy of the target, no lookups.
_ENGINES: Final[Mapping[str, tuple[str, str | None, Mapping[str, Any]]]] = {
    _PLAIN: (OURS, None, {"lookup": False, "max_nodes": 1}),
    "self": (OURS, None, {"drafts": ["self"], **_INT4}),
    "small": (OURS, "file", _INT4),
    "auto": (OURS, None, {}),
    "llama.cpp": ("llama_cpp", None, {}),
    "llama.cpp + small": ("llama_cpp", "file", {"draft_tokens": _GUESSES}),
    "accelerate": ("transformers", None, {}),
    "accelerate + small": ("transformers", "safetensors", {"assistance": _ASSISTANCE}),
}
_BYTES: Final = 2  # of a weight in bfloat16
_PEER_TOKENS: Final = 24  # of a peer's answer
_TREE_ROOM: Final = 64  # KV slots beyond prompt and answer, for rejected nodes


def keys(lab: Lab) -> list[str]:
    """A key is DATASET,TEMPERATURE,PERCENT of the model's bytes in memory, and perhaps `others`."""
    full = [f"{name},{law},58" for law in ("0", "0.8") for name in ("Alpaca", "humaneval")]
    full += ["Alpaca,0,87", "humaneval,0,87", "Alpaca,0,31", f"Alpaca,0,58,{_OTHERS}"]
    return lab.pick(full=full, quick=["Alpaca,0,135"], toy=["Alpaca,0,135"])


def measure(lab: Lab, key: str) -> Figures:
    """Return the figures by row; only the first run, whose texts are the reference, has unlimited memory."""
    name, law, percent, *_ = key.split(",")
    model = Path(lab.pick(full=lab.target, quick=lab.small, toy=lab.target))
    count, tokens, rounds = lab.pick(full=(4, 64, 2), quick=(2, 32, 1), toy=(1, 8, 1))
    lab.elsewhere(str(model), *([lab.draft] if lab.size == "full" else []))
    model = dithered(model) if model.suffix == ".gguf" else model
    files = resolve(str(model))
    prompts = prompt_ids(files, lab.questions(name, count))
    task = _Task(model, resolve(lab.draft).path, prompts, float(law), tokens, lab.size != "toy")
    weights = sum(shape[0] * shape[1] for shape in open_model(files).shapes.values() if len(shape) == 2)
    with Home().start(OURS, 1, 120) as worker:
        limit = worker.ask({"model": None})["own"] + int(int(percent) / 100 * _BYTES * weights)
    limit += 0 if task.limited else 256 << 20  # more than a plan keeps free beside a tiny model
    known = task.answers(_PLAIN, range(len(prompts)), None)["texts"]
    rows = _ROWS[key.rpartition(",")[2]]
    found: dict[str, list[dict[str, Any]]] = {row: [] for row in rows}
    for number in range(rounds):
        dealt = range(number, len(prompts), rounds)
        for row in rows if number % 2 == 0 else reversed(rows):
            one = task.answers(row, dealt, limit)
            texts = zip(one.pop("texts"), dealt, strict=False)  # a peer answers one of them
            same = [text == known[at][: len(text)] for text, at in texts]
            found[row].append({**one, "same": sum(same), "texts": len(same)})
    plain = [one["tokens_per_s"] for one in found[_PLAIN]]
    return {row: _medians(each, plain) for row, each in found.items()}


@dataclass(frozen=True, slots=True)
class _Task:
    """The prompts of all rows, and the models."""

    model: Path
    draft: Path
    prompts: Sequence[list[int]]
    temperature: float
    max_tokens: int
    limited: bool  # False: no cgroup enforces the limit

    def answers(self, row: str, dealt: Sequence[int], limit: int | None) -> dict[str, Any]:
        """Return the texts and figures of a row's answers in a child; without a limit it is resident.

        Before it runs, the pages of its files are dropped from the cache, so that its reads count for its
        limit. Raises UserError if the engine cannot run, or if there is no memory group.
        """
        script, form, options = _ENGINES[row]
        model = Home().weights(self.model, "safetensors" if script == "transformers" else "file")
        draft = None if form is None else Home().weights(self.draft, form)
        context = max(map(len, self.prompts)) + self.max_tokens + _TREE_ROOM
        tokens, threads = self.max_tokens, len(os.sched_getaffinity(0))
        if script == OURS:
            options = {**options, "quantization": "none", "dtype": "bfloat16", "max_batch_size": 1}
            options |= {"max_context": context, "prefix_reuse": False, "temperature": self.temperature}
            options |= {} if draft is None else {"drafts": [str(draft)]}
            options |= {} if limit is None else {"offload": "auto", "memory": limit}
        else:
            dealt, tokens = dealt[:1], min(tokens, _PEER_TOKENS)
            options = {**options, "memory": limit} if script == "transformers" else options
        setup = {"model": str(model), "draft": draft and str(draft), "threads": threads, "context": context}
        with ExitStack() as stack:
            group = stack.enter_context(memory_group(limit)) if limit and self.limited else None
            for path in (model,) if draft is None else (model, draft):
                for file in path.glob("*.safetensors") if path.is_dir() else [path]:
                    _forget(file)
            inside = list if group is None else group.inside
            worker = stack.enter_context(Home().start(script, threads, 1800, inside))
            worker.ask({**setup, "options": options})
            worker.ask({"prompt": self.prompts[dealt[0]], "max_tokens": 2})  # everything is warm
            replies = [worker.ask({"prompt": self.prompts[at], "max_tokens": tokens}) for at in dealt]
        later = [reply["arrivals"] for reply in replies]
        made = sum(count for arrivals in later for _, count in arrivals[1:])
        passes, streamed = (sum(one.get(of, 0) for one in replies) for of in ("steps", "streamed_bytes"))
        return {
            "texts": [reply["tokens"] for reply in replies],
            "tokens_per_s": made / sum(arrivals[-1][0] - arrivals[0][0] for arrivals in later),
            "tokens_per_pass": made / sum(len(arrivals) - 1 for arrivals in later),
            "mb_per_pass": streamed / max(1, passes) / 1e6,
        }


def _medians(rounds: Sequence[Mapping[str, Any]], plain: Sequence[float]) -> dict[str, Any]:
    """Return medians over rounds, with the gain over incremental decoding in the same round."""
    of = ("tokens_per_s", "tokens_per_pass", "mb_per_pass")
    gain = median(one["tokens_per_s"] / speed for one, speed in zip(rounds, plain, strict=True))
    texts = {name: sum(one[name] for one in rounds) for name in ("same", "texts")}
    return {**{name: median(one[name] for one in rounds) for name in of}, "gain": gain, **texts}


def _forget(file: Path) -> None:
    """Drop a file's pages from the cache."""
    number = os.open(file, os.O_RDONLY)
    os.fdatasync(number)
    os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(number)


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
