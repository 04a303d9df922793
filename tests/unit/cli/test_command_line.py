"""The command line: answers, one-line errors, exit statuses, help, and the page that has every flag."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from specinfer import LLM
from specinfer.cli import COMMANDS, GROUPS, cli
from specinfer.cli.tree_view import show_tree
from specinfer.engine.steps import TreeEvent
from specinfer.tree.token_tree import single_node
from specinfer.verify.coupled import Acceptance
from tests.unit.cli.conftest import Run

BAD: list[tuple[list[str], str]] = [
    (["-m", "smollm3", "hi"], "did you mean 'smollm2-135m'"),
    (["-m", "{models}/nothing.gguf", "hi"], "there is no file or folder"),
    ([""], "the prompt is empty"),
    (["x" * 100], "the prompt has 100 tokens; allowed: at most 63"),
    (["--temperature", "-1", "hi"], "temperature is -1.0; allowed: a finite number >= 0"),
    (["--quantization", "int3", "hi"], "'--quantization': 'int3' is not one of 'auto'"),
    (
        ["--draft-quantization", "int8", "hi"],
        "draft_quantization is for draft models, and none is named; add",
    ),
    (["--kv-cache-memory", "1KB", "hi"], "the KV cache needs at least"),
    (["--max-context", "9999", "hi"], "allowed: at most 64, the context of"),
    (["hi", "there"], "give one of them; put the prompt in quotes"),
    (["--memory", "8", "hi"], "memory is '8', which means bytes; write 8GB or 8MB"),
    (["--memory", "9MB", "hi"], "--memory (memory) is 9.00 MiB, and "),
    (["--warp", "9", "hi"], "--warp"),
    (["--file", "{models}/none.txt"], "cannot read the prompt from"),
    (["--file", "{models}/latin1.txt"], "not UTF-8 text at byte 3"),
    (["caf\udce9"], "the prompt is not UTF-8 text at byte 3"),
    (["--file", "{models}"], "Is a directory"),
    (["--file", "{models}/latin1.txt", "hi"], "give one of them"),
    (["--chat", "hi"], "no chat template"),
    (["--trace", "{models}/none/trace.jsonl", "hi"], "there is no folder"),
    (["--trace", "/dev/full", "--json", "hi"], "No space left on device"),
    (["--json", "--show-trees", "hi"], "give one of them"),
]


def test_bad_input_is_one_line_and_status_2(models: Path, run: Run) -> None:
    for arguments, says in BAD:
        filled = [a.format(models=models) for a in arguments]
        if "-m" not in filled:
            filled = ["-m", str(models / "target"), *filled]
        status, out, err = run("generate", *filled)
        assert (status, out, len(err.splitlines())) == (2, "", 1), (arguments, err)
        assert err.startswith("specinfer: error: "), arguments
        assert says in err, arguments


def test_generate_streams_the_text_and_reports_on_standard_error(models: Path, run: Run) -> None:
    sampled = ("--max-tokens", 12, "--temperature", 1, "--seed", 4)
    common = ["generate", "-m", models / "target", *sampled, "abcabc"]
    status, plain, err = run(*common, "--no-lookup")
    assert (status, "12 tokens" in err, "seed 4" in err) == (0, True, True), err
    assert "tokens per step" not in err
    guessing = ["--draft", models / "draft", "--lookup", "--tree-size", "fixed"]
    status, speculative, err = run(*common, *guessing)
    assert (status, speculative) == (0, plain)
    assert "tokens per step" in err
    assert "draft" in err


def test_generate_as_json_and_with_a_trace(models: Path, run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    arguments = ["-m", models / "target", "--draft", models / "draft", "--max-tokens", 9, "abcabc"]
    status, out, _ = run("generate", "--json", "--trace", trace, *arguments)
    answer: dict[str, Any] = json.loads(out)
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    assert status == 0
    assert (answer["finish_reason"], len(answer["token_ids"])) == ("length", 9)
    assert len(events) == answer["speculation"]["steps"] + 1  # the first token has a separate step
    assert sum(len(e["path"]) + 1 for e in events) >= 9
    assert all(sum(e["decision"]["probabilities"]) >= 1 for e in events)


def test_show_trees_draws_every_step(models: Path, run: Run) -> None:
    arguments = ["-m", models / "target", "--draft", models / "draft", "--max-tokens", 9, "abcabc"]
    status, out, _ = run("generate", "--show-trees", "--tree-size", "fixed", *arguments)
    assert (status, "step 1: no guesses" in out, "(draft)" in out) == (0, True, True), out
    assert "\x1b[" not in out  # no colour without a terminal


def test_a_prompt_on_standard_input(models: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    given = run("generate", "-m", models / "target", "--seed", 1, "--max-tokens", 5, "abc")[1]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"abc")))
    piped = run("generate", "-m", models / "target", "--seed", 1, "--max-tokens", 5)[1]
    assert piped == given


def test_a_mistyped_command_gets_a_suggestion(run: Run) -> None:
    status, _, err = run("serv")
    assert (status, err) == (2, "specinfer: error: there is no command 'serv'; did you mean 'serve'?\n")


def test_the_model_is_the_first_word_or_an_option(models: Path, run: Run) -> None:
    for words in ("serve", "chat", "bench", "check", "run-batch -i a -o b", "tune --out x", "generate hi"):
        name, *more = words.split()
        command = cli.get_command(click.Context(cli), name)
        for form in (["m.gguf", *more], ["--model", "m.gguf", *more], [*more, "-m", "m.gguf"]):
            given = command.make_context(name, list(form)).params
            assert given["model"] == "m.gguf", (words, form)
            assert given.get("prompt") == ("hi" if name == "generate" else None), (words, form)
        with pytest.raises(click.UsageError, match=r"give one of them|put the prompt in quotes"):
            command.make_context(name, ["a.gguf", *more, "--model", "b.gguf"])
    target, ends = models / "target", ("--max-tokens", 5, "--temperature", 0)
    forms = ((target, "abc"), ("-m", target, "abc"), ("abc", "-m", target))
    [answer] = {run("generate", *words, *ends)[1] for words in forms}
    assert answer


def test_a_draft_larger_than_its_target_is_said(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    LLM(str(models / "target"), drafts=[str(models / "target")]).close()
    assert "swap the two" not in caplog.text
    LLM(str(models / "target"), drafts=[str(models / "other")]).close()
    assert "more weights than its target and can only slow it down; swap the two" in caplog.text


def test_a_limit_of_addresses_is_one_line_that_says_so(models: Path) -> None:
    """The command says it, and so does the engine process of a server."""
    for words in (f"generate {models / 'target'} hi", f"serve {models / 'target'} --port 0"):
        command = f"ulimit -v 400000; {sys.executable} -m specinfer {words}; echo $?"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        errors = [line for line in done.stderr.splitlines() if " INFO " not in line]
        assert (done.stdout, len(errors)) == ("2\n", 1), done.stderr
        assert "error: the process may take 0.38 GiB of addresses (ulimit -v)" in errors[0]


def test_pull_lists_the_catalogue(run: Run) -> None:
    status, out, _ = run("pull", "--list")
    assert status == 0
    assert out.splitlines()[0].split() == ["name", "size", "licence", "file"]
    assert "smollm2-135m" in out
    status, _, err = run("pull")
    assert (status, err.count("\n")) == (2, 1)


def test_help_and_version_come_without_torch() -> None:
    code = (
        "import sys, runpy; sys.argv = ['specinfer', '--help']\n"
        "try: runpy.run_module('specinfer', run_name='__main__')\n"
        "except SystemExit as e: assert e.code == 0\n"
        "heavy = {'torch', 'numpy', 'transformers', 'huggingface_hub', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "generate" in done.stdout


def test_ctrl_c_ends_cleanly(models: Path, tmp_path: Path) -> None:
    # A short context cannot hold an endless answer, so the command waits for a prompt that never comes.
    prompt = tmp_path / "prompt"
    os.mkfifo(prompt)
    command = [sys.executable, "-m", "specinfer", "generate", "-m", str(models / "target"), "-f", str(prompt)]
    # Tests that run in the background (`make test &`) ignore SIGINT, and their children would inherit that.
    files: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    files["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    # `open` blocks until the command opens the other end, to read.
    with subprocess.Popen(command, **files) as process, prompt.open("w"):
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "\n")


def shell(models: Path, command: str, **environment: str) -> tuple[str, str]:
    """Standard output and standard error of a command line in bash; $generate answers 40 tokens."""
    generate = f"{sys.executable} -m specinfer generate -m {models}/other --raw --max-tokens 40 --ignore-eos"
    variables = {**os.environ, "generate": generate, **environment}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, env=variables)
    return done.stdout, done.stderr


@pytest.mark.thorough
def test_a_closed_pipe_is_silent(models: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # before the command starts: a reader that ends later may have got all of the text
    command = [sys.executable, "-m", "specinfer", "generate", "-m", f"{models}/other", "--raw", "hi"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.stderr == ""


@pytest.mark.thorough
def test_a_full_disk_is_one_line(models: Path) -> None:
    out, err = shell(models, "$generate hi > /dev/full; echo status $?")
    assert (out, err) == ("status 2\n", "specinfer: error: No space left on device\n")


@pytest.mark.thorough
def test_a_terminal_that_lacks_a_character_is_no_error(models: Path) -> None:
    command = "$generate --temperature 2 --seed 1 hi; echo; echo status $?"
    rich, _ = shell(models, command, PYTHONIOENCODING="utf-8")
    poor, err = shell(models, command, PYTHONIOENCODING="latin-1")
    assert "\ufffd" in rich
    assert poor == rich.replace("\ufffd", "?")
    assert "40 tokens" in err


def test_without_a_command_it_shows_five_lines_to_try(run: Run) -> None:
    status, out, err = run()
    assert (status, err, len(out.splitlines())) == (0, "", 5)
    for line in out.splitlines():
        assert line.split()[1] in {*COMMANDS, "--help"}


def test_no_colour_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> str:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", terminal := io.StringIO())
            patch.setattr(terminal, "isatty", lambda: True)
            show_tree(TreeEvent(1, "r", single_node(65), Acceptance((), 66)), chr)
            return terminal.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[36m\x1b[1m" in drawn()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in drawn()


def commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield f"{path}{name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")


PATHS = dict(commands(cli))


def test_every_command_is_in_the_list() -> None:
    text = CliRunner().invoke(cli, ["--help"], terminal_width=80).output
    for heading, named in GROUPS.items():
        assert f"{heading}:" in text
        assert all(name in text for name in named)


def test_every_flag_is_on_a_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference.md").read_text(encoding="utf-8")
    start, *found = re.split(r"^### (.+)$", page, flags=re.M)
    sections = dict(zip(found[::2], found[1::2], strict=True))
    purposes = dict(re.findall(r"^\| `(\w+)` \| .*? \| (.*) \|$", page, re.M))
    missing = []
    for path, command in {"": cli, **PATHS}.items():
        text = start + sections.get(path, "")
        text += sections["Flags of a request"] if "flags of a request" in text else ""
        for param in command.get_params(click.Context(command)):
            if not isinstance(param, click.Option):
                continue
            purpose = (param.help or "").partition("  [")[0]  # behind it is the default
            if purpose and purposes.get(param.name or "", "").startswith(purpose):
                continue  # an option of the engine or the server, with a row on their page
            names = (*param.opts, *param.secondary_opts)
            missing += [(path, name) for name in names if not re.search(rf"(?<!\w){name}\b", text)]
    assert missing == [], "run python tools/reference.py"
