"""Files of requests, answered by the endpoints of the server, and the file of answers for a later run."""

import asyncio
import codecs
import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specinfer.errors import UserError
from specinfer.progress import NoProgress
from specinfer.serve.backend.work import BackendError
from specinfer.serve.batch_run import BatchAnswers, BatchInput, answer_all
from specinfer.tokenizer import Tokenizer
from tests.scripted_server import Script, ScriptedBackend, says, scripted_app
from tests.unit.serve import asked
from tests.unit.serve.asked import HI

CHAT = {"messages": HI}
BODIES = {f"/v1{path}": body for path, body in asked.BODIES.items()}


def ask(name: Any, url: str = "/v1/chat/completions", body: Any = None, **more: Any) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body or BODIES[url]} | more)


class Batch:
    """A folder with a file of requests and one of answers."""

    def __init__(self, folder: Path, *requests: str) -> None:
        self.source, self.target = folder / "in.jsonl", folder / "out.jsonl"
        self.source.write_text("".join(f"{line}\n" for line in requests))

    def run(self, tokenizer: Tokenizer, *scripts: Script, at_once: int = 4) -> ScriptedBackend:
        backend = ScriptedBackend(*scripts)
        self.answer(tokenizer, backend, at_once)
        return backend

    def answer(self, tokenizer: Tokenizer, backend: ScriptedBackend, at_once: int) -> None:
        async def run() -> None:
            app = scripted_app(tokenizer, backend)
            with BatchAnswers(self.target) as answers:
                asks = BatchInput(self.source, 1 << 20).left(answers)
                await answer_all(app, asks, answers, at_once, NoProgress())

        asyncio.run(run())

    @property
    def answers(self) -> list[dict[str, Any]]:
        return lines(self.target)

    @property
    def by_name(self) -> dict[str, dict[str, Any]]:
        found = {record["custom_id"]: record for record in self.answers}
        assert len(found) == len(self.answers)
        return found


def test_each_request_gets_the_answer_of_its_endpoint(tokenizer: Tokenizer, tmp_path: Path) -> None:
    batch = Batch(tmp_path, *(ask(url, url) for url in BODIES), "", ask("no method", method="POST"))
    batch.run(tokenizer, says("Hello"))
    found = batch.by_name
    assert set(found) == {*BODIES, "no method"}
    for record in found.values():
        assert (record["error"], record["response"]["status_code"]) == (None, 200)
        assert record["response"]["request_id"].startswith("req-")
    bodies = {name: record["response"]["body"] for name, record in found.items()}
    assert bodies["/v1/chat/completions"]["choices"][0]["message"]["content"] == "Hello"
    assert bodies["/v1/completions"]["choices"][0]["text"] == "Hello"
    assert bodies["/v1/responses"]["output"][0]["content"][0]["text"] == "Hello"
    assert bodies["/v1/messages"]["content"] == [{"type": "text", "text": "Hello"}]


def test_a_bad_line_costs_no_other_anything(tokenizer: Tokenizer, tmp_path: Path) -> None:
    cases: list[tuple[str, Any, str]] = [
        ("not JSON", None, "not JSON"),
        ("[1]", None, "the body"),
        ("{}", None, "custom_id"),
        (ask(3), None, "custom_id"),
        (ask("x", "/v1/embeddings", CHAT), "x", "url is '/v1/embeddings'; allowed: '/v1/chat/completions'"),
        (ask("x", method="GET"), "x", "method is 'GET'"),
        (ask("x", body=[1]), "x", "body: "),
        (ask("x", body=CHAT | {"stream": True}), "x", "body.stream is true"),
        (ask("good"), None, "custom_id is 'good', like that of line 1; rename it"),
        ("[" * 100_000, None, ""),
    ]
    for line, name, fault in cases:
        batch = Batch(tmp_path, ask("good"), line, ask("too"))
        batch.target.unlink(missing_ok=True)
        for _ in range(2):  # the second run finds nothing to do
            batch.run(tokenizer, says("Hello"))
            assert sorted(map(str, batch.by_name)) == sorted(["good", "too", str(name)]), line[:50]
            bad = batch.by_name[name]
            assert bad["response"] is None, line[:50]
            assert (bad["error"]["code"], bad["error"]["line"]) == ("invalid_line", 2), line[:50]
            assert fault in bad["error"]["message"], line[:50]


def test_a_byte_order_mark_is_no_part_of_the_first_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    batch = Batch(tmp_path, ask("a"), ask("b"))
    batch.source.write_bytes(codecs.BOM_UTF8 + batch.source.read_bytes())
    batch.run(tokenizer, says("Hello"))
    assert {name: record["error"] for name, record in batch.by_name.items()} == {"a": None, "b": None}


def test_refusals_are_written_like_the_endpoints_answer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    wrong = CHAT | {"temperature": -1}
    batch = Batch(tmp_path, ask("chat", body=wrong), ask("messages", "/v1/messages", wrong))
    batch.run(tokenizer, says("Hello"))
    chat, messages = (batch.by_name[name] for name in ("chat", "messages"))
    assert (chat["response"]["status_code"], chat["error"]["code"]) == (400, "invalid_request_error")
    assert chat["response"]["body"]["error"]["param"] == "temperature"
    assert messages["response"]["body"]["type"] == "error"
    assert messages["error"]["message"] == messages["response"]["body"]["error"]["message"]


def test_a_body_is_read_by_its_endpoint_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    body = CHAT | {"seed": None, "json_schema": {"properties": {"a": {"const": None, "maximum": 1.0}}}}
    batch = Batch(tmp_path, ask("a", body=body))
    with BatchAnswers(batch.target) as answers:
        [found] = BatchInput(batch.source, 1 << 20).left(answers)
    assert repr(found.request.body) == repr(body)


def test_a_run_continues_an_existing_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    batch = Batch(tmp_path, *(ask(str(i)) for i in range(4)))
    died: Sequence[Script] = [[BackendError("the engine died")] if i == 2 else says(str(i)) for i in range(4)]
    batch.run(tokenizer, *died, at_once=1)
    assert batch.by_name["2"]["response"]["status_code"] == 500
    first = {record["custom_id"]: record["id"] for record in batch.answers if record["custom_id"] != "2"}
    with batch.target.open("ab") as file:
        file.write(b'{"id": "batch_req_torn", "cust')
    Batch(tmp_path, *(ask(str(i)) for i in range(9)))
    again = batch.run(tokenizer, says("later"))
    assert len(again.works) == 6
    assert set(batch.by_name) == set(map(str, range(9)))
    assert first.items() <= {name: record["id"] for name, record in batch.by_name.items()}.items()


def test_the_number_of_concurrent_requests_is_limited(tokenizer: Tokenizer, tmp_path: Path) -> None:
    batch = Batch(tmp_path, *(ask(str(i)) for i in range(40)))
    most = 0

    class Counting(ScriptedBackend):
        busy = 0

        async def generate(self, works: Any, session: str = "") -> Any:
            nonlocal most
            self.busy += 1
            most = max(most, self.busy)
            try:
                async for delta in super().generate(works):
                    yield delta
            finally:
                self.busy -= 1

    batch.answer(tokenizer, Counting(says("a", "b", "c")), at_once=3)
    assert (most, len(batch.by_name)) == (3, 40)


def test_a_full_disk_ends_it(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        Batch(tmp_path, *(ask(str(i)) for i in range(5))).run(tokenizer, says("a"), at_once=3)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a file"):
        BatchInput(tmp_path / "nothing.jsonl", 1 << 20)


GOOD = {"status_code": 200, "request_id": "r", "body": {"text": "hi"}}
RESPONSE = {"code": "c", "message": "m"}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fill(path: Path) -> None:
    with BatchAnswers(path) as answers:
        answers.add("a", line=1, response=GOOD)
        answers.add("b", line=2, response=GOOD | {"status_code": 400}, error=RESPONSE)
        answers.add(None, line=3, error=RESPONSE)


def test_answers_are_lines_in_openais_shape(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    fill(path)
    found = lines(path)
    assert all(record.pop("id").startswith("batch_req_") for record in found)
    assert found == [
        {"custom_id": "a", "response": GOOD, "error": None},
        {"custom_id": "b", "response": GOOD | {"status_code": 400}, "error": RESPONSE | {"line": 2}},
        {"custom_id": None, "response": None, "error": RESPONSE | {"line": 3}},
    ]


def test_existing_answers_are_read_and_a_line_that_broke_off_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    fill(path)
    with BatchAnswers(path) as answers:  # the error without a name is found again
        assert (answers.names, len(answers), answers.refused) == ({"a", "b"}, 2, 1)
    whole = path.read_bytes()
    first = whole.splitlines(keepends=True)[0]
    for kept in (0, 1, 10, 18, 40, -1):
        path.write_bytes(whole + first[:kept])
        file = path.stat().st_ino
        with BatchAnswers(path) as answers:
            assert answers.names == {"a", "b"}, kept
            assert path.stat().st_ino == file, "it is cut in place, as the disk may be full"
            assert path.read_bytes() == whole, kept
            answers.add("c", line=4, response=GOOD)
        assert path.read_bytes().startswith(whole), kept
        assert [record["custom_id"] for record in lines(path)] == ["a", "b", "c"], kept


def test_failed_requests_are_repeated(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with BatchAnswers(path) as answers:
        answers.add("a", line=1, response=GOOD | {"status_code": 500}, error=RESPONSE)
        answers.add("b", line=2, response=GOOD)
        answers.add("c", line=3, response=GOOD | {"status_code": 429}, error=RESPONSE)
        answers.add(None, line=4, error=RESPONSE)
    os.chmod(path, 0o640)
    with BatchAnswers(path) as answers:
        assert (answers.names, answers.refused) == ({"b"}, 0)
        answers.add("a", line=1, response=GOOD)
    assert [record["custom_id"] for record in lines(path)] == ["b", "a"]
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_file_of_another_kind_is_unchanged(tmp_path: Path) -> None:
    path, number = tmp_path / "out.jsonl", '{"custom_id": 3, "response": null, "error": null}\n'
    for text in ("a poem\n", "{}\n", number, "a poem", "[" * 10_000 + "\n"):
        path.write_text(text)
        with pytest.raises(UserError, match=r"line 1 of .* is not the answer of a batch"):
            pytest.fail(f"{text[:50]!r} is read as {BatchAnswers(path)}")
        assert path.read_text() == text, text[:50]


def test_a_device_is_no_file_to_go_on_from() -> None:
    with pytest.raises(UserError, match="/dev/zero is not a regular file"):
        BatchAnswers(Path("/dev/zero"))


def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with BatchAnswers(path), pytest.raises(UserError, match="another run has"):
        BatchAnswers(path)
    with BatchAnswers(path):
        pass
