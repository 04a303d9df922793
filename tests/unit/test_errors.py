"""The exceptions: which of them are users' mistakes."""

from __future__ import annotations

import inspect

from specinfer import errors

CLASSES = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind)}


def test_what_a_user_can_mend_is_a_value_error() -> None:
    assert issubclass(errors.UserError, ValueError)
    others = {name for name, kind in CLASSES.items() if not issubclass(kind, errors.UserError)}
    assert others == {"SpecInferError", "IntegrityError"}


def test_a_long_value_is_shown_short() -> None:
    assert errors.shown("a" * 58) == repr("a" * 58)
    assert errors.shown("a" * 59) == "'" + "a" * 56 + "..."
    assert len(errors.shown(list(range(1000)), 80)) == 80
