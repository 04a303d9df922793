"""The rules of tools/prose.py match only bad sentences, and the lines of problems are right."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import prose  # noqa: E402
from prose_rules import RULES, Rule  # noqa: E402

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.bad)
def test_a_rule_matches_its_bad_sentence_and_no_good_one(rule: Rule) -> None:
    assert rule.find(rule.bad)
    assert not [good for good in (other.good for other in RULES) if rule.find(good)]


def test_sentences_of_python_are_docstrings_comments_and_messages(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        '''"""A module. It has\ntwo sentences.\n\n    code is left out\n"""\n'''
        "x = 'no sentence for users'  # a comment\n"
        "# Two lines\n# of one.\n"
        "def f(y):\n    raise ValueError(f'got {y} here')\n"
    )
    found = [(one.line, one.text) for passage in prose.passages(path) for one in prose.sentences(passage)]
    assert sorted(found) == [
        (1, "A module."),
        (1, "It has two sentences."),
        (6, "a comment"),
        (7, "Two lines of one."),
        (10, "got CODE here"),
    ]


def test_the_repository_has_no_problems() -> None:
    assert prose.main(()) == 0
