"""A tuned head as it lies in the package: matrices as int8, and beside them what it is made of.

python benchmarks/head_recipes/pack.py TUNED TARGET specinfer/data/heads/smollm2-135m-head SEED [INIT]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

from specinfer.heads.checkpoint import open_head
from specinfer.heads.export import write_head
from specinfer.heads.medusa import MedusaHead
from specinfer.models.fingerprint import fingerprint
from specinfer.models.weights import open_model

MOST = 12 << 20  # bytes
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
    """Pack one head; raises SystemExit where it is too large for the package."""
    tuned, target, out = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    opened = open_model(target)
    head = open_head(tuned, opened).module(opened)
    if isinstance(head, MedusaHead):
        raise SystemExit(f"{tuned} holds Medusa's heads, which tune does not make")
    write_head(
        head,
        out,
        verifier="smollm2-135m",
        architectures=["LlamaForCausalLM"],
        dtype=torch.int8,
        fingerprint=fingerprint(opened),
    )
    card = (tuned / "README.md").read_text(encoding="utf-8")
    card = re.sub(r"--model \S+ --draft THIS_FOLDER", "--model smollm2-135m --draft smollm2-135m-head", card)
    seed, init = (
        sys.argv[4],
        "".join(f", which went on from `{name}` as it was then" for name in sys.argv[5:]),
    )
    (out / "README.md").write_text(card + NOTE.format(seed=seed, init=init), encoding="utf-8")
    size = (out / "model.safetensors").stat().st_size
    if size > MOST:
        raise SystemExit(f"the head takes {size} bytes; at most {MOST} fit into the package")
    sys.stdout.write(f"{out}: {size} bytes\n")


if __name__ == "__main__":
    main()
