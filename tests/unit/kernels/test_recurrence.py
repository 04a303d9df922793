"""Native recurrent blocks: near the float64 oracle, and a row's bits are those of its path alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from specinfer.kernels.native_ops import NativeOps
from specinfer.kernels.ops import Ops
from specinfer.kernels.recurrence import RecurrenceParts
from specinfer.kernels.states import StatePass, StateRows
from tests.kernels import kernels
from tests.oracles.recurrence import values_of
from tests.unit.kernels.recurrent import NODES, Part, States, block, inputs

# Every kind, with sizes that fill vectors and that do not, and every switch.
BLOCKS: Final[dict[str, RecurrenceParts]] = {
    "conv": block("short_conv", (1100, 0, 0, 0), taps=3),
    "conv, bias": block("short_conv", (37, 0, 0, 0), taps=2, bias=True),
    "delta": block("gated_delta", (4, 2, 32, 48), norm="before", norm_groups="heads"),
    "delta, odd keys": block("gated_delta", (3, 1, 7, 16), taps=3, norm="before", norm_groups="heads"),
    "delta, one key head each": block("gated_delta", (2, 2, 17, 32), bias=True),
    "delta, tiled": block("gated_delta", (6, 2, 8, 16), tiled=True, norm="before", norm_groups="heads"),
    "mamba": block("mamba2", (6, 3, 24, 32), bias=True, skip=True, norm="behind", norm_groups=3),
    "mamba, one group": block("mamba2", (5, 1, 5, 16), skip=True, norm="behind", min_dt=0.2, max_dt=0.9),
    "mamba, gate behind": block("mamba2", (4, 2, 16, 16), norm="before"),
}
#  0 -+- 1 -+- 3 --- 6
#     |     `- 4
#     `- 2 --- 5 --- 7 --- 8
TREE: Final = [-1, 0, 0, 1, 1, 2, 3, 5, 7]
TEXT: Final = 40


@pytest.fixture(scope="module")
def native() -> NativeOps:
    return kernels("native").ops


Text = tuple[Tensor, Tensor | None]


def alone(native: NativeOps, parts: RecurrenceParts, text: Text, tokens: Any) -> Tensor:
    """The rows of these tokens as a text of one pass."""
    (rows,) = States(native, parts).run(Part(text, tokens, 0))
    return rows


def path(node: int) -> list[int]:
    """The nodes from the root to `node`."""
    return [node] if TREE[node] < 0 else [*path(TREE[node]), node]


def test_rows_are_near_the_oracle(native: NativeOps) -> None:
    for name, parts in BLOCKS.items():
        for dtype, rounding in ((torch.float32, 0.0), (torch.bfloat16, 2**-8)):  # rounded once
            text = inputs(parts, TEXT, dtype)
            want = torch.from_numpy(values_of(parts, *text))
            got = alone(native, parts, text, range(TEXT))
            assert got.dtype is dtype
            error = (got.double() - want).abs() - rounding * want.abs()
            assert error.amax() < 2e-5 * want.std(), (name, dtype, error.amax() / want.std())


def check_same_bits(one: NativeOps, other: NativeOps) -> None:
    """Two levels of a CPU have the same bits."""
    for name, parts in BLOCKS.items():
        text = inputs(parts, TEXT, torch.float32)
        assert torch.equal(*(alone(ops, parts, text, range(TEXT)) for ops in (one, other))), name


def test_a_text_in_pieces_has_the_bits_of_the_whole(native: NativeOps) -> None:
    for name, parts in BLOCKS.items():
        for dtype in (torch.float32, torch.bfloat16):
            text = inputs(parts, TEXT, dtype)
            whole = States(native, parts)
            (want,) = whole.run(Part(text, range(TEXT), 0))
            for size in (1, 2, 7):
                states = States(native, parts)
                made = [
                    states.run(Part(text, range(at, min(at + size, TEXT)), at))[0]
                    for at in range(0, TEXT, size)
                ]
                assert torch.equal(torch.cat(made), want), (name, dtype, size)
                same = states.memory.states_LSF[1, 0], whole.memory.states_LSF[1, 0]
                assert torch.equal(*same), (name, dtype, size)


def test_a_node_has_the_bits_of_its_path(native: NativeOps) -> None:
    """At once, level by level, and alone behind nodes that a pass before has computed."""
    levels = [[0], [1, 2], [3, 4, 5], [6, 7], [8]]
    for name, parts in BLOCKS.items():
        text = inputs(parts, TEXT, torch.float32)
        before, nodes = list(range(9)), list(range(20, 29))  # the nodes' inputs are those of rows 20 ..
        want = [alone(native, parts, text, [*before, *(nodes[n] for n in path(end))])[-1] for end in range(9)]
        at_once, by_level = States(native, parts), States(native, parts)
        (made,) = at_once.run(Part(text, [*before, *nodes], 0, parents=TREE))
        assert torch.equal(made[9:], torch.stack(want)), name
        by_level.run(Part(text, before, 0))
        for level in levels:
            given = [nodes[n] for n in level]
            part = Part(text, given, 9 + level[0], parents=TREE[: level[-1] + 1])
            (made,) = by_level.run(part)
            assert torch.equal(made, torch.stack([want[n] for n in level])), (name, level)
        ring = slice(0, 8)
        kept = [states.memory.rings_LRNF[1, 0, ring] for states in (at_once, by_level)]
        assert torch.equal(*kept), name
        for states, tail in ((at_once, [30]), (by_level, [30, 31, 32])):
            states.accept(0, 9, path(8)[1:])
            tokens = [*before, *(nodes[n] for n in path(8)), *tail]
            start = len(tokens) - len(tail)
            (made,) = states.run(Part(text, tail, start, parents=[-1] if len(tail) == 1 else None))
            assert torch.equal(made, alone(native, parts, text, tokens)[start:]), (name, tail)


def test_tree_after_tree(native: NativeOps) -> None:
    """The nodes of a tree take the places of the accepted ones, which are applied in the same pass."""
    for name, parts in BLOCKS.items():
        text, states = inputs(parts, TEXT, torch.float32), States(native, parts)
        accepted = [0, 1, 2]
        states.run(Part(text, accepted, 0))
        for first in (10, 16, 22, 28):  # the inputs of a tree of 5 nodes; 0, 2 and 4 are accepted
            tree = range(first, first + 5)
            (made,) = states.run(Part(text, tree, len(accepted), parents=[-1, 0, 0, 1, 2]))
            for node, own in enumerate(([0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4])):
                want = alone(native, parts, text, [*accepted, *(tree[n] for n in own)])[-1]
                assert torch.equal(made[node], want), (name, first, node)
            states.accept(0, len(accepted), [2, 4])
            accepted += [tree[n] for n in (0, 2, 4)]


def test_deep_trees_and_long_replays(native: NativeOps) -> None:
    for name in ("conv", "delta", "mamba"):
        parts = BLOCKS[name]
        text = inputs(parts, 70, torch.float32)
        want = alone(native, parts, text, range(70))
        states = States(native, parts)
        states.run(Part(text, range(2), 0))
        (made,) = states.run(Part(text, range(2, 68), 2, parents=range(-1, 65)))  # 65 levels
        assert torch.equal(made, want[2:68]), name
        (made,) = states.run(Part(text, [68, 69], 68))  # behind all of them
        assert torch.equal(made, want[68:]), name


def test_requests_do_not_see_one_another_nor_the_threads(native: NativeOps) -> None:
    threads = native.library.threads()
    try:
        for name, parts in BLOCKS.items():
            text, sick = inputs(parts, TEXT, torch.float32), inputs(parts, TEXT, torch.float32)
            for tensor in filter(lambda one: one is not None, sick):
                tensor[3:] = float("nan")
            want = alone(native, parts, text, range(20))
            for count in (1, 2):
                native.library.set_threads(count)
                states = States(native, parts)
                states.run(Part(text, range(5), 0, 0), Part(sick, range(6), 0, 1))
                ill, well, tree = states.run(
                    Part(sick, range(6, 12), 6, 1),
                    Part(text, range(5, 20), 5, 0),
                    Part(text, range(9), 0, 2, parents=TREE),
                )
                assert ill.isnan().all(), (name, count)
                assert torch.equal(well, want[5:]), (name, count)
                assert torch.equal(tree[:2], want[:2]), (name, count)
                # A slot that held what is not a number serves the next text.
                assert torch.equal(states.run(Part(text, range(4), 0, 1))[0], want[:4]), (name, count)
    finally:
        native.library.set_threads(threads)


def test_a_saved_state_is_that_of_the_shorter_text(native: NativeOps) -> None:
    for name, parts in BLOCKS.items():
        text = inputs(parts, TEXT, torch.float32)
        want, states = alone(native, parts, text, range(TEXT)), States(native, parts)
        states.run(Part(text, range(10), 0, saves=[(1, 3), (8, 4), (10, 5)]))
        for tokens, slot in ((1, 3), (8, 4), (10, 5)):
            shorter = States(native, parts)
            shorter.run(Part(text, range(tokens), 0))
            assert torch.equal(states.memory.states_LSF[1, slot], shorter.memory.states_LSF[1, 0]), (
                name,
                tokens,
            )
            (made,) = states.run(Part(text, range(tokens, TEXT), tokens, 2, source=slot))
            assert torch.equal(made, want[tokens:]), (name, tokens)


def test_pytorchs_blocks_make_the_rows_states_copies_and_rings_of_the_native_ones(native: NativeOps) -> None:
    for name, parts in BLOCKS.items():
        text = inputs(parts, TEXT, torch.float32)
        found = []
        for ops in (Ops(), native):
            states = States(ops, parts)  # type: ignore[arg-type]
            made = states.run(Part(text, [*range(9), *range(20, 29)], 0, parents=TREE, saves=[(4, 3)]))
            states.accept(0, 9, path(8)[1:])
            start = 9 + len(path(8))
            made += states.run(
                Part(text, [30, 31], start, parents=[-1]), Part(text, range(4, 9), 4, slot=1, source=3)
            )
            found.append([*made, states.memory.states_LSF[1, [0, 1, 3]], states.memory.rings_LRNF[1, 0, :8]])
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}")


def test_what_does_not_fit_is_refused(native: NativeOps) -> None:
    parts = BLOCKS["delta"]
    states, (made, gates) = States(native, parts), inputs(parts, 2, torch.float32)
    usual: dict[str, Any] = {"source": -1, "rows": 2, "parents": None}

    def rows(**changed: Any) -> StateRows:
        made = StateRows()
        made.add(**{**dict.fromkeys(("slot", "applied", "start", "first_row"), 0), **usual, **changed})
        return made

    twice = rows(rows=1)
    twice.add(slot=1, source=-1, applied=0, start=0, first_row=0, rows=1, parents=None)
    orphan, late, leaf = (rows(rows=3, parents=[-1, 0, 1]) for _ in range(3))
    orphan.visits[7] = 5
    late.requests[2] = 4
    leaf.visits[9] = 0
    for order, fault in (
        (rows(slot=3), "a slot that the states do not have"),
        (rows(source=6), "a slot that the states do not have"),
        (rows(rows=1), "rows that are not each visited once: 2 rows"),
        (rows(rows=3), "rows that are not each visited once"),
        (twice, "rows that are not each visited once"),
        (rows(applied=0, start=NODES + 1, source=0), "a place that the ring does not have"),
        (orphan, "visits that are not depth first"),
        (leaf, "visits that are not depth first"),
        (late, "requests whose visits do not follow one another"),
        (rows(saves=[(1, 6)]), "a copy of a state that its request does not reach"),
    ):
        tokens = [0, 1, 1] if order in (orphan, leaf, late) else [0, 1]
        with pytest.raises(ValueError, match=fault):
            native.recur(parts, made[tokens], gates[tokens], StatePass(states.memory, order))
    good = StatePass(states.memory, rows())
    for wrong, made_TC, gates_TG, fault in (
        (parts, made[:, 1:].contiguous(), gates, "x must be contiguous rows of"),
        (parts, made, None, "gates must be contiguous torch.float32"),
        (replace(parts, layer=2), made, gates, "states of 2 layers for layer 2"),
        (BLOCKS["delta, odd keys"], made, gates, "states must be contiguous"),
    ):
        with pytest.raises(ValueError, match=fault):
            native.recur(wrong, made_TC, gates_TG, good)
    assert states.memory.states_LSF.isnan().all(), "nothing was written"
