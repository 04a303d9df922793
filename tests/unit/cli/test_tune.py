"""`specinfer tune` from options to a head, in seconds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from specinfer.cli import cli
from specinfer.errors import DatasetError, TuneError
from specinfer.heads.checkpoint import HeadFolder
from specinfer.models.open_model import open_model
from tests.tiny_models import write_tiny_llama

pytestmark = pytest.mark.thorough

SMALL = "--dtype float32 --kv-cache-memory 16MB --max-context 64 --max-tokens 8 --raw"


def test_a_head_from_traffic_and_then_from_more_minutes(tmp_path: Path) -> None:
    target = write_tiny_llama(tmp_path / "target", num_layers=3, tokenizer=True)
    log = tmp_path / "traffic.jsonl"
    log.write_text("".join(json.dumps({"prompt_token_ids": [n, n + 1]}) + "\n" for n in range(20)) + "bad\n")
    out = tmp_path / "head"
    options = ["tune", "--model", str(target), "--out", str(out), "--traffic", str(log), *SMALL.split()]
    options += ["--vocabulary", "32", "--depth", "3", "--minutes"]
    mistyped = [option.replace("traffic.jsonl", "trafic.jsonl") for option in options]
    done = CliRunner().invoke(cli, [*mistyped, "0.01"])
    assert isinstance(done.exception, DatasetError)
    assert not out.exists(), "the folder is free for the corrected command"
    done = CliRunner().invoke(cli, [*options, "0.01"])
    assert done.exit_code == 0, done.output
    assert f"skipped: {log} line 21: not JSON" in done.output
    match = re.search(
        rf"{out}: .* held-out positions; it (pays|does not pay) on this machine "
        rf"\((.*) tokens/s expected with it, (.*) without: .* times\); .*--draft {out}",
        done.stdout,
    )
    assert match
    assert (match[1] == "pays") is (float(match[2]) > float(match[3]))
    assert "ms for one token" in done.stderr
    assert f"It {match[1]} on this machine" in (out / "README.md").read_text()
    head = HeadFolder(out, open_model(target).config)
    assert (head.config.depth, head.config.draft_vocab_size) == (3, 32)
    again = CliRunner().invoke(cli, [*options, "0.02", "--resume"])
    assert again.exit_code == 0, again.output


def test_prompts_and_traffic_are_one_too_many(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["tune", "--out", str(tmp_path), "--prompts", "a", "--traffic", "b"])
    assert isinstance(done.exception, TuneError)
    assert "both given" in str(done.exception)


def test_options_of_other_kinds_are_refused(tmp_path: Path) -> None:
    cases = {
        "vocabulary is 64 with kind ssm": ["--kind", "ssm", "--vocabulary", "64"],
        "layers is 5 with kind ssm; allowed: 1 to 4": ["--kind", "ssm", "--layers", "5"],
    }
    for words, options in cases.items():
        done = CliRunner().invoke(cli, ["tune", "--out", str(tmp_path / "out"), *options])
        assert isinstance(done.exception, TuneError)
        assert words in str(done.exception)
    assert not (tmp_path / "out").exists()
