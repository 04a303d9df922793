"""Rules of the package's source: names of classes, places of exceptions, and names of PyTorch."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import specinfer
from specinfer import errors

PACKAGE = Path(specinfer.__file__).parent
SOURCES = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
CLASSES = [
    (module, node)
    for module, source in SOURCES.items()
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.ClassDef)
]
INNER = {"ops", "backends", "_C", "library"}  # they differ between builds and versions of PyTorch


def test_no_public_class_name_is_defined_twice() -> None:
    found = defaultdict(list)
    for module, node in CLASSES:
        if not node.name.startswith("_"):
            found[node.name].append(module)
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


def test_every_exception_of_ours_that_leaves_a_call_is_defined_in_errors() -> None:
    """An exception of another module is caught where it is raised, and is no SpecInferError."""
    strays = [
        f"{module}: {node.name}"
        for module, node in CLASSES
        if module != "errors.py"
        and {ast.unparse(base).split(".")[-1] for base in node.bases} & vars(errors).keys()
    ]
    assert strays == []


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
    """So pyproject.toml sets no upper bound to its version."""
    found = {module: names for module, source in SOURCES.items() if (names := inner_names(source))}
    assert found == {}
