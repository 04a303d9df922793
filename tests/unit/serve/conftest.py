import asyncio
import inspect
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from specinfer import LLM, SamplingParams
from specinfer.serve.backend import replica
from specinfer.tokenizer import Tokenizer
from tests import scripted_server
from tests.scripted_server import byte_tokenizer
from tests.served import Served
from tests.tiny_models import write_tiny_llama
from tests.unit.serve.backend.handles import Handle
from tests.unit.serve.backend.listeners import SEEDS, TOKENS
from tests.virtual_time import run_virtual

# Calls in the format of Hermes, and reasoning tags.
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking %}<think>{% endif %}{% endif %}"
)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine; in virtual time with the fixture of that name."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    run = run_virtual if "virtual" in pyfuncitem.fixturenames else asyncio.run
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="module")
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token per byte, and TEMPLATE of the test's module, or one with a message a line."""
    template = getattr(request.module, "TEMPLATE", scripted_server.TEMPLATE)
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), template)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokens are bytes, with a chat template."""
    path, sizes = tmp_path_factory.mktemp("served") / "tiny", {"vocab_size": 256, "max_context": 2048}
    made = write_tiny_llama(path, **sizes, eos_token_id=0, tokenizer=True)
    (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return made


# Tests count steps, so drafts must not come from earlier answers.
RARE = str(Path(__file__).with_name("rare.yaml"))
FLAGS = ("--dtype", "float32", "--kv-cache-memory", "16MB", "--tree-size", "fixed", "--config", RARE)


@pytest.fixture(scope="module")
def served(folder: Path, forked: None) -> Iterator[Served]:
    with Served(folder, *FLAGS, "--served-model-name", "tiny") as server:
        yield server


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0, timeout=120)


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port on which another socket listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.fixture
def virtual() -> None:
    """The test runs in virtual time; it must not wait for sockets."""


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch, virtual: None) -> list[Handle]:
    """The started engines, in order."""
    monkeypatch.setattr(replica, "EngineChild", Handle)
    monkeypatch.setattr(Handle, "made", [])
    return Handle.made


@pytest.fixture(scope="session")
def expected(folder: Path) -> list[str]:
    """The texts of all seeds, generated offline."""
    params = [SamplingParams(temperature=1, seed=s, max_tokens=TOKENS, ignore_eos=True) for s in SEEDS]
    with LLM(folder, lookup=False, dtype="float32", kv_cache_memory=1 << 24) as llm:
        return [output.text for output in llm.generate([f"{s}abc" for s in SEEDS], params)]
