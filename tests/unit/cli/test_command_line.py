"""The command line as a user meets it: answers, one-line errors, exit statuses."""

from __future__ import annotations

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

import pytest

from specinfer import LLM, SamplingParams, cli
from specinfer.cli.answering import Listener
from specinfer.engine.engine import Engine
from specinfer.engine.trace import TreeEvent
from specinfer.errors import IntegrityError
from specinfer.request import RequestOutput
from specinfer.runtime.cost_curve import CostCurve
from specinfer.tree.token_tree import single_node
from specinfer.verify.coupled import Acceptance
from tests.tiny_models import write_byte_tokenizer, write_similar_llama, write_tiny_llama


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models: target, draft, other (another vocabulary), empty, cut.gguf, text.gguf."""
    folder = tmp_path_factory.mktemp("models")
    target = write_tiny_llama(folder / "target", vocab_size=128, tokenizer=True, max_context=64)
    write_similar_llama(target, folder / "draft")
    write_tiny_llama(folder / "other", vocab_size=200, tokenizer=True)
    write_byte_tokenizer(folder / "other", 200)
    (folder / "empty").mkdir()
    (folder / "cut.gguf").write_bytes(b"GGUF\x03\0\0\0" + b"\x01" * 40)
    (folder / "text.gguf").write_text("a poem, not a model")
    (folder / "latin1.txt").write_bytes(b"caf\xe9")
    return folder


def write_template(folder: Path) -> None:
    """Give a model a chat template: every message on a line of its own."""
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of one command line, run in this process."""
    monkeypatch.setattr(sys, "argv", ["specinfer", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    captured = capsys.readouterr()
    assert isinstance(exit_.value.code, int)
    return exit_.value.code, captured.out, captured.err


BAD: dict[str, tuple[list[str], str]] = {
    "unknown model": (["-m", "smollm3", "hi"], "did you mean 'smollm2-135m'"),
    "no such path": (["-m", "{models}/nothing.gguf", "hi"], "there is no file or folder"),
    "folder without config": (["-m", "{models}/empty", "hi"], "it has no config.json"),
    "truncated GGUF": (["-m", "{models}/cut.gguf", "hi"], "cut short or damaged"),
    "not a GGUF": (["-m", "{models}/text.gguf", "hi"], "is not a GGUF file"),
    "draft tokens": (
        ["--draft", "{models}/draft", "--draft-tokens", "text", "hi"],
        "draft_tokens is 'text', and all drafts have the target's vocabulary; leave it out",
    ),
    "empty prompt": ([""], "the prompt is empty"),
    "prompt longer than the context": (["x" * 100], "the prompt has 100 tokens; allowed: at most 63"),
    "expansion": (["--expansion", "1,0,x", "hi"], "expansion is '1,0,x'; allowed: integers >= 1"),
    "expansion of zero": (["--expansion", "1,0", "hi"], "expansion is '1,0'"),
    "temperature": (["--temperature", "-1", "hi"], "temperature is -1.0; allowed: a finite number >= 0"),
    "temperature, nan": (["--temperature", "nan", "hi"], "temperature is nan"),
    "top_p 0": (["--top-p", "0", "hi"], "top_p is 0.0; allowed: a number in (0, 1]"),
    "top_p 1.5": (["--top-p", "1.5", "hi"], "top_p is 1.5"),
    "min_p": (["--min-p", "2", "hi"], "min_p is 2.0"),
    "max_tokens": (["--max-tokens", "-1", "hi"], "max_tokens is -1; allowed: an integer >= 0"),
    "min over max": (["--min-tokens", "9", "--max-tokens", "3", "hi"], "more than max_tokens (3)"),
    "expansion without a draft": (["--expansion", "2,2", "hi"], "--expansion is for draft models"),
    "draw without a draft": (["--draw", "top_k", "hi"], "--draw is for draft models"),
    "wrong pair": (["--verifier", "mss", "--draw", "coupled", "hi"], "would change the output law"),
    "verifier": (["--verifier", "luck", "hi"], "'luck' is not one of 'coupled', 'mss'"),
    "dtype": (["--dtype", "int3", "hi"], "'int3' is not one of 'auto', 'bfloat16'"),
    "quantization": (
        ["--quantization", "int3", "hi"],
        "'--quantization': 'int3' is not one of 'none'",
    ),
    "draft quantization without a draft": (
        ["--draft-quantization", "int8", "hi"],
        "--draft-quantization is for draft models, and none is named; add --draft MODEL",
    ),
    "memory": (["--kv-cache-memory", "much", "hi"], "size is 'much'"),
    "too little memory": (["--kv-cache-memory", "1KB", "hi"], "the KV cache needs at least"),
    "context": (["--max-context", "9999", "hi"], "has a context of 64"),
    "no such option": (["--warp", "9", "hi"], "No such option '--warp'"),
    "unreadable file": (["--file", "{models}/none.txt"], "cannot read the prompt from"),
    "file of another encoding": (["--file", "{models}/latin1.txt"], "not UTF-8 text at byte 3"),
    "prompt of another encoding": (["caf\udce9"], "the prompt is not UTF-8 text at byte 3"),
    "folder as a file": (["--file", "{models}"], "Is a directory"),
    "prompt twice": (["--file", "{models}/latin1.txt", "hi"], "give one of them"),
    "chat without a template": (["--chat", "hi"], "no chat template"),
    "trace": (["--trace", "{models}/none/trace.jsonl", "hi"], "cannot write the trace"),
    "trace to a full disk": (["--trace", "/dev/full", "--json", "hi"], "No space left on device"),
    "trees and JSON": (["--json", "--show-trees", "hi"], "give one of them"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_status_2(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    arguments, says = BAD[case]
    filled = [a.format(models=models) for a in arguments]
    if "-m" not in filled:
        filled = ["-m", str(models / "target"), *filled]
    status, out, err = run(monkeypatch, capsys, "generate", *filled)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("specinfer: error: ")
    assert says in err


def test_generate_streams_the_text_and_reports_on_standard_error(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [
        "generate",
        "-m",
        models / "target",
        "--max-tokens",
        12,
        "--temperature",
        1,
        "--seed",
        4,
        "abcabc",
    ]
    status, plain, err = run(monkeypatch, capsys, *common, "--no-ngram")
    assert status == 0
    assert "12 tokens" in err
    assert "tokens per step" not in err
    assert "seed 4" in err
    guessing = ["--draft", models / "draft", "--ngram", "--tree-size", "fixed"]
    status, speculative, err = run(monkeypatch, capsys, *common, *guessing)
    assert (status, speculative) == (0, plain)
    assert "tokens per step" in err
    assert "draft" in err


def test_generate_as_json_and_with_a_trace(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    arguments = ["-m", models / "target", "--draft", models / "draft", "--max-tokens", 9, "abcabc"]
    status, out, _ = run(monkeypatch, capsys, "generate", "--json", "--trace", trace, *arguments)
    answer: dict[str, Any] = json.loads(out)
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    assert status == 0
    assert (answer["finish_reason"], len(answer["token_ids"])) == ("length", 9)
    assert len(events) == answer["speculation"]["steps"] + 1  # the first token has a step of its own
    assert sum(len(e["path"]) + 1 for e in events) >= 9
    assert all(sum(e["decision"]["probabilities"]) >= 1 for e in events)


def test_show_trees_draws_every_step(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["-m", models / "target", "--draft", models / "draft", "--max-tokens", 9, "abcabc"]
    status, out, _ = run(monkeypatch, capsys, "generate", "--show-trees", "--tree-size", "fixed", *arguments)
    assert status == 0
    assert "step 1: no guesses" in out
    assert "(draft)" in out
    assert "\x1b[" not in out  # no colour where nobody sees it


def test_explain_says_of_each_step_who_guessed_and_why(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "-m", models / "target", "--draft", models / "draft", "--tree-size", "fixed"]
    arguments += ["--no-ngram", "--max-tokens", 9, "--explain", "--n", 2, "abcabc"]
    status, out, err = run(monkeypatch, capsys, *arguments)
    assert status == 0, err
    assert out.count("guessed (verified of drawn)") == 2
    assert re.search(r"draft (\d+) of \1\b", out), "trees of a fixed size are verified whole"
    assert "draft: no room" in out  # the text's last token
    assert "grammar, prediction: not for this request" in out
    status, out, _ = run(monkeypatch, capsys, *arguments, "--json")
    answers: list[dict[str, Any]] = json.loads(out)
    for answer in answers:
        steps = answer["steps"]
        assert len(steps) == answer["speculation"]["steps"] + 1
        assert sum(step["tokens"] for step in steps) == 9
        assert {turn["name"] for turn in steps[0]["speculators"]} == {"grammar", "prediction", "draft"}
        assert all(step["seconds"] > 0 and step["expected_tokens"] is None for step in steps)


EXPLAINED = re.compile(
    r"^ *(?P<step>\d+)   (draft (?P<verified>\d) of (?P<drawn>\d))? +(draft: (?P<reason>[a-z ]+?))?"
    r" +(?P<tokens>\d\.\d\d) +(?P<came>\d) +(?P<guesses>\d\.\d) +(?P<expected>\d+\.\d) +(?P<took>\d+\.\d) *$",
    re.MULTILINE,
)


def test_explain_says_what_was_expected_at_which_cost(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A target's pass takes 10 ms, and 1 ms for each row more; a draft's, which is asked for every row, 1 ms.
    of_target, of_draft = CostCurve((1, 101), (0.010, 0.110)), CostCurve((1, 101), (0.001, 0.001))
    monkeypatch.setattr(
        "specinfer.runtime.executor.cost_curve",
        lambda *_, every_row, **__: of_draft if every_row else of_target,
    )
    arguments = ["generate", "-m", models / "target", "--draft", models / "draft", "--clock", "curve"]
    arguments += ["--no-ngram", "--temperature", 0, "--max-tokens", 30, "--explain", "abcabc"]
    status, out, err = run(monkeypatch, capsys, *arguments)
    assert status == 0, err
    rows = [row.groupdict() for row in EXPLAINED.finditer(out)]
    assert [row["step"] for row in rows] == [str(1 + i) for i in range(len(rows))]
    assert {row["reason"] for row in rows} == {None, "no room", "plain step"}
    total = out.splitlines()[-1]
    tokens, expected, taken = re.match(  # type: ignore[union-attr]
        rf"{len(rows)} steps, 30 tokens; (\S+) expected; (\d+) ms expected, (\d+) ms taken; ", total
    ).groups()
    for column, said, rounding in (("tokens", tokens, 0.2), ("expected", expected, 2), ("took", taken, 2)):
        assert float(said) == pytest.approx(sum(float(row[column]) for row in rows), abs=rounding)
    status, out, _ = run(monkeypatch, capsys, *arguments, "--json")
    steps: list[dict[str, Any]] = json.loads(out)["steps"]
    for row, step in zip(rows, steps, strict=True):
        turn = step["speculators"][-1]
        assert (row["verified"] or "0", row["drawn"] or "0") == (str(turn["verified"]), str(turn["drawn"]))
        assert row["tokens"] == f"{step['expected_tokens']:.2f}"
        assert row["came"] == str(step["tokens"])
        assert row["guesses"] == f"{1e3 * step['guess_seconds']:.1f}"
        assert row["expected"] == f"{1e3 * step['expected_seconds']:.1f}"
        assert step["expected_tokens"] == pytest.approx(sum(step["probabilities"]), abs=1e-3)
        assert (step["probabilities"][0], len(step["probabilities"])) == (1.0, 1 + turn["verified"])
        assert 1e3 * step["guess_seconds"] == pytest.approx(turn["verified"] + turn["levels"])
        prompt = 5 if step["step"] == 1 else 0  # more rows than one
        assert 1e3 * step["expected_seconds"] == pytest.approx(10 + prompt + 1e3 * step["guess_seconds"])
    assert sum(step["speculators"][-1]["verified"] for step in steps) > 9


def test_a_prompt_on_standard_input(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = run(monkeypatch, capsys, "generate", "-m", models / "target", "--max-tokens", 5, "abc")[1]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"abc")))
    piped = run(monkeypatch, capsys, "generate", "-m", models / "target", "--max-tokens", 5)[1]
    assert piped == given


def test_chat_needs_a_template_and_says_what_else_to_use(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(monkeypatch, capsys, "chat", "-m", models / "target")
    assert status == 2
    assert "no chat template; use `specinfer generate --raw`" in err


def test_chat_remembers_and_obeys_its_commands(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_template(models / "draft")
    lines = iter(["ab", "/stats", "/trees on", "ab", "/reset", "/help", "x" * 60, "x" * 80, "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    asked: list[list[str]] = []
    stream_chat = LLM.stream_chat

    def listen(self: LLM, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[RequestOutput]:
        asked.append([message["role"] for message in messages])
        return stream_chat(self, messages, params)

    monkeypatch.setattr(LLM, "stream_chat", listen)
    chat = ["chat", "-m", models / "draft", "--max-tokens", 4, "--ignore-eos", "--system", "s"]
    status, out, err = run(monkeypatch, capsys, *chat)
    assert status == 0
    first = ["system", "user"]
    assert asked == [first, [*first, "assistant", "user"], first, [*first, "assistant", "user"]]
    assert "4 tokens" in err
    assert "[cut at 4 tokens; --max-tokens allows more]" in err
    assert "[the context of 64 tokens is full; /reset starts anew]" in err  # the long question left no room
    assert "trees are on" in err
    assert "step " in out
    assert "the conversation is forgotten" in err
    assert "or /reset to start anew" in err  # the question that did not fit


def test_ctrl_c_stops_an_answer_and_not_the_conversation(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_template(models / "draft")
    lines = iter(["ab", "cd"])

    def ask(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError  # Ctrl-D
        return line

    steps = iter([False, False, True])  # the third step is interrupted, the later ones are not
    step = Engine.step

    def interrupted(self: Engine) -> list[RequestOutput]:
        if next(steps, False):
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr(Engine, "step", interrupted)
    chat = ["chat", "-m", models / "draft", "--max-tokens", 4, "--ignore-eos", "--no-ngram"]
    status, out, err = run(monkeypatch, capsys, *chat)
    assert status == 0
    first, rest = out.split(" [stopped]\n")
    assert first
    assert rest.strip("\n")
    assert "Traceback" not in err


def test_a_mistyped_command_is_told_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(monkeypatch, capsys, "serv")
    assert (status, err) == (2, "specinfer: error: there is no command 'serv'; did you mean 'serve'?\n")


def test_pull_lists_the_catalogue(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(monkeypatch, capsys, "pull", "--list")
    assert status == 0
    assert out.splitlines()[0].split() == ["name", "size", "licence", "file"]
    assert "smollm2-135m" in out
    status, _, err = run(monkeypatch, capsys, "pull")
    assert (status, err.count("\n")) == (2, 1)


def test_an_internal_error_says_so(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: Engine) -> None:
        raise IntegrityError("two and two make five")

    monkeypatch.setattr(Engine, "step", broken)
    status, _, err = run(monkeypatch, capsys, "generate", "-m", models / "target", "hi")
    assert (status, len(err.splitlines())) == (70, 1)
    assert "internal error: two and two make five; please report it" in err


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
    with (
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process,
        prompt.open("w"),
    ):  # which blocks until the command opens the other end, to read
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert (out, err) == ("", "\n")


def shell(models: Path, command: str, **environment: str) -> tuple[str, str]:
    """Standard output and standard error of a command line in bash; $generate answers 40 tokens."""
    generate = f"{sys.executable} -m specinfer generate -m {models}/other --raw --max-tokens 40 --ignore-eos"
    variables = {**os.environ, "generate": generate, **environment}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, env=variables)
    return done.stdout, done.stderr


@pytest.mark.thorough
def test_a_closed_pipe_is_silent(models: Path) -> None:
    out, err = shell(models, "$generate --show-trees --temperature 2 --seed 1 hi | head -n 1")
    assert (out, err) == ("step 1: no guesses\n", "")


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


def test_without_a_command_it_shows_the_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(monkeypatch, capsys)
    assert (status, err) == (0, "")
    assert re.search(r"\n  generate +Answer a prompt\.\n", out)


def test_no_colour_where_the_user_wants_none(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    event = TreeEvent(1, "r", single_node(65), Acceptance((), 66))
    llm = LLM(str(models / "target"))

    def drawn() -> str:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", terminal := io.StringIO())
            patch.setattr(terminal, "isatty", lambda: True)
            Listener(llm, show=True, trace=None)
            assert llm.on_tree is not None
            llm.on_tree(event)
            return terminal.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[36;1m" in drawn()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in drawn()
