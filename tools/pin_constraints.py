"""Write constraints.txt: the installed versions of all packages that specinfer and its extras need.

    .venv/bin/python tools/pin_constraints.py

Run it in an environment that was made without constraints, after `make test` passed there. It leaves torch
out, as the build depends on the machine (tools/install_torch.py).
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
LEFT_OUT = {"specinfer", "torch", "triton"}
LEFT_OUT_PREFIXES = ("nvidia-", "cuda-")  # the plain torch's own, pinned by it
# tools/install_torch.py installs and uses uv; ray is an extra that the tests do not need.
TOOLS = {"uv": "0.13.8", "ray": "2.60.0"}
HEADER = "# Exact versions for `make demo` and `make test`; written by tools/pin_constraints.py.\n"


def main() -> None:
    pins: dict[str, str] = dict(TOOLS)
    seen: set[tuple[str, str]] = set()
    todo = [(canonicalize_name("specinfer"), extra) for extra in ("", "dev")]
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen or name.startswith(LEFT_OUT_PREFIXES):
            continue
        seen.add((name, extra))
        distribution = importlib.metadata.distribution(name)
        if name not in LEFT_OUT:
            pins[name] = distribution.version
        for line in distribution.requires or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                found = canonicalize_name(needed.name)
                todo += [(found, wanted) for wanted in ("", *needed.extras)]
    CONSTRAINTS.write_text(HEADER + "".join(f"{name}=={pins[name]}\n" for name in sorted(pins)))


if __name__ == "__main__":
    main()
