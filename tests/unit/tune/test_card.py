"""Licence on a draft's card: that of the target's files, or none."""

from pathlib import Path
from typing import Any

from specinfer.hub.gguf_header import GgufHeader
from specinfer.hub.model_files import ModelFiles
from specinfer.tune.card import licence_of


def folder(path: Path, card: str | None) -> ModelFiles:
    if card is not None:
        (path / "README.md").write_text(card, encoding="utf-8")
    return ModelFiles("target", path, ())


def gguf(metadata: dict[str, Any]) -> ModelFiles:
    path = Path("target.gguf")
    return ModelFiles(path.name, path, (), GgufHeader(path, metadata, (), 0))


def test_of_a_folder_its_card_says_it(tmp_path: Path) -> None:
    for card, named in (
        (None, None),  # first, as the others write a card
        ("---\nlicense: apache-2.0\n---\n# A model", "apache-2.0"),
        ('---\r\ntags: [x]\r\nlicense: "mit"\r\n---\r\n', "mit"),
        ("---\nlicense: [mit]\n---\n", "mit"),
        ("---\nlicense: other\nlicense_name: llama3.2\nlicense_link: https://a.example/b\n---\n", "llama3.2"),
        *((f"---\nlicense:{nothing}\n---\n", None) for nothing in (" other", " unknown", "", " null", " ~")),
        ("---\nlicense: mit  # see LICENSE\n---\n", "mit"),
        ("---\nlicense: a" + 60_000 * " " + "b\n---\n", "a b"),  # and quickly
        ("---\ntags: [x]\n---\nlicense: mit\n---\n", None),  # text, and no front matter
        ("license: mit", None),
        ("", None),
    ):
        found = licence_of(folder(tmp_path, card))
        assert (None if found is None else found.name) == named, card
        assert found is None or found.source == "its model card"


def test_of_a_gguf_file_its_metadata_say_it() -> None:
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({"general.license": "apache-2.0"}, "apache-2.0"),
        ({"general.license": "other", "general.license.name": "qwen-research"}, "qwen-research"),
        *(({"general.license": nothing}, None) for nothing in ("other", 3, "  ")),
        ({}, None),
    ]
    for metadata, named in cases:
        found = licence_of(gguf(metadata))
        assert (None if found is None else found.name) == named, metadata
