"""A server without a model, whose backend answers with scripts, with trees if traced."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette

from specinfer.config import EngineConfig
from specinfer.engine.steps import Statistics
from specinfer.request import Delta, FinishReason, Logprob, SpeculationFigures
from specinfer.serve.api.service import Service
from specinfer.serve.app import build_app
from specinfer.serve.backend.work import EngineInfo, Health, Observe, Work
from specinfer.serve.config import ServeConfig, ServedModel
from specinfer.serve.dialect.dialect import Dialect
from specinfer.serve.http.access import Keys
from specinfer.serve.model_pool import ModelPool
from specinfer.serve.observe.metrics import Metrics
from specinfer.serve.server import listen
from specinfer.speculation_config import SpeculationConfig
from specinfer.tokenizer import Tokenizer
from tests.tiny_models import write_byte_tokenizer

MODEL: Final = "scripted"
# Each message on its own line, so that a prompt shows its messages.
TEMPLATE: Final = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FACTS: Final = EngineInfo(
    max_context=100_000,
    max_length=100_000,
    speculators=("grammar", "prediction", "draft", "lookup"),
    speculation=SpeculationConfig(drafts=("small",), lookup=False, max_nodes=64),
)
_ACCEPTED: Final = (3, 0, 5, 1, 2)  # accepted tokens per step
_NAMES: Final = (["draft"], ["lookup"], ["draft", "lookup"], ["prediction"], ["grammar"])

# The answer to a work: an exception is raised, and None waits until the work is cancelled.
Script = Sequence[Delta | Exception | None]


class ScriptedBackend:
    """A Backend that gives each work the next script, and repeats the last one.

    Deltas get the id of the work; they keep their trees if the work is traced.
    """

    def __init__(self, *scripts: Script) -> None:
        self._scripts = list(scripts)
        self.works: list[Work] = []
        self.sessions: list[str] = []  # of each request
        self.gone: list[str] = []  # cancelled works

    async def generate(self, works: Sequence[Work], session: str = "") -> AsyncGenerator[Delta]:
        self.sessions.append(session)
        left = {work.id for work in works}
        try:
            for work in works:
                self.works.append(work)
                script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
                for delta in script:
                    if delta is None:
                        await asyncio.Event().wait()
                    elif isinstance(delta, Exception):
                        raise delta
                    else:
                        await asyncio.sleep(0)  # lets the server send pending output
                        yield replace(delta, id=work.id, trees=delta.trees if work.traced else ())
                left.discard(work.id)
        finally:
            self.abort(left)

    def abort(self, ids: Iterable[str]) -> None:
        self.gone += ids

    def cut(self, reason: str) -> int:
        raise AssertionError(f"no test ends a server in the middle of a script: {reason}")

    async def health(self) -> Health:
        return Health(Statistics())


def says(
    *texts: str, reason: FinishReason = FinishReason.STOP, logprobs: bool = False, **last: Any
) -> list[Delta]:
    """Return deltas with these texts, one token per byte; `last` has more fields of the last one."""
    deltas = []
    for text in texts:
        ids = tuple(text.encode())
        logged = tuple({token: Logprob(-0.5, 1, chr(token))} for token in ids) if logprobs else ()
        deltas.append(Delta("", text, ids, logged))
    ended = {"finish_reason": reason, "figures": SpeculationFigures(), **last}
    return [*deltas[:-1], replace(deltas[-1], **ended)]


def says_in_steps(text: str, *, nodes: int = 6, stops_after: int | None = None) -> list[Delta | None]:
    """Return deltas for steps of one to six tokens, with trees; with `stops_after` they stop after that
    step.
    """
    deltas: list[Delta | None] = []
    figures = SpeculationFigures()
    for number, (written, tree) in enumerate(steps_of(text, nodes=nodes)):
        if number == stops_after:
            return [*deltas, None]
        drafted, accepted = len(tree["token_ids"]) - 1, len(tree["path"])
        if number:
            figures.steps += 1
            figures.output_tokens += accepted + 1
            figures.drafted_tokens += drafted
            figures.accepted_tokens += accepted
        tokens = (*[tree["token_ids"][node] for node in tree["path"]], tree["next_token"])
        steps = ((drafted, accepted),) if number else ()
        deltas.append(Delta("", written, tokens, trees=(tree,), steps=steps))
    last = deltas[-1]
    assert last is not None
    return [*deltas[:-1], replace(last, finish_reason=FinishReason.STOP, figures=figures)]


def steps_of(text: str, *, nodes: int = 6) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a text in steps: the new text and a tree of about `nodes` nodes in the trace format."""
    words = re.findall(r"\s*[\w']+|\s*[^\w\s]|\s+", text)
    ids = {word: 100 + i for i, word in enumerate(dict.fromkeys(words))}
    before, at, number = "<assistant>", 0, 0
    while at < len(words):
        wanted = _ACCEPTED[(number - 1) % len(_ACCEPTED)] if number else 0
        written = words[at : at + wanted + 1]
        tree = _tree(before, written, number, nodes if number else 1)
        tree["token_ids"] = [ids.get(word, 10 + place) for place, word in enumerate(tree["texts"])]
        tree["next_token"] = ids[written[-1]]
        yield "".join(written), tree
        before, at, number = written[-1], at + len(written), number + 1


def _tree(root: str, written: list[str], step: int, nodes: int) -> dict[str, Any]:
    """Return a tree with the accepted path `said`, whose last token is the bonus token, and rejected
    nodes.
    """
    texts, parents, path = [root], [-1], list(range(1, len(written)))
    texts += written[:-1]
    parents += range(len(path))
    while len(texts) < nodes:
        parents.append(len(texts) // 2 if len(texts) % 3 else len(texts) - 1)
        texts.append(f" other{len(texts)}")
    return {
        **{"step": step + 1, "request_id": "scripted", "texts": texts, "parents": parents, "path": path},
        "proposed_by": [[], *(_NAMES[(step + node) % len(_NAMES)] for node in range(1, len(texts)))],
        "likelihoods": [1.0, *(round(0.9 / (1 + parents[node]), 6) for node in range(1, len(texts)))],
        "next_text": written[-1],
        "seconds": {"schedule": 0.0001, "propose": 0.004, "target_forward": 0.02, "verify": 0.001},
    }


def byte_tokenizer(folder: Path, template: str = TEMPLATE) -> Tokenizer:
    """Return a tokenizer with one token per byte and a chat template; writes its files to `folder`."""
    write_byte_tokenizer(folder, 256)
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.load(folder)


def scripted_app(
    tokenizer: Tokenizer, backend: ScriptedBackend, *, keys: Sequence[str] = (), **options: Any
) -> Starlette:
    """Return the server's application over that backend, with options of its service."""
    service = scripted_service(tokenizer, backend, **options)
    lora = tuple(f"{name}=folder" for name in service.adapters)
    served = ServedModel(service.models, EngineConfig(model=MODEL, lora=lora))
    return build_app(ModelPool.of(service, served), Keys(list(keys)))


def scripted_service(
    tokenizer: Tokenizer,
    backend: ScriptedBackend,
    observers: Sequence[Observe] = (),
    models: Sequence[str] = (MODEL,),
    sampling: Mapping[str, float] | None = None,
    adapters: Sequence[str] = (),
    facts: EngineInfo = FACTS,
    batch: int = 16,
    **options: Any,
) -> Service:
    """Return the application's service, with options of ServeConfig."""
    given: Any = {"models": models, "adapters": adapters, "batch": batch, "sampling": sampling}
    given |= {"observers": observers, "metrics": Metrics(MODEL)}
    return Service(ServeConfig(**options), backend, tokenizer, facts, Dialect.of(tokenizer), **given)


@dataclass(frozen=True)
class ScriptedServer:
    """The address and the backend of a running server."""

    url: str
    backend: ScriptedBackend


@contextmanager
def scripted_server(tokenizer: Tokenizer, *scripts: Script, **options: Any) -> Iterator[ScriptedServer]:
    """Run the application over a ScriptedBackend on a free local port."""
    backend = ScriptedBackend(*scripts)
    app = scripted_app(tokenizer, backend, **options)
    listener = listen(ServeConfig(port=0))
    listener.listen(16)  # earlier connections wait until the server runs
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        yield ScriptedServer(f"http://127.0.0.1:{listener.getsockname()[1]}", backend)
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
        listener.close()
