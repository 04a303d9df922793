"""Trace files: written ones are read again, and invalid ones are refused in one line."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specinfer.errors import ConfigError, UserError
from specinfer.replay import trace as traces
from specinfer.replay.guess_trie import GuessTrie
from specinfer.replay.replay import POLICIES, play, whole
from specinfer.replay.trace import Trace, read_trace, write_trace
from tests.engines import Tiny
from tests.unit.replay.conftest import recorded

Arrays = dict[str, NDArray[Any]]


@pytest.fixture
def trace(tiny: Tiny, made: list[Trace]) -> Trace:
    if not made:
        llm = tiny.llm(drafts=("similar",), lookup=True)
        made.append(recorded(llm, prediction=(1, 2, 3)))
    return made[0]


@pytest.fixture
def file(trace: Trace, tmp_path: Path) -> Path:
    write_trace(tmp_path / "trace.npz", trace)
    return tmp_path / "trace.npz"


def test_a_trace_is_read_as_it_was_written(trace: Trace, file: Path) -> None:
    read = read_trace(file)
    assert (read.model, read.engine, read.speculation) == (trace.model, trace.engine, trace.speculation)
    assert (read.texts, read.curve, read.stages) == (trace.texts, trace.curve, trace.stages)
    assert read.texts[0].prediction == (1, 2, 3)
    np.testing.assert_array_equal(read.likeliest, trace.likeliest)
    assert list(read.drafts) == list(trace.drafts) == ["0-similar"]
    ours, theirs = trace.drafts["0-similar"], read.drafts["0-similar"]
    assert (theirs.model, theirs.curve, theirs.measured) == (ours.model, ours.curve, ours.measured)
    for f in fields(GuessTrie):
        np.testing.assert_array_equal(getattr(theirs.guesses, f.name), getattr(ours.guesses, f.name))
    policies = [POLICIES["cost"](one, one.speculation) for one in (trace, read)]
    assert play(whole([trace]), policies[0]) == play(whole([read]), policies[1])


def test_a_trace_holds_ids_and_no_text(file: Path) -> None:
    with zipfile.ZipFile(file) as entries:
        assert {Path(name).suffix for name in entries.namelist()} == {".npy"}
    assert not any(array.dtype.hasobject for array in arrays_of(file).values())


def test_a_file_that_cannot_be_written_is_named(trace: Trace, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*none"):
        write_trace(tmp_path / "none" / "trace.npz", trace)
    assert list(tmp_path.iterdir()) == []


def arrays_of(file: Path) -> Arrays:
    with np.load(file, allow_pickle=False) as read:
        return dict(read)


def head_of(arrays: Arrays) -> Any:
    return json.loads(arrays["head"].tobytes())


def with_head(change: Callable[[Any], object]) -> Callable[[Arrays], object]:
    def changed(arrays: Arrays) -> None:
        head = head_of(arrays)
        change(head)
        arrays["head"] = np.frombuffer(json.dumps(head).encode(), dtype=np.uint8)

    return changed


def with_value(name: str, place: int | slice, value: float) -> Callable[[Arrays], object]:
    def changed(arrays: Arrays) -> None:
        arrays[name] = arrays[name].copy()
        arrays[name][place] = value

    return changed


def with_array(name: str, make: Callable[[NDArray[Any]], NDArray[Any]]) -> Callable[[Arrays], object]:
    return lambda arrays: arrays.update({name: make(arrays[name])})


DAMAGES: dict[str, tuple[Callable[[Arrays], object], str]] = {
    "no head": (lambda a: a.pop("head"), "lacks 'head'"),
    "another format": (with_head(lambda h: h.update(format="x")), "lacks the format name"),
    "a newer version": (with_head(lambda h: h.update(version=9)), "version 9"),
    "a version too old": (with_head(lambda h: h.update(version=1)), "reads 2 to 3"),
    "a block of nothing": (
        with_head(
            lambda h: h["drafts"][0].update(
                head={"block_size": 1, "skipped": 1, "causal": True, "reads_last": True}
            )
        ),
        "of 1 rows skips 1",
    ),
    "no JSON": (with_array("head", lambda a: a[:-3]), "not a policy trace"),
    "head of nothing": (
        with_array("head", lambda a: np.frombuffer(b"[]", np.uint8)),
        "lacks the format name",
    ),
    "unknown option": (with_head(lambda h: h["speculation"].update(x=1)), "not a policy trace"),
    "bad option": (with_head(lambda h: h["speculation"].update(max_nodes=-1)), "max_nodes is -1"),
    "bad parameter": (with_head(lambda h: h["requests"][0]["params"].update(top_p=7)), "top_p is 7"),
    "no parameter": (with_head(lambda h: h["requests"][0]["params"].pop("top_p")), "lacks 'top_p'"),
    "one request too few": (with_head(lambda h: h["requests"].pop()), "do not add up"),
    "a falling curve": (with_head(lambda h: h["curve"].reverse()), "does not rise"),
    "a curve of no number": (with_head(lambda h: h.update(curve=[[1, 1.0], [2, float("nan")]])), "rise"),
    "endless stages": (
        with_head(lambda h: h["stages"].update(commit=float("inf"))),
        "invalid number of seconds",
    ),
    "a token too high": (with_value("tokens", 0, 64), r"an id outside \[0, 64\)"),
    "a text too long": (with_value("lengths", 0, 1 << 30), "do not add up"),
    "an empty output": (with_value("lengths", slice(None), 0), "do not add up"),
    "no guesses": (lambda a: a.pop("draft0.tokens"), "lacks 'draft0.tokens'"),
    "a root nowhere": (with_value("draft0.roots", 3, 1 << 30), "a root is no site"),
    "a guess too high": (with_value("draft0.tokens", 0, 64), "a guess is no token"),
    "ranges that overlap": (with_value("draft0.first", 1, 1 << 40), "no range of draws"),
    "a loop": (with_value("draft0.below", slice(None), 0), "does not lie behind"),
    "NaN": (with_value("draft0.confidences", 0, float("nan")), "no finite number"),
    "integers for floats": (with_array("draft0.confidences", lambda a: a.astype(np.int64)), "is of int64"),
    "another shape": (with_array("draft0.tokens", lambda a: a[:, None]), "another shape"),
    "objects": (with_array("tokens", lambda a: a.astype(object)), "not a plain array"),
}


def test_a_trace_of_the_version_before_is_read(file: Path) -> None:
    arrays = arrays_of(file)
    with_head(lambda h: h.update(version=2))(arrays)
    np.savez(file, **arrays)  # type: ignore[arg-type]
    assert read_trace(file).drafts["0-similar"].head is None


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_no_trace_is_refused(file: Path, damage: str) -> None:
    harm, reason = DAMAGES[damage]
    arrays = arrays_of(file)
    harm(arrays)
    np.savez(file, **arrays)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=reason) as refused:
        read_trace(file)
    assert str(file) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_truncated_file_and_another_kind_are_refused(file: Path) -> None:
    whole_file = file.read_bytes()
    for data in (b"", b"{}", whole_file[:1000], whole_file[:-50], whole_file[:5000] + whole_file[5100:]):
        file.write_bytes(data)
        with pytest.raises(UserError, match="is not a policy trace"):
            read_trace(file)
    with pytest.raises(UserError, match="cannot read"):
        read_trace(file.parent)


def test_no_array_is_believed_to_be_larger_than_its_entry(file: Path) -> None:
    data = io.BytesIO()
    np.lib.format.write_array_header_1_0(data, {"descr": "<i4", "fortran_order": False, "shape": (1 << 60,)})
    with zipfile.ZipFile(file, "w") as entries:
        entries.writestr("head.npy", data.getvalue())
    with pytest.raises(UserError, match="has another length than its entry"):
        read_trace(file)


def test_a_file_that_would_fill_memory_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "LARGEST", 1000)
    with pytest.raises(UserError, match="allowed: 1000"):
        read_trace(file)
