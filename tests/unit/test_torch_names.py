"""PyTorch is used by its public names alone: so pyproject.toml sets no upper bound to its version."""

from __future__ import annotations

import ast
from pathlib import Path

import specinfer

PACKAGE = Path(specinfer.__file__).parent
INNER = {"ops", "backends", "_C", "library"}  # they differ between builds and versions of PyTorch


def inner_names(source: str) -> list[str]:
    """The names of PyTorch a source uses that are private, or not the same in every build."""
    tree = ast.parse(source)
    homes = {"torch": "torch"}
    used: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            used += [alias.name for alias in node.names]
            homes |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            used += [f"{node.module}.{alias.name}" for alias in node.names]
            homes |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            used.append(f"{homes.get(first, '')}.{rest}")
    return sorted(
        name
        for name in set(used)
        if name.startswith("torch.")
        and any(part in INNER or (part[:1] == "_" and part[:2] != "__") for part in name.split(".")[1:])
    )


def test_no_inner_name_of_torch_is_used() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    found = {str(path): names for path in paths if (names := inner_names(path.read_text(encoding="utf-8")))}
    assert found == {}
