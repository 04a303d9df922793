"""The exceptions: what the tree in the docstring says is so."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from specinfer import errors

CLASSES = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind)}


def drawn() -> dict[str, str | None]:
    """The docstring's tree as class -> the class it hangs below."""
    parents: dict[str, str | None] = {}
    last: list[str] = []  # the last class of each depth
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"((?:\|   |    |\|-- |`-- )*)([A-Z]\w+)", line)
        if match is None or match[2] == "Every":
            continue
        depth = len(match[1]) // 4
        parents[match[2]] = last[depth - 1] if depth else None
        last[depth:] = [match[2]]
    return parents


def test_the_docstring_draws_every_class_below_its_base() -> None:
    bases = {name: kind.__base__.__name__ for name, kind in CLASSES.items() if name != "SpecInferError"}
    assert drawn() == {"SpecInferError": None, **bases}


@pytest.mark.parametrize(
    "name", [name for name in CLASSES if name not in ("SpecInferError", "IntegrityError")]
)
def test_what_a_user_can_mend_is_a_value_error(name: str) -> None:
    assert issubclass(CLASSES[name], ValueError)
    assert issubclass(CLASSES[name], errors.UserError)


def test_a_bug_of_ours_is_no_user_error() -> None:
    assert not issubclass(errors.IntegrityError, errors.UserError)


def test_every_exception_of_ours_that_leaves_a_call_is_drawn() -> None:
    """An exception of another module is caught where it is raised, and is no SpecInferError."""
    package = Path(errors.__file__).parent
    strays = [
        f"{path.relative_to(package)}: {node.name}"
        for path in sorted(package.rglob("*.py"))
        if path != Path(errors.__file__)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and {ast.unparse(base).split(".")[-1] for base in node.bases} & set(CLASSES)
    ]
    assert strays == []
