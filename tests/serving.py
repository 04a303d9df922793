"""A server over an engine that says what it is told to, for tests of what HTTP makes of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from specinfer.request import FinishReason, Logprob, SpeculationFigures
from specinfer.serve.access import Keys
from specinfer.serve.app import build_app
from specinfer.serve.backend import Health
from specinfer.serve.config import ServeConfig
from specinfer.serve.dialect import Dialect
from specinfer.serve.metrics import Metrics
from specinfer.serve.observer import Observer
from specinfer.serve.service import Service
from specinfer.serve.work import Delta, EngineFacts, EngineState, Work
from specinfer.tokenizer import Tokenizer
from tests.tiny_models import write_byte_tokenizer

MODEL = "tiny"
# Every message on a line of its own, so that a prompt shows which messages it is made of.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FACTS = EngineFacts(max_context=4096, longest=4096, pid=1)


def byte_tokenizer(folder: Path) -> Tokenizer:
    """One token per byte, and a chat template."""
    write_byte_tokenizer(folder, 256)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer.load(folder)


class ScriptedBackend:
    """Answers each work with the next list of its script; an exception there is raised."""

    def __init__(self, *answers: Sequence[Delta | Exception]) -> None:
        self.answers = list(answers)
        self.works: list[Work] = []

    async def generate(self, works: Sequence[Work]) -> AsyncGenerator[Delta]:
        for work in works:
            self.works.append(work)
            for delta in self.answers.pop(0):
                if isinstance(delta, Exception):
                    raise delta
                yield replace(delta, id=work.id)

    def abort(self, ids: Iterable[str]) -> None:
        pass

    async def health(self) -> Health:
        return Health(True, FACTS, EngineState())


def says(
    *texts: str, reason: FinishReason = FinishReason.STOP, logprobs: bool = False, **last: Any
) -> list[Delta]:
    """Deltas with these texts, a token per byte, the last one with the end and whatever else is given."""
    deltas = []
    for text in texts:
        ids = tuple(text.encode())
        told = tuple({token: Logprob(-0.5, 1, chr(token))} for token in ids) if logprobs else ()
        deltas.append(Delta("", text, ids, told))
    ended = replace(deltas[-1], finish_reason=reason, figures=SpeculationFigures(), **last)
    return [*deltas[:-1], ended]


def scripted_app(
    tokenizer: Tokenizer, backend: ScriptedBackend, observers: Sequence[Observer] = (), **options: Any
) -> FastAPI:
    """The server's application over that backend; options are of ServeConfig."""
    service = Service(
        ServeConfig(**options),
        backend,
        tokenizer,
        FACTS,
        Dialect.of(tokenizer),
        models=[MODEL],
        batch=4,
        metrics=Metrics(MODEL),
        observers=observers,
    )
    return build_app(service, Keys([]))


def http_client(app: FastAPI) -> httpx.AsyncClient:
    """A client whose requests go to the application itself."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server/v1")
