"""Packs a tuned head for the package: int8 matrices and its card.

    python benchmarks/head_recipes/pack.py TUNED TARGET specinfer/data/heads/smollm2-135m-head SEED [INIT]

INIT is the head that the tuning started from; its card's training data are added.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from specinfer.heads.checkpoint import open_head
from specinfer.heads.speculators import write_head
from specinfer.hub import resolve
from specinfer.models.fingerprint import fingerprint
from specinfer.models.open_model import open_model

MOST = 12 << 20  # bytes
TRAINING_DATA = re.compile(r"\| training data \| (.*) \|")
NOTE = """
Its recipe is `benchmarks/head_recipes/smollm2.sh`, seed {seed}{init}.
Matrices are int8 with a scale per row, a format of specinfer.
Use it as `--draft smollm2-135m-head`. It changes no text.

## Licence

The head derives from SmolLM2-135M-Instruct (Apache-2.0): that model's last layer initialized it, and it was
trained on that model's answers only. The questions came from databricks-dolly-15k (CC BY-SA 3.0) and the
training split of GSM8K (MIT). No answer of these data sets was used, and no question is in the head's files.
The head is licensed under Apache-2.0.
"""


def main() -> None:
    """Pack one head; raises SystemExit, and keeps the old one, if it is too large for the package."""
    known = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("tuned", "target", "out"):
        known.add_argument(name, type=Path, metavar=name.upper())
    known.add_argument("seed", type=int, metavar="SEED")
    known.add_argument("init", nargs="?", metavar="INIT")
    args = known.parse_args()
    init = None if args.init is None else resolve(args.init).path
    card = card_of(args.tuned, args.seed, init)
    opened = open_model(args.target)
    head = open_head(args.tuned, opened).module(opened)
    with TemporaryDirectory(dir=args.out.parent) as packed:
        write_head(
            head,
            Path(packed),
            verifier="smollm2-135m",
            architectures=["LlamaForCausalLM"],
            dtype=torch.int8,
            fingerprint=fingerprint(opened),
        )
        size = (Path(packed) / "model.safetensors").stat().st_size
        if size > MOST:
            raise SystemExit(f"the head takes {size} bytes; at most {MOST} fit into the package")
        args.out.mkdir(exist_ok=True)
        for file in Path(packed).iterdir():
            file.replace(args.out / file.name)
    (args.out / "README.md").write_text(card, encoding="utf-8")
    sys.stdout.write(f"{args.out}: {size} bytes\n")


def card_of(tuned: Path, seed: int, init: Path | None) -> str:
    """Return the card of the packed head, with the training data of the head it started from."""
    # The recipe has the licences, and the quality figures are of other matrices.
    card = (tuned / "README.md").read_text(encoding="utf-8").partition("\n## Licence\n")[0]
    card = re.sub(r"--model \S+ --draft THIS_FOLDER", "--model smollm2-135m --draft smollm2-135m-head", card)
    continued = ""
    if init is not None:
        row = TRAINING_DATA.search((init / "README.md").read_text(encoding="utf-8"))
        if row is None:
            raise SystemExit(
                f"the card of {init} has no row 'training data'; give a head made by specinfer tune"
            )
        before = sum(map(int, re.findall(r"(\d+) (?:tokens|others|other tokens)", row[1])))
        card = TRAINING_DATA.sub(
            lambda row: f"| training data | {row[1]}; earlier: {before} other tokens |", card
        )
        continued = f", which continued the previous `{init.name}`"
    return card + NOTE.format(seed=seed, init=continued)


if __name__ == "__main__":
    main()
