"""The exceptions: which of them are users' mistakes."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from specinfer import errors

CLASSES = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind)}


def test_what_a_user_can_mend_is_a_value_error() -> None:
    assert issubclass(errors.UserError, ValueError)
    others = {name for name, kind in CLASSES.items() if not issubclass(kind, errors.UserError)}
    assert others == {"SpecInferError", "IntegrityError"}


def test_every_exception_of_ours_that_leaves_a_call_is_defined_there() -> None:
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


def test_a_long_value_is_shown_short() -> None:
    assert errors.shown("a" * 58) == repr("a" * 58)
    assert errors.shown("a" * 59) == "'" + "a" * 56 + "..."
    assert len(errors.shown(list(range(1000)), 80)) == 80
