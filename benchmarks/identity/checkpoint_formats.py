"""Measures the cost of running other programs' quantized files in specinfer's layouts, as perplexity.

    python -m benchmarks.identity.checkpoint_formats --model MODEL --dataset prompts/dolly.jsonl

The model is written as a folder in bfloat16, and then in each format, rounded to the nearest values. The
perplexity of a folder's own values, in float32, is compared with that of every quantization, over the rows of
perplexity.py. A JSON file beside the Markdown keeps the measured rows of each format, so an interrupted run
continues, and a larger --limit adds rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.identity.perplexity import answer_ids, difference, perplexity, row_costs
from benchmarks.identity.rounded_formats import QUANTIZED, rounded_formats, write_bfloat16, write_rounded
from benchmarks.study import REQUIRED, Study, in_turn, natural, parser, row, run
from specinfer.engine.hardware import use_threads
from specinfer.errors import ModelError
from specinfer.hub import resolve
from specinfer.kernels.choice import choose_kernels
from specinfer.kernels.layout import GROUP
from specinfer.models.language_model import LanguageModel
from specinfer.models.open_model import open_model
from specinfer.models.safetensors import SafetensorsFolder
from specinfer.models.weight_sizes import estimate_bytes
from specinfer.models.weights import load_model
from specinfer.report.dataset import read_dataset
from specinfer.speculation_config import Quantization
from specinfer.tokenizer import Tokenizer

SOURCE: Final = "bfloat16"
VALUES: Final = "float32"  # the file's values, without rounding
KINDS: Final[dict[str, tuple[Quantization, torch.dtype]]] = {
    VALUES: ("none", torch.float32),
    "none": ("none", torch.bfloat16),
    "int8": ("int8", torch.bfloat16),
    "int4": ("int4", torch.bfloat16),
}
_GROUP_SIZES: Final = (128, 64, 32)
_CPU: Final = torch.device("cpu")
_FILE_NOTE: Final = (
    "The model comes from a GGUF file, so its weights in bfloat16 lie on the grids of that file. int4 may "
    "cost less for `bfloat16`, w8a8 and FP8 than it would for a model trained in bfloat16."
)


def main() -> None:
    options = parser(__doc__, model=REQUIRED, dataset=REQUIRED, limit=120)
    options.add_argument(
        "--max-tokens", type=natural, default=1024, help="max tokens of a row; the rest is cut off"
    )
    args = options.parse_args()
    settings = {
        "model": Path(args.model).name,
        "dataset": ", ".join(path.name for path in args.dataset),
        "max_tokens": args.max_tokens,
    }
    study = Study("checkpoints", args.out, settings)
    model = resolve(args.model)
    tokenizer = Tokenizer.load(model)
    conversations = in_turn([read_dataset(path) for path in args.dataset], args.limit)
    texts = [answer_ids(tokenizer, conversation, args.max_tokens) for conversation in conversations]
    with TemporaryDirectory(prefix="checkpoints-") as named:
        source = Path(named) / SOURCE
        write_bfloat16(model, source)
        size = group_size(source)
        formats = rounded_formats(size)
        for name in (SOURCE, *formats):
            rows = study.cells.get(name, {}).get("rows", [])
            if len(rows) >= len(texts):
                continue
            with TemporaryDirectory(dir=named) as inner:
                folder = source
                if name != SOURCE:
                    folder = Path(inner) / "model"
                    write_rounded(source, folder, formats[name])
                found = measured(folder, Path(inner) / "cache", texts[len(rows) :])
                study.keep(name, found | {"rows": [*rows, *found["rows"]]})
            print(row(name, *differences(study.cells[name]["rows"])), flush=True)
    cells = {name: cell | {"rows": cell["rows"][: len(texts)]} for name, cell in study.cells.items()}
    notes = [] if model.header is None else ["", _FILE_NOTE]
    print(study.write([*page([SOURCE, *formats], cells, settings, size), *notes]))


def group_size(folder: Path) -> int:
    """Return the largest usual size of groups that divides the rows of all quantized matrices.

    Raises ModelError if none does.
    """
    lengths = {shape[1] for name, shape in open_model(folder).shapes.items() if name.endswith(QUANTIZED)}
    for size in _GROUP_SIZES:
        if all(length % size == 0 for length in lengths):
            return size
    raise ModelError(
        f"got a model with rows of {', '.join(map(str, sorted(lengths)))} elements; allowed: multiples of "
        f"{_GROUP_SIZES[-1]}"
    )


def measured(folder: Path, cache: Path, texts: Sequence[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """Return a folder's costs of each row, bytes, and numbers of matrices that layouts represent exactly."""
    kernels, _ = choose_kernels("auto", _CPU)
    use_threads(None, kernels)
    models = dict[str, LanguageModel]()
    sizes = dict[str, int]()
    for kind, (quantization, dtype) in KINDS.items():
        models[kind] = load_model(
            folder, dtype=dtype, device=_CPU, kernels=kernels, quantization=quantization, cache=cache
        )
        sizes[kind] = estimate_bytes(folder, dtype, kernels, quantization)
    return {
        "rows": [row_costs(models, *text) for text in texts],
        "file_bytes": (folder / "model.safetensors").stat().st_size,
        "memory_bytes": sizes,
        **exact_matrices(folder),
    }


def exact_matrices(folder: Path) -> dict[str, int]:
    """Return the number of quantized matrices, and of those whose values bfloat16 and int4 represent."""
    model = open_model(folder)
    assert isinstance(model, SafetensorsFolder)
    found = {"matrices": 0, "none": 0, "int4": 0}
    for name, shape in model.shapes.items():
        if not name.endswith(QUANTIZED):
            continue
        values = model.read_rows(name, 0, shape[0]).float()
        read = model.int4_reader(name)
        found["matrices"] += 1
        found["none"] += torch.equal(values.bfloat16().float(), values)
        found["int4"] += read is not None and torch.equal(_int4_values(read(0, shape[0])), values)
    return found


def _int4_values(rows: Tensor) -> Tensor:
    """The values of rows in the layout of `int4_rows`."""
    scales = rows[..., GROUP : GROUP + 2].contiguous().view(torch.float16).float()
    zeros = rows[..., GROUP + 2 :].float() / 16
    return ((rows[..., :GROUP].float() - zeros) * scales).flatten(1)


def differences(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the difference of each quantization's perplexity from that of the file's values."""
    values = [one[VALUES]["nats"] for one in rows]
    return [difference(kind, rows, values) for kind in KINDS if kind != VALUES]


def page(names: Sequence[str], cells: dict[str, Any], settings: dict[str, Any], size: int) -> list[str]:
    """Return the page's lines, with a row for each format of `names`."""
    rows = cells[SOURCE]["rows"]
    tokens = sum(one["tokens"] for one in rows)
    memory = [
        f"{count / 1e6:.0f} MB in {'bfloat16' if kind == 'none' else kind}"
        for kind, count in cells[SOURCE]["memory_bytes"].items()
    ]
    lines = [
        f"# Perplexity of quantized folders: {settings['model']}",
        "",
        f"{len(rows)} rows of {settings['dataset']}, {tokens} tokens of references after their prompts in "
        f"the chat template. Integers of 4 bits have groups of {size}.",
        "",
        "The folders are written from the model's weights in bfloat16, rounded to the nearest values of each "
        "format. Published files are calibrated, so their perplexities are not those of the third "
        "column. The result is the difference between a file's own values (products in float32) and the "
        "layouts that run them: it has one standard error over rows.",
        "",
        "| format | file, MB | perplexity of its values | `none` in bfloat16 | `int8` | `int4` | exact "
        "matrices in bfloat16, int4 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in names:
        cell = cells[name]
        exact = f"{cell['none']}, {cell['int4']} of {cell['matrices']}"
        value = f"{perplexity(VALUES, cell['rows']):.4f}"
        lines.append(row(name, f"{cell['file_bytes'] / 1e6:.0f}", value, *differences(cell["rows"]), exact))
    lines += [
        "",
        f"Weights of any of these folders take {', '.join(memory)}. int8 rounds every matrix. With int8 and "
        "int4 the output layer is int8 and activations are rounded to 8 bits, so an exact int4 differs, too. "
        "MXFP4 is published for experts alone: here each matrix is written as a stack of one expert.",
        "",
        "Divergence of the distributions from those of the file's values, nats a token:",
        "",
        "| format | `none` in bfloat16 | `int8` | `int4` |",
        "|---|---|---|---|",
    ]
    for name in names:
        kinds = [kind for kind in KINDS if kind != VALUES]
        sums = [sum(one[kind]["divergence"] for one in cells[name]["rows"]) for kind in kinds]
        lines.append(row(name, *(f"{total / tokens:.5f}" for total in sums)))
    return [
        *lines,
        "",
        "The divergences compare whole distributions, so they have less noise than perplexities.",
    ]


if __name__ == "__main__":
    run(main)
