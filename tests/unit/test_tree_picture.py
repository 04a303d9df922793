"""The moving picture of the README: frames, places and escapes of made-up steps."""

from __future__ import annotations

import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "tree_picture.py"))
SVG = "{http://www.w3.org/2000/svg}"
GUESSES = ("mid code", "mid code goodtext")  # classes of the nodes of concept pictures


def test_a_step_has_two_frames_and_its_tokens() -> None:
    step = TOOL["Step"](["<a>", " b", " &", " c"], [-1, 0, 0, 1], [1, 3], "\n")
    drawn = ElementTree.fromstring(TOOL["picture"]([step, TOOL["Step"](["\n"], [-1], [], "d")]))
    frames = [g for g in drawn.findall(f"{SVG}g") if g.get("class") == "frame"]
    assert len(frames) == 4
    words = [["".join(text.itertext()) for text in frame.iter(f"{SVG}text")] for frame in frames]
    assert "pass 1: 3 guesses" in words[0]
    assert '"<a>"' in words[0]
    assert "pass 1: 2 guesses accepted and one token of the model's own; 3 tokens so far" in words[1]
    assert words[1][0] == " b c"  # the text, whose second line is empty
    green = [
        ["".join(g.itertext()) for g in frame.iter(f"{SVG}g") if g.get("class") == "good"] for frame in frames
    ]
    assert green == [[], ['" b"', '" c"'], [], []]  # accepted guesses alone: the root is text already


def test_every_picture_of_the_pages_is_xml_with_a_title_and_colours_for_dark_pages() -> None:
    for path in (ROOT / "docs" / "images").glob("*.svg"):
        if path.stem.startswith(("concept", "trees")):
            text = path.read_text(encoding="utf-8")
            assert ElementTree.fromstring(text).find(f"{SVG}title") is not None
            assert "prefers-color-scheme: dark" in text


def test_the_pictures_of_the_concepts_show_one_tree() -> None:
    trees = []
    for name in ("tree", "verification"):
        drawn = ElementTree.fromstring((ROOT / "docs" / "images" / f"concept-{name}.svg").read_text("utf-8"))
        nodes = [text for text in drawn.iter(f"{SVG}text") if text.get("class") in GUESSES]
        by_column = sorted(nodes, key=lambda node: (float(node.get("x", 0)), float(node.get("y", 0))))
        trees.append([node.text for node in by_column])
    assert trees[0] == trees[1] == ["woke", "up", "from", ",", "and", "it"]
