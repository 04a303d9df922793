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
from specinfer.heads.medusa import MedusaHead
from specinfer.heads.speculators import write_head
from specinfer.hub import resolve
from specinfer.models.fingerprint import fingerprint
from specinfer.models.weights import open_model

MOST = 12 << 20  # bytes
LEARNT = re.compile(r"\| learnt from \| (.*) \|")
NOTE = """
Its recipe is `benchmarks/head_recipes/smollm2.sh`, seed {seed}{init};
matrices are int8 with a factor for each row, which specinfer alone reads.
Named `smollm2-135m-head` in `--draft`. It changes no text.

## Licence

The head is made of SmolLM2-135M-Instruct (Apache-2.0): its last layer is what the head began as, and all it
learnt from are answers of that model. Questions were those of databricks-dolly-15k (CC BY-SA 3.0) and of the
training part of GSM8K (MIT). No answer of these data sets was used, and no question is in the head's files.
The head is given under Apache-2.0.
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
    if isinstance(head, MedusaHead):
        raise SystemExit(f"{args.tuned} holds Medusa's heads, which tune does not make")
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
    went_on = ""
    if init is not None:
        row = LEARNT.search((init / "README.md").read_text(encoding="utf-8"))
        if row is None:
            raise SystemExit(
                f"the card of {init} does not say what it learnt from; name a head that tune made"
            )
        before = sum(map(int, re.findall(r"(\d+) (?:tokens|others|other tokens)", row[1])))
        card = LEARNT.sub(
            lambda row: f"| learnt from | {row[1]}; before that from {before} other tokens |", card
        )
        went_on = f", which went on from `{init.name}` as it was then"
    return card + NOTE.format(seed=seed, init=went_on)


if __name__ == "__main__":
    main()
