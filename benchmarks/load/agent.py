"""Measures how much of their prompts agents compute again, at any server with OpenAI's API.

    python -m benchmarks.load.agent http://127.0.0.1:8000 --agents 2

A scripted agent has a long system prompt, and turns of new text. One, two or ten of them ask in turns. Their
times to the first token, from the second turn on, are summed and divided by a lower bound. The bound is the
time of prompts with a turn's new text alone, behind the system prompt, which is in the cache. They attend to
less text than the agent's prompts, so the bound is not quite within reach. A pool for three of ten
agents is the server's option: `--kv-cache-memory`. A command can end the server or its engine in the middle:

    --restart 4 "kill -9 $(cat engine.pid)" --restart 8 "./stop; ./start &"
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from itertools import pairwise

from benchmarks.load.client import Answer, Client

_WORDS = ["file", "line", "test", "run", "read", "write", "error", "name", "value", "list", "call", "class"]
_ANSWER = 32  # tokens
_RUN = " ".join(random.choices(_WORDS, k=8))  # begins system prompts, as no run may find those of another
_RESTART = 600  # seconds until a server has to answer again
Turn = dict[str, str]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("url")
    options.add_argument("--agents", type=int, default=1, help="agents that ask in turns (default 1)")
    options.add_argument("--turns", type=int, default=12)
    options.add_argument("--system", type=int, default=3000, help="words of the system prompt")
    options.add_argument("--new", type=int, nargs=2, default=(200, 600), help="words of a turn, from and to")
    options.add_argument(
        "--restart",
        nargs=2,
        action="append",
        default=[],
        metavar=("TURN", "COMMAND"),
        help="run a shell command after this turn, and wait until the server answers; repeatable",
    )
    args = options.parse_args()
    if any(not turn.isdecimal() or not 0 < int(turn) < args.turns for turn, _ in args.restart):
        options.error(f"--restart: TURN has to be a number from 1 to {args.turns - 1}")
    print(asyncio.run(measure(args)))


async def measure(args: argparse.Namespace) -> str:
    """Return the figures of the agents, a line for the turns from one restart to the next."""
    scripts = [script(number, args) for number in range(args.agents)]
    talks = [texts[:1] for texts in scripts]
    restarts = {int(turn): command for turn, command in args.restart}
    asked: list[tuple[int, Answer]] = []  # with the turn
    least: list[tuple[int, Answer]] = []
    async with Client(args.url, 3600) as client:
        for turn in range(1, args.turns + 1):
            for talk, texts in zip(talks, scripts, strict=True):
                talk.append(texts[turn])
                answer = await ask(client, talk)
                asked.append((turn, answer))
                talk.append({"role": "assistant", "content": answer.text})
            if turn in restarts:
                await restart(client, restarts[turn])
        for texts in scripts:
            least += [(turn, await ask(client, [texts[0], texts[turn]])) for turn in range(1, args.turns + 1)]
    return "\n".join(
        f"{args.agents} agents, turns {first + 1} to {last}: "
        + figures(*([one for turn, one in answers if first < turn <= last] for answers in (asked, least)))
        for first, last in pairwise(sorted({1, *restarts, args.turns}))
    )


def figures(asked: Sequence[Answer], least: Sequence[Answer]) -> str:
    """Return the sums of answers, and of those to the new text alone."""
    seconds, bound = (sum(one.first_seconds for one in answers) for answers in (asked, least))
    computed, new = (
        sum(one.prompt_tokens - (one.cached_tokens or 0) for one in answers) for answers in (asked, least)
    )
    are_reported = all(one.cached_tokens is not None for one in [*asked, *least])
    tokens = f"{computed}, {new} for the new text alone" if are_reported else "not reported"
    return (
        f"{seconds:.2f} s to first tokens, {bound:.2f} s for the new text alone, "
        f"ratio {seconds / bound:.3f}; tokens computed: {tokens}"
    )


def script(number: int, args: argparse.Namespace) -> list[Turn]:
    """Return an agent's system prompt, and the new text of each turn."""
    chance = random.Random(number)
    sizes = [args.system, *(chance.randint(*args.new) for _ in range(args.turns))]
    texts = [" ".join(chance.choices(_WORDS, k=size)) for size in sizes]
    texts[0] = f"{_RUN} {texts[0]}"
    return [{"role": "user" if place else "system", "content": text} for place, text in enumerate(texts)]


async def ask(client: Client, talk: Sequence[Turn]) -> Answer:
    """Return an answer; raises SystemExit if there is none."""
    answer = await client.ask(talk, temperature=0, max_tokens=_ANSWER)
    if answer.error:
        raise SystemExit(f"a request failed: {answer.error}")
    return answer


async def restart(client: Client, command: str) -> None:
    """Run a command, and wait until a short prompt has an answer; raises SystemExit or TimeoutError."""
    process = await asyncio.create_subprocess_shell(command)
    if status := await process.wait():
        raise SystemExit(f"exit status {status}: {command}")
    async with asyncio.timeout(_RESTART):
        while (await client.ask([{"role": "user", "content": "Hello"}], max_tokens=1)).error:
            await asyncio.sleep(0.2)


if __name__ == "__main__":
    main()
