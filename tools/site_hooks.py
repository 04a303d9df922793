"""Hooks of MkDocs (mkdocs.yml): files outside docs/ that pages link to become pages of the site.

The Python reference shows classes with the comments of their fields, which are behind them or in lines above.

Pages are also read in the repository, so they link to results, examples and deployment files where these are.
Results are pages under results/; any other file is shown as source under source/.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import griffe

if TYPE_CHECKING:
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
RESULTS = "benchmarks/results"
LANGUAGES = {".py": "python", ".sh": "sh", ".yaml": "yaml", ".conf": "nginx", ".service": "ini"}


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each result, and one for each other file that a page links to."""
    from mkdocs.structure.files import File

    added: dict[str, str | Path] = {f"results/{path.name}": path for path in (ROOT / RESULTS).glob("*.md")}
    added["results/index.md"] = _contents()
    pages = [(file.src_uri, Path(file.abs_src_path or "")) for file in files.documentation_pages()]
    for uri, path in [*pages, *((uri, path) for uri, path in added.items() if isinstance(path, Path))]:
        for _, target, _, _ in LINK.findall(path.read_text(encoding="utf-8")):
            outside = _outside(target, _origin(uri))
            if outside is not None and (ROOT / outside).is_file() and not outside.startswith(RESULTS):
                added[_page_of(outside)] = _shown(ROOT / outside)
    for uri, source in added.items():
        content = {"abs_src_path": str(source)} if isinstance(source, Path) else {"content": source}
        files.append(File.generated(config, uri, **content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links that leave docs/ lead to the site's copies of these pages."""
    uri = page.file.src_uri
    here = _origin(uri)

    def turned(link: re.Match[str]) -> str:
        outside = _outside(link[2], here)
        if outside is None:
            return link[0]
        inside = posixpath.relpath(_page_of(outside), posixpath.dirname(uri) or ".")
        return f"{link[1]}{inside}{link[3] or ''}{link[4]}"

    return LINK.sub(turned, markdown)


def _origin(uri: str) -> str:
    """The file of a page, relative to the repository's root."""
    if uri.startswith("results/"):
        return f"{RESULTS}/{uri.removeprefix('results/')}"
    return uri.removeprefix("source/").removesuffix(".md") if uri.startswith("source/") else f"docs/{uri}"


def _outside(target: str, here: str) -> str | None:
    """The linked file, relative to the repository's root; None for a page of docs/ or an address."""
    if "://" in target or target.startswith(("mailto:", "/")):
        return None
    linked = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
    return None if linked.startswith("docs/") and here.startswith("docs/") else linked


def _page_of(linked: str) -> str:
    if linked.startswith("docs/"):
        return linked.removeprefix("docs/")
    if linked == RESULTS:
        return "results/index.md"
    if linked.startswith(f"{RESULTS}/"):
        return f"results/{linked.removeprefix(f'{RESULTS}/')}"
    return f"source/{linked}" if linked.endswith(".md") else f"source/{linked}.md"


def _shown(path: Path) -> str | Path:
    if path.suffix == ".md":
        return path
    name = os.path.relpath(path, ROOT)
    return f"# {name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text(encoding='utf-8')}````\n"


def _contents() -> str:
    """A list of the results, newest first."""
    rows = []
    for path in (ROOT / RESULTS).glob("*.md"):
        [date] = re.findall(r"\d{4}-\d\d-\d\d", path.stem)[-1:] or [""]
        title = path.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ")
        rows.append((date, f"| {date} | [{title}]({path.name}) |"))
    lines = [row for _, row in sorted(rows, reverse=True)]
    return "\n".join(["# Results", "", "| date | page |", "|---|---|", *lines]) + "\n"


class FieldComments(griffe.Extension):
    """Adds a list of the commented public fields to the docstring of each class."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Mutates the docstring of `cls`, whose members are complete."""
        fields = [one for one in cls.members.values() if one.is_attribute and not one.name.startswith("_")]
        found = {one.name: _comment(one).replace("<", "&lt;") for one in fields}
        rows = [f"- `{name}`: {comment}" for name, comment in found.items() if comment]
        if rows and cls.docstring is not None:
            cls.docstring.value += "\n\n" + "\n".join(rows)


def _comment(field: griffe.Object | griffe.Alias) -> str:
    """Return the comment behind a field, else the one above it; empty: there is none."""
    lines = field.lines_collection[field.filepath]
    first, last = field.lineno or 1, field.endlineno or 1
    if behind := lines[last - 1].partition("  # ")[2]:
        return behind
    above: list[str] = []
    while first > 1 and lines[first - 2].lstrip().startswith("# "):
        first -= 1
        above.insert(0, lines[first - 1].strip().removeprefix("# "))
    return " ".join(above)
