"""Copies changed files of a folder to a dated snapshot, linking what stayed the same."""

from __future__ import annotations

import os
import shutil
import sys
from datetime import datetime
from pathlib import Path

KEEP = 14


def snapshots(root: Path) -> list[Path]:
    """Complete snapshots, oldest first."""
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.endswith(".partial"))


def same(a: Path, b: Path) -> bool:
    """Whether two files look equal, by size and time of change."""
    if not b.is_file():
        return False
    x, y = a.stat(), b.stat()
    return x.st_size == y.st_size and int(x.st_mtime) == int(y.st_mtime)


def copy_tree(source: Path, target: Path, previous: Path | None) -> tuple[int, int]:
    copied = linked = 0
    for folder, _, names in os.walk(source):
        relative = Path(folder).relative_to(source)
        (target / relative).mkdir(parents=True, exist_ok=True)
        for name in names:
            file = Path(folder) / name
            if file.is_symlink():
                print(f"skipping symbolic link {file}")
                continue
            old = previous / relative / name if previous else None
            try:
                if old is not None and same(file, old):
                    os.link(old, target / relative / name)
                    linked += 1
                else:
                    shutil.copy2(file, target / relative / name)
                    copied += 1
            except PermissionError:
                print(f"cannot read {file}")
    return copied, linked


def prune(root: Path) -> None:
    for path in snapshots(root)[:-KEEP]:
        print(f"removing {path.name}")
        shutil.rmtree(path)


def main() -> int:
    if len(sys.argv) != 3:
        print("usage: backup.py SOURCE TARGET")
        return 2
    source, root = Path(sys.argv[1]), Path(sys.argv[2])
    root.mkdir(parents=True, exist_ok=True)
    existing = snapshots(root)
    previous = existing[-1] if existing else None
    name = datetime.now().strftime("%Y-%m-%d_%H%M%S")
    partial = root / f"{name}.partial"
    print(f"backing up {source} to {root / name}")
    copied, linked = copy_tree(source, partial, previous)
    partial.rename(root / name)
    print(f"copied {copied} files, linked {linked}")
    prune(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
