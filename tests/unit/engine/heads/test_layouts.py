"""Heads in their authors' layouts guess in an engine what the same heads as plain modules would."""

from __future__ import annotations

from pathlib import Path

import pytest

from specinfer.engine.steps import TreeEvent
from specinfer.heads.block import BlockHead
from specinfer.heads.checkpoint import HeadFolder, load_head
from specinfer.heads.eagle import EagleHead
from specinfer.kernels.choice import choose_kernels, draft_kernels
from specinfer.models.open_model import open_model
from tests.engines import CPU, Tiny, engine_of, write_tiny
from tests.head_layouts import LAYOUTS, borrow, write_layout
from tests.published_configs import LAYERS
from tests.unit.engine.heads.head_engines import (
    PROMPTS,
    engine,
    hidden_states,
    is_as_likely,
    shaped,
    trees_after,
)


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deep")


@pytest.fixture(scope="module")
def deep(deep_folder: Path) -> Tiny:
    """With as many layers as the layouts' heads are for."""
    return write_tiny(deep_folder, num_layers=LAYERS)


def as_likely(
    tiny: Tiny, target: Path, written: Path, head: EagleHead | BlockHead
) -> tuple[list[bool], set[int]]:
    """If each tree of the head as it is read is the one of the head as it was made, and the trees' depths."""
    opened = open_model(target)
    borrow(head, opened)
    kernels = draft_kernels(choose_kernels("auto", CPU)[0])
    loaded = load_head(HeadFolder(written, opened.config, opened), tiny.target, kernels=kernels)
    events: list[TreeEvent] = []
    prompt = PROMPTS[0]
    with engine(tiny, loaded) as llm:
        engine_of(llm).listeners.on_tree = events.append
        (output,) = llm.generate([prompt], shaped(8))
    hidden_TND = hidden_states(tiny, [*prompt, *output.token_ids])
    found, depths = list[bool](), set[int]()
    for text, tree in trees_after(prompt, output, events):
        depths.update(tree.depths())
        if tree.num_nodes > 1:
            found.append(is_as_likely(head, text, hidden_TND, tree))
    return found, depths


@pytest.mark.few(4)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_guess_is_as_likely_as_the_module_says(
    name: str, deep: Tiny, deep_folder: Path, tmp_path: Path
) -> None:
    head = write_layout(LAYOUTS[name], tmp_path / "head")
    found, depths = as_likely(deep, deep_folder / "target", tmp_path / "head", head)
    assert depths == {0, 1, 2, 3}
    assert len(found) > 3
    assert all(found)
