"""A class name means one thing in the whole package."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import specinfer

PACKAGE = Path(specinfer.__file__).parent


def classes_by_name(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """The modules that define a class of each public name."""
    found = defaultdict(list)
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module)
    return found


def test_no_public_class_name_is_defined_twice() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    found = classes_by_name({str(p.relative_to(PACKAGE)): p.read_text(encoding="utf-8") for p in paths})
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}
