"""Write the table and the list of docs/models.md: python tools/models_page.py [--try] [MODEL_TYPE ...].

With `--try` every decoder of transformers, or each named one, is made from a tiny config with random weights.
It is saved, loaded through transformers' code and compared with transformers itself in float32. In float32
and bfloat16, rows of a tree must equal those of a text. `specinfer check` must pass in an engine. Each kind
takes some seconds. Without `--try` only the column of native families is rewritten.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from specinfer.models.families.registry import HF_FAMILIES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- models: tools/models_page.py -->\n", "<!-- end -->"
HEAD = "| logits differ by | run through transformers | have a native family, too |\n|---|---|---|\n"
REFUSED = """
The native families of the last row do not run through transformers. These decoders run neither way,
except for [texts](#native-families) of models that read images, too:

"""
COUNTS = re.compile(r"In total, .*?: \d+ run natively, \d+ through transformers alone, \d+ are refused\.")
TOLERANCE = 1e-4


class Tried(NamedTuple):
    """The result of running a model_type through transformers' code."""

    kind: str
    runs: bool
    differs: str  # the largest difference of logits
    remark: str


def rows_of(page: str) -> list[Tried]:
    """Return the rows of the page's table and the kinds of its list."""
    part = page[page.index(BEGIN) + len(BEGIN) : page.index(END)]
    found: dict[str, Tried] = {}
    for differs, named in re.findall(r"^\| (\S*) *\| (.*`.*) \|$", part, re.M):
        found |= {kind: Tried(kind, bool(differs), differs, "") for kind in re.findall(r"`(.+?)`", named)}
    for remark, named in re.findall(r"^- (.+): (`[^:]+`)$", part, re.M):
        found |= {kind: Tried(kind, False, "", remark) for kind in re.findall(r"`(.+?)`", named)}
    return sorted(found.values())


def with_rows(page: str, rows: Sequence[Tried]) -> str:
    """Return the page with these rows, sorted, and with their counts."""
    by_difference, refused = dict[str, tuple[list[str], list[str]]](), dict[str, list[str]]()
    for row in sorted(rows):
        native = row.kind in HF_FAMILIES
        if row.runs or native:
            by_difference.setdefault(row.differs * row.runs, ([], []))[native].append(f"`{row.kind}`")
        else:
            refused.setdefault(row.remark, []).append(f"`{row.kind}`")
    ordered = sorted(by_difference.items(), key=lambda one: float(one[0] or 1))
    lines = [HEAD, *(f"| {differs} | {' '.join(a)} | {' '.join(b)} |\n" for differs, (a, b) in ordered)]
    lines.append(REFUSED)
    lines += [f"- {remark}: {', '.join(named)}\n" for remark, named in refused.items()]
    ours = sum(row.kind in HF_FAMILIES for row in rows)
    neither = sum(map(len, refused.values()))
    counts = (
        f"In total, {len(rows)} decoders were tried: {ours} run natively, {len(rows) - ours - neither} "
        f"through transformers alone, {neither} are refused."
    )
    before, _, after = page.partition(BEGIN)
    return COUNTS.sub(counts, before) + BEGIN + "".join(lines) + after[after.index(END) :]


def written(page: str) -> str:
    """Return the page with a new column of native families."""
    return with_rows(page, rows_of(page))


def tried(kind: str) -> Tried:
    """Make a tiny model of a model_type, run it and return the result."""
    import torch

    from specinfer.errors import ModelError, UnhostedError
    from specinfer.models.hosted.attention import transformers
    from specinfer.models.hosted.skeleton import Skeleton
    from tests.hosted import difference, failed_check, load_hosted, same_with_a_tree, save_tiny, tiny_config
    from tests.kernels import kernels

    transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    with tempfile.TemporaryDirectory(prefix="it-") as place:
        folder = Path(place) / "it"
        try:
            config = tiny_config(kind)
            Skeleton.of(config, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], torch.float32)
            theirs = save_tiny(kind, folder)
        except UnhostedError as error:
            return Tried(kind, False, "", str(error))
        except Exception as error:
            return Tried(kind, False, "", f"cannot be made of its config: {_line(error)}")
        try:
            ours = load_hosted(folder, kernels("native"))
            differs = difference(theirs, ours)
            rounded = load_hosted(folder, kernels("native"), torch.bfloat16)
        except ModelError as error:
            cause = error.__cause__
            return Tried(kind, False, "", _line(cause if isinstance(cause, UnhostedError) else error))
        if not differs < TOLERANCE:
            return Tried(kind, False, f"{differs:.0e}", "has other logits")
        if not (same_with_a_tree(ours) and same_with_a_tree(rounded)):
            return Tried(kind, False, f"{differs:.0e}", "has other logits in a tree")
        try:
            failed = failed_check(folder)
        except Exception as error:
            return Tried(kind, False, f"{differs:.0e}", f"ends the check: {_line(error)}")
        if failed is not None:
            return Tried(kind, False, f"{differs:.0e}", f"fails the check: {failed}")
        return Tried(kind, True, f"{differs:.0e}", "")


def kinds() -> list[str]:
    """Return the model_type of every text decoder in transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text.replace("|", "/")[:160]


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--try", dest="trying", action="store_true")
    parser.add_argument("kinds", nargs="*")
    given = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    rows = {row.kind: row for row in rows_of(page)}
    if given.trying:
        named = given.kinds or kinds()
        rows = {kind: row for kind, row in rows.items() if kind in set(kinds())}
        for kind in named:
            rows[kind] = tried(kind)
            print(*rows[kind], flush=True)
    PAGE.write_text(with_rows(page, list(rows.values())), encoding="utf-8")


if __name__ == "__main__":
    main()
