"""Listeners, the callbacks of an engine's steps; TreeEvent, their input; and trace files of these events.

Viewers depend only on the JSON form, which is stable.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from specinfer.errors import UserError
from specinfer.plan import StepPlan
from specinfer.speculate.decision import Decision
from specinfer.tokenizer import Tokenizer
from specinfer.tree import TokenTree
from specinfer.tree.token_tree import proposed_by
from specinfer.verify.coupled import Acceptance

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TreeEvent:
    """One request's tree in one step."""

    step: int
    request_id: str
    tree: TokenTree
    acceptance: Acceptance
    seconds: Mapping[str, float] = field(default_factory=dict)  # seconds of the step's stages so far
    decision: Decision | None = None  # the policy's reasons, if requested

    def to_json(self, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
        """Return the event as JSON values.

        `proposed_by[i]` has the speculators that drew node i, and `likelihoods[i]` their acceptance
        probability of it. With a tokenizer, `texts[i]` is the node's token as text and `next_text` that of
        the bonus token; `bytes` has, in hexadecimal by id, the bytes of tokens that are not whole characters.
        """
        return (self._texts(tokenizer) if tokenizer is not None else {}) | {
            "step": self.step,
            "request_id": self.request_id,
            "token_ids": list(self.tree.token_ids),
            "parents": list(self.tree.parents),
            "proposed_by": proposed_by(self.tree),
            "path": list(self.acceptance.path),
            "next_token": self.acceptance.next_token,
            "likelihoods": [round(likely, 6) for likely in self.tree.likelihoods()],
            "seconds": {stage: round(seconds, 6) for stage, seconds in self.seconds.items()},
            **({} if self.decision is None else {"decision": self.decision.to_json()}),
        }

    def _texts(self, tokenizer: Tokenizer) -> dict[str, Any]:
        tokens = [*self.tree.token_ids, self.acceptance.next_token]
        *texts, last = map(tokenizer.text_of, tokens)
        parts = {
            str(token): tokenizer.token_bytes[token].hex()
            for token, text in zip(tokens, [*texts, last], strict=True)
            if "\ufffd" in text and not tokenizer.is_special(token)
        }
        return {"texts": texts, "next_text": last} | ({"bytes": parts} if parts else {})


def read_trace(path: Path) -> bytes:
    """Return the contents of a trace file; raises UserError with the line number of an invalid line."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    steps = 0
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            event = json.loads(line, parse_constant=_refuse)
            wrong = complaint(event)
        except (ValueError, RecursionError):
            wrong = "it is not JSON"
        if wrong:
            raise UserError(
                f"{path}, line {number}: {wrong}; give a file that `specinfer generate --trace FILE` wrote, "
                "or the page saved"
            )
        steps += 1
    if not steps:
        raise UserError(f"{path} has no steps; give a file that `specinfer generate --trace FILE` wrote")
    return data


def complaint(event: Any) -> str:
    """Return why a JSON value is not a tree event, or "" if it is one."""
    if not isinstance(event, dict):
        return "it is no JSON object"
    tokens, parents = event.get("token_ids"), event.get("parents")
    if not _are(tokens, int) or not tokens:
        return "token_ids is no list of integers"
    if not _are(parents, int) or len(parents) != len(tokens):
        return "parents is no list of as many integers as token_ids"
    if parents[0] != -1 or any(not 0 <= parent < node for node, parent in enumerate(parents[1:], 1)):
        return "parents is no tree: the first is -1, and each other one an earlier node"
    path = event.get("path")
    if not _are(path, int) or any(not 0 < node < len(tokens) for node in path):
        return "path is no list of nodes"
    if any(parents[node] != before for before, node in zip([0, *path], path, strict=False)):
        return "path does not lead down the tree from its root"
    if not _is(event.get("next_token"), int) or not _is(event.get("step"), int):
        return "step and next_token are integers"
    names = event.get("proposed_by")
    if not isinstance(names, list) or len(names) != len(tokens) or not all(_are(some, str) for some in names):
        return "proposed_by is no list of lists of names, one for each node"
    for name, kind in (("texts", str), ("likelihoods", (int, float))):
        if name in event and (not _are(event[name], kind) or len(event[name]) != len(tokens)):
            return f"{name} has not one value for each node"
    seconds, parts = event.get("seconds", {}), event.get("bytes", {})
    if not isinstance(seconds, dict) or not _are([*seconds.values()], (int, float)):
        return "seconds is no object of numbers"
    if not isinstance(parts, dict) or not _are([*parts.values()], str):
        return "bytes is no object of texts"
    if not isinstance(event.get("next_text", ""), str) or not isinstance(event.get("request_id", ""), str):
        return "next_text and request_id are texts"
    return ""


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # Python reads NaN and infinities, browsers do not


def _is(value: object, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _are(values: object, kind: type | tuple[type, ...]) -> TypeGuard[list[Any]]:
    return isinstance(values, list) and all(_is(value, kind) for value in values)


class Listeners:
    """Callbacks that may be set at any time; LLM has their contracts."""

    def __init__(self) -> None:
        self.on_step: Callable[[Sequence[str]], None] | None = None
        self.on_tree: Callable[[TreeEvent], None] | None = None
        self.explains = False  # True if tree events include decisions
        self._on_step_failed = False  # True once its failure was logged

    @property
    def wants_decisions(self) -> bool:
        """True if `on_tree` gets decisions."""
        return self.explains and self.on_tree is not None

    def announce(self, plan: StepPlan) -> None:
        """Call `on_step` with the step's request ids; its first exception is logged, and steps continue."""
        if self.on_step is None:
            return
        try:
            self.on_step([entry.request.request_id for entry in plan.entries])
        except Exception:
            if not self._on_step_failed:
                _LOG.exception("on_step failed; steps continue, and later failures are not logged")
            self._on_step_failed = True

    def trace(self, event: TreeEvent) -> str | None:
        """Call `on_tree`; returns the text of its exception, which ends the request of the event."""
        assert self.on_tree is not None, "nobody listens"
        try:
            self.on_tree(event)
        except Exception as error:
            _LOG.exception("request %s ends, as on_tree failed", event.request_id)
            return f"on_tree failed: {error}"
        return None
