"""Aider, as people run it: a question about a file, and an edit of it, in a repository without a terminal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yaml
from zoo import MODEL, URL, check

FILE = Path("shapes.py")
BEFORE = "def area(width, height):\n    return width * height\n"
AFTER = BEFORE.replace("area", "surface")
# A small model does not follow aider's edit format by itself. The server enforces it: aider sends the
# `extra_body` of its model settings with each request.
FORM = r"shapes\.py\n```\ndef surface\(width, height\):\n    return (width \* height|height \* width)\n```\n"
PARAMS = {"max_tokens": 200, "extra_body": {"regex": FORM}}
SETTINGS = [{"name": f"openai/{MODEL}", "edit_format": "whole", "extra_params": PARAMS}]
QUIET = ("--no-check-update", "--analytics-disable", "--no-show-model-warnings", "--no-show-release-notes")
PLAIN = ("--no-git", "--yes-always", "--no-pretty", "--no-auto-lint", "--no-detect-urls")


def aider(message: str, *flags: str) -> str:
    """Run aider with a message about the file and return its output."""
    program = Path(sys.executable).with_name("aider")
    model = ("--model", f"openai/{MODEL}", "--openai-api-base", URL, "--openai-api-key", "unused")
    words = [str(program), *model, *QUIET, *PLAIN, *flags, "--message", message, str(FILE)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    print(done.stdout, done.stderr)
    return done.stdout


def answer(printed: str) -> str:
    """Extract the model's answer from aider's output."""
    return printed.partition("Added shapes.py to the chat.")[2].partition("Tokens:")[0].strip()


@check
def a_question_is_answered_whole_and_streamed() -> None:
    FILE.write_text(BEFORE)
    ask = ("--edit-format", "ask")
    streamed = aider("What does shapes.py compute?", *ask)
    whole = aider("What does shapes.py compute?", *ask, "--no-stream")
    assert answer(streamed) == answer(whole) != ""
    assert "Tokens:" in whole
    assert FILE.read_text() == BEFORE


@check
def a_file_is_edited() -> None:
    FILE.write_text(BEFORE)
    Path("settings.yml").write_text(yaml.safe_dump(SETTINGS))
    printed = aider("Rename area to surface.", "--model-settings-file", "settings.yml")
    assert "Applied edit to shapes.py" in printed
    assert FILE.read_text() in (AFTER, AFTER.replace("width * height", "height * width"))
