"""specinfer's server with scripted answers: they call an agent's shell once, then say its output.

A small model does not follow the long prompts of agents. Requests, templates, call formats, streams and the
log are those of `specinfer serve`.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import uvicorn

from specinfer.request import Delta
from specinfer.serve.backend.work import Work
from specinfer.serve.config import ServeConfig, configure
from specinfer.serve.server import listen
from tests.scripted_server import FACTS, ScriptedBackend, byte_tokenizer, says, scripted_app

PROGRAM: Final = "from tests.clients.agent_server import main; main()"
COMMAND: Final = "echo specinfer-$((6*7))"  # its output is not in the prompt unless it ran
PRINTED: Final = "specinfer-42"
_SHELLS: Final = ("bash", "shell", "exec_command", "shell_command", "run_shell_command", "execute_command")
_PIECE: Final = 7  # characters of a delta
# In the format of Hermes.
_TEMPLATE: Final = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class AgentBackend(ScriptedBackend):
    """Answers with a call of the shell that the prompt offers, and with its output once the prompt has it."""

    def __init__(self) -> None:
        super().__init__([])

    async def generate(self, works: Sequence[Work], session: str = "") -> AsyncGenerator[Delta]:
        for work in works:
            text = answer(bytes(work.prompt_token_ids).decode("utf-8", "replace"))
            for delta in says(*(text[at : at + _PIECE] for at in range(0, len(text), _PIECE))):
                yield replace(delta, id=work.id)


def answer(prompt: str) -> str:
    """Return the text of the next answer."""
    if PRINTED in prompt:
        return f"The shell printed {PRINTED}."
    found = re.match(r"<tools>(.*?)</tools><", prompt, re.DOTALL)
    tools = [tool["function"] for tool in json.loads(found[1])] if found else []
    shell = next((tool for tool in tools if tool["name"].lower() in _SHELLS), None)
    if shell is None or "<tool>" in prompt:
        return "There is no shell." if shell is None else "The shell printed something else."
    call = {"name": shell["name"], "arguments": arguments(shell["parameters"])}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that the schema of a shell takes, with the command among them."""
    given: dict[str, Any] = {}
    for name, form in schema["properties"].items():
        if name in ("command", "cmd"):
            given[name] = ["bash", "-lc", COMMAND] if form.get("type") == "array" else COMMAND
        elif name in schema.get("required", ()):
            given[name] = {"boolean": False, "number": 1, "integer": 1}.get(form.get("type"), "prints it")
    return given


def main() -> None:
    """Serve on a free port until SIGTERM."""
    configure("json", "info", "server")
    with tempfile.TemporaryDirectory() as folder, listen(ServeConfig(port=0)) as listener:
        facts = replace(FACTS, max_context=1 << 20, max_length=1 << 20)
        app = scripted_app(byte_tokenizer(Path(folder), _TEMPLATE), AgentBackend(), facts=facts)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        print(f"specinfer serves {url}", file=sys.stderr, flush=True)
        uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off")).run(sockets=[listener])
