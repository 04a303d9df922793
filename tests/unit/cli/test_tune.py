"""`specinfer tune` from options to a head, seconds long."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from specinfer.cli import cli
from specinfer.errors import TuneError
from specinfer.heads.checkpoint import HeadFolder
from specinfer.models.weights import open_model
from tests.tiny_models import write_tiny_llama

SMALL = (
    "--dtype",
    "float32",
    "--kv-cache-memory",
    "16MB",
    "--max-context",
    "64",
    "--max-tokens",
    "8",
    "--raw",
)


def test_a_head_from_traffic_and_then_from_more_minutes(tmp_path: Path) -> None:
    target = write_tiny_llama(tmp_path / "target", num_layers=3, tokenizer=True)
    log = tmp_path / "traffic.jsonl"
    log.write_text("".join(json.dumps({"prompt_token_ids": [n, n + 1]}) + "\n" for n in range(20)) + "bad\n")
    out = tmp_path / "head"
    options = ["tune", "--model", str(target), "--out", str(out), "--traffic", str(log), *SMALL]
    options += ["--vocabulary", "32", "--depth", "3", "--loss", "coupled", "--minutes"]
    done = CliRunner().invoke(cli, [*options, "0.01"])
    assert done.exit_code == 0, done.output
    assert f"skipped: {log} line 21: not JSON" in done.output
    assert f"use it with --draft {out}" in done.output
    head = HeadFolder(out, open_model(target).config)
    assert (head.config.depth, head.config.draft_vocab_size) == (3, 32)
    again = CliRunner().invoke(cli, [*options, "0.02", "--resume"])
    assert again.exit_code == 0, again.output


def test_prompts_and_traffic_are_one_too_many(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["tune", "--out", str(tmp_path), "--prompts", "a", "--traffic", "b"])
    assert isinstance(done.exception, TuneError)
    assert "both given" in str(done.exception)
