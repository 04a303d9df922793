"""Compares ranks and stages of one core each with one core: speed, prefill, speculation, memory, messages.

    python -m benchmarks.machines.ranks --model qwen2.5-coder-1.5b.gguf --draft qwen2.5-coder-0.5b.gguf \
        --dataset alpaca.jsonl

Every layout is a process on core 0, whose followers have cores 1, 2, ..., with one kernel thread each. It
answers the same prompts without speculation and with the draft, one request at a time and several, and
prefills prompts of 1,000 tokens. Texts are compared with those of one process. Layouts alternate; `--layouts
2x1@1000 1x2@1000` has two nodes connected by a network (two_nodes.py). A JSON file beside the page keeps
cells: an interrupted run continues.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.machines.two_nodes import MASTER, enter, follower, two_nodes
from benchmarks.study import REQUIRED, Study, digest, natural, parser, questions_of, row, run, settings_of
from specinfer import LLM, RequestOutput, SamplingParams
from specinfer.progress import NoProgress
from specinfer.runtime.sharded import MessageReader, Open
from specinfer.speculation_config import NO_SPECULATION
from specinfer.tokenizer import ChatEncoder

_LONG: Final = 1000  # tokens of the prompts without an answer
_FOLLOWER: Final = "specinfer.parallel.follower"
_EXCHANGE: Final = re.compile(r"([\d.]+) us for 16 rows")
_HOP: Final = re.compile(r"from stage to stage in ([\d.]+) us")


@dataclass(frozen=True, slots=True)
class Layout:
    """The number of ranks per layer, and the number of stages."""

    tensor: int
    stages: int
    mbit: int = 0  # network between two nodes with a rank each; 0: all on one node

    @classmethod
    def of(cls, text: str) -> Layout:
        """Parse `TPxPP` or `TPxPP@MBIT`."""
        sizes, _, mbit = text.partition("@")
        tensor, stages = map(int, sizes.split("x"))
        return cls(tensor, stages, int(mbit or 0))

    @property
    def size(self) -> int:
        return self.tensor * self.stages

    def __str__(self) -> str:
        if self.size == 1:
            return "one core"
        parts = [f"TP {self.tensor}"] if self.tensor > 1 else []
        layout = " x ".join([*parts, f"PP {self.stages}"] if self.stages > 1 else parts)
        return f"{layout} at {self.mbit} Mbit/s" if self.mbit else layout


ONE: Final = Layout(1, 1)


class Said(NoProgress):
    """Records the lines that a start reports."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        """Record a line."""
        self.lines.append(line)


def main() -> None:
    options = parser(
        __doc__,
        model=REQUIRED,
        draft=REQUIRED,
        dataset=REQUIRED,
        limit=8,
        max_tokens=64,
        batch_size=4,
        quantization="int8",
        rounds=3,
    )
    options.add_argument("--long", type=natural, default=3, help=f"prompts of {_LONG} tokens (default 3)")
    options.add_argument(
        "--layouts",
        nargs="+",
        default=["2x1", "1x2"],
        metavar="TPxPP[@MBIT]",
        help="with @MBIT on two nodes, which are network namespaces and need root (default 2x1 1x2)",
    )
    args = options.parse_args()
    study = Study("ranks", args.out, settings_of(args, without=("rounds", "layouts")))
    questions = questions_of(args.dataset, args.limit)
    layouts = [ONE, *map(Layout.of, args.layouts)]
    for number in range(args.rounds):
        for layout in layouts if number % 2 == 0 else reversed(layouts):
            name = f"{layout}|{number}"
            if name not in study.cells:
                study.keep(name, apart(args, layout, questions))
                print(name, {k: v for k, v in study.cells[name].items() if k != "texts"}, flush=True)
    picture = study.out.with_suffix(".png")
    shown = [f"![Speed over one core]({picture.name})", ""] if draw(study.cells, picture) else []
    print(study.write([*page(study.cells, study.settings), *shown], 1))


def apart(args: argparse.Namespace, layout: Layout, questions: Sequence[str]) -> dict[str, Any]:
    """Measure a layout in a separate process."""
    places, context = cores(), get_context("spawn")
    if not layout.mbit:
        with ProcessPoolExecutor(1, context, os.sched_setaffinity, (0, {places[0]})) as pool:
            return pool.submit(measure, args, layout, questions, places).result()
    with (
        two_nodes(layout.mbit) as nodes,
        follower(nodes, args.model, places[1]),
        ProcessPoolExecutor(1, context, on_node, (nodes.here, places[0])) as pool,
    ):
        return pool.submit(measure, args, layout, questions, places, nodes.key_file).result()


def on_node(node: str, core: int) -> None:
    """Move this process to that node and core."""
    enter(node)
    os.sched_setaffinity(0, {core})


def cores() -> list[int]:
    """Return the cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


@contextmanager
def pinned(places: Sequence[int]) -> Iterator[None]:
    """Give followers that start in the block the second of these cores, the third and so on."""
    done = threading.Event()

    def watch() -> None:
        known: list[int] = []
        while not done.wait(0.005):
            for child in psutil.Process().children():
                if child.pid not in known and follows(child):
                    known.append(child.pid)
                    child.cpu_affinity([places[len(known) % len(places)]])

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        done.set()
        watching.join()


def follows(process: psutil.Process) -> bool:
    try:
        return _FOLLOWER in process.cmdline()
    except psutil.Error:
        return False


def measure(
    args: argparse.Namespace,
    layout: Layout,
    questions: Sequence[str],
    places: Sequence[int],
    key_file: str | None = None,
) -> dict[str, Any]:
    """Return a layout's figures, from a process on the first of these cores; a key means another node."""
    if layout.size > len(places):
        raise ValueError(f"{layout} needs {layout.size} cores; there are {len(places)}")
    said, own = Said(), psutil.Process().memory_full_info().uss
    options: dict[str, Any] = {
        "quantization": args.quantization,
        "drafts": tuple(args.draft),
        "draft_quantization": "int4",
        "threads": 1,
        "prefix_reuse": False,
        "lookup": False,
        "max_batch_size": args.batch_size,
        "max_context": 2048,
    }
    if key_file is not None:
        options |= {"master": MASTER, "key_file": key_file}
    with pinned(places):
        llm = LLM(
            args.model,
            tensor_parallel=layout.tensor,
            pipeline_parallel=layout.stages,
            progress=said,
            **options,
        )
    with llm:
        plain = llm.variant(replace(llm.config, speculation=NO_SPECULATION))
        memory = [one.memory_full_info().uss for one in ranks_of()]
        chat = ChatEncoder(llm.tokenizer)
        prompts = [chat.token_ids([{"role": "user", "content": question}]) for question in questions]
        found: dict[str, Any] = {"memory": memory, "own": own, "texts": {}}
        for name, engine in (("plain", plain), ("draft", llm)):
            for batch in (1, args.batch_size):
                answered(engine, prompts[:batch], args.max_tokens, batch)  # everything is warm
                found[f"{name} {batch}"], texts = answered(engine, prompts, args.max_tokens, batch)
                found["texts"][f"{name} {batch}"] = digest(texts)
        found["prompt"] = reading(plain, prompts, args.long)
        found["control"] = control(plain, prompts[0])
    output = " ".join(said.lines)
    for name, words in (("exchange", _EXCHANGE), ("hop", _HOP)):
        match = words.search(output)
        found[name] = float(match[1]) if match else None
    return found


def ranks_of() -> list[psutil.Process]:
    """Return the processes of the ranks, this one first."""
    here = psutil.Process()
    return [here, *(child for child in here.children() if follows(child))]


class Arrivals:
    """The time of the first tokens of all texts of a batch, and their number."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lengths: dict[str, int] = {}
        self.begun: float | None = None

    def __call__(self, output: RequestOutput) -> None:
        """Record an output."""
        if self.begun is None and output.token_ids:
            self._lengths[output.request_id] = len(output.token_ids)
            if len(self._lengths) == self._count:
                self.begun = time.perf_counter()

    def behind(self, outputs: Sequence[RequestOutput]) -> tuple[int, float]:
        """Return the tokens after these first ones, and their seconds."""
        assert self.begun is not None, "every text has a token"
        tokens = sum(len(output.token_ids) for output in outputs) - sum(self._lengths.values())
        return tokens, time.perf_counter() - self.begun


def answered(
    llm: LLM, prompts: Sequence[Sequence[int]], tokens: int, batch: int
) -> tuple[float, list[list[int]]]:
    """Return tokens per second after the first ones of each batch, and the texts."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    total, seconds = 0, 0.0
    texts: list[list[int]] = []
    for first in range(0, len(prompts), batch):
        part = prompts[first : first + batch]
        arrivals = Arrivals(len(part))
        outputs = llm.generate(part, params, on_output=arrivals)
        count, spent = arrivals.behind(outputs)
        total, seconds = total + count, seconds + spent
        texts += [list(output.token_ids) for output in outputs]
    return total / seconds, texts


def reading(llm: LLM, prompts: Sequence[Sequence[int]], count: int) -> float:
    """Return the median seconds to the first token after a prompt of 1,000 tokens."""
    text = [token for prompt in prompts for token in prompt]
    text *= -(-(_LONG + count) // len(text))
    found: list[float] = []
    for number in range(count + 1):
        began = time.perf_counter()
        llm.generate([text[number : number + _LONG]], SamplingParams(temperature=0, max_tokens=1))
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def control(llm: LLM, prompt: Sequence[int]) -> float | None:
    """Return the median seconds to send and read a step's messages; None without followers."""
    target = llm.models.target
    if (group := target.group) is None:
        return None
    messages: list[tuple[float, bytes]] = []
    send = group.broadcast

    def timed(message: bytes, *how: Any) -> None:
        began = time.perf_counter()
        send(message, *how)
        messages.append((time.perf_counter() - began, message))

    group.broadcast = timed  # type: ignore[method-assign, assignment]
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    del group.broadcast
    reader = MessageReader([target.config], target.dtype)
    caches = {number: Open(number, 0, 1 << 16, 16) for number in range(64)}
    seconds: list[float] = []
    for sent, message in messages:
        began = time.perf_counter()
        reader.read(message, caches)
        seconds.append(sent + time.perf_counter() - began)
    return statistics.median(seconds)


def over_one(cells: Mapping[str, Any], layout: str, figure: str) -> float | None:
    """Return the median over rounds of a layout's figure divided by that of one core."""
    pairs = [
        (cells[f"{layout}|{name.split('|')[1]}"][figure], cell[figure])
        for name, cell in cells.items()
        if name.startswith(f"{ONE}|") and f"{layout}|{name.split('|')[1]}" in cells
    ]
    return statistics.median(a / b for a, b in pairs) if pairs else None


def gain(cells: Mapping[str, Any], layout: str, batch: int) -> float:
    """Return the median over rounds of the draft's speedup of a layout."""
    found = [cell for name, cell in cells.items() if name.startswith(f"{layout}|")]
    return float(statistics.median(cell[f"draft {batch}"] / cell[f"plain {batch}"] for cell in found))


def page(cells: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Return the page, in Markdown."""
    batch = settings["batch_size"]
    layouts = list(dict.fromkeys(name.split("|")[0] for name in cells))
    lines = [
        f"# Ranks of one core each: {settings['model']}, {settings['quantization']}",
        "",
        f"{settings['limit']} prompts, {settings['max_tokens']} tokens each, end of text ignored; the draft "
        f"is {', '.join(settings['draft'])} in int4. Speed is of what comes after the first "
        "tokens. Ratios are over one core in the same round, medians over rounds; memory is what a rank has "
        "for itself beside an interpreter with PyTorch.",
        "",
        row(
            *("layout", "plain, tokens/s", "over one core", f"plain, batch {batch}", "over one core"),
            *("1,000 tokens read, s", "one core over it", "draft's gain", f"draft's gain, batch {batch}"),
            *("gain over one core's", "MB of a rank", "16 rows added, us", "handed on, us"),
            *("control, ms", "texts as one core's"),
        ),
        row(*["---"] * 15),
    ]
    wanted = next((cell["texts"]["plain 1"] for cell in cells.values()), None)
    for layout in layouts:
        of = [cell for name, cell in cells.items() if name.startswith(f"{layout}|")]

        def middle(name: str, of: Sequence[Mapping[str, Any]] = of) -> float | None:
            known = [cell[name] for cell in of if cell[name] is not None]
            return statistics.median(known) if known else None

        control_s = middle("control")
        same = all(text == wanted for cell in of for text in cell["texts"].values())
        read = over_one(cells, layout, "prompt")
        lines.append(
            row(
                *(layout, shown(middle("plain 1")), shown(over_one(cells, layout, "plain 1"))),
                *(shown(middle(f"plain {batch}")), shown(over_one(cells, layout, f"plain {batch}"))),
                *(shown(middle("prompt")), shown(None if read is None else 1 / read)),
                *(shown(gain(cells, layout, 1)), shown(gain(cells, layout, batch))),
                shown(gain(cells, layout, 1) / gain(cells, str(ONE), 1)),
                " + ".join(f"{max(0, uss - of[0]['own']) / 1e6:.0f}" for uss in of[0]["memory"]),
                *(shown(middle("exchange"), 1), shown(middle("hop"), 1)),
                *(shown(None if control_s is None else 1000 * control_s), "yes" if same else "NO"),
            )
        )
    return [*lines, ""]


def shown(figure: float | None, places: int = 2) -> str:
    return "-" if figure is None else f"{figure:.{places}f}"


def draw(cells: Mapping[str, Any], path: Path) -> bool:
    """Draw the picture; return False without matplotlib."""
    layouts = list(dict.fromkeys(name.split("|")[0] for name in cells))
    if find_spec("matplotlib") is None or len(layouts) < 2:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    labels = {"plain 1": "plain", "draft 1": "with the draft", "prompt": "reading 1,000 tokens"}
    for i, (name, label) in enumerate(labels.items()):
        ratios = [over_one(cells, layout, name) or 0.0 for layout in layouts]
        heights = [1 / ratio if name == "prompt" and ratio else ratio for ratio in ratios]
        axes.bar([at + 0.25 * i for at in range(len(layouts))], heights, width=0.25, label=label)
    axes.set(title="Speed over one core, batch 1", ylabel="times")
    names = [layout.replace(" at ", "\nat ") for layout in layouts]
    axes.set_xticks([at + 0.25 for at in range(len(layouts))], names)
    axes.axhline(1, linewidth=0.8, color="#888888")
    axes.legend(frameon=False)
    figure.savefig(path)
    return True


if __name__ == "__main__":
    run(main)
