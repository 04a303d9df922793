"""Measures how much of their prompts agents compute again, at any server with OpenAI's API.

    python -m benchmarks.load.agent http://127.0.0.1:8000 --agents 2

A scripted agent has a long system prompt, and turns of new text. One, two or ten of them ask in turns. Their
times to the first token, from the second turn on, are summed and divided by a lower bound. The bound is the
time of prompts with a turn's new text alone, behind the system prompt, which is in the cache. They attend to
less text than the agent's prompts, so the bound is not quite within reach. A pool for three of ten
agents is the server's option: `--kv-cache-memory`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from uuid import uuid4

from benchmarks.load.client import Answer, Client

_WORDS = ["file", "line", "test", "run", "read", "write", "error", "name", "value", "list", "call", "class"]
_ANSWER = 32  # tokens
_RUN = uuid4()  # no run finds the prompts of another
Turn = dict[str, str]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("url")
    options.add_argument("--agents", type=int, default=1, help="agents that ask in turns (default 1)")
    options.add_argument("--turns", type=int, default=12)
    options.add_argument("--system", type=int, default=3000, help="words of the system prompt")
    options.add_argument("--new", type=int, nargs=2, default=(200, 600), help="words of a turn, from and to")
    print(asyncio.run(measure(options.parse_args())))


async def measure(args: argparse.Namespace) -> str:
    """Return the figures of the agents, as a line."""
    scripts = [script(number, args) for number in range(args.agents)]
    talks = [texts[:1] for texts in scripts]
    asked: list[Answer] = []
    least: list[Answer] = []
    async with Client(args.url, 3600) as client:
        for turn in range(1, args.turns + 1):
            for talk, texts in zip(talks, scripts, strict=True):
                talk.append(texts[turn])
                asked.append(answer := await ask(client, talk, "agents"))
                talk.append({"role": "assistant", "content": answer.text})
        for texts in scripts:
            least += [await ask(client, [texts[0], text], "bound") for text in texts[1:]]
    later = asked[args.agents :], [one for i, one in enumerate(least) if i % args.turns]
    seconds, bound = (sum(one.first_seconds for one in answers) for answers in later)
    computed, new = (sum(one.prompt_tokens - one.cached_tokens for one in answers) for answers in later)
    return (
        f"{args.agents} agents: {seconds:.2f} s to first tokens, {bound:.2f} s for the new text alone, ratio "
        f"{seconds / bound:.3f}; {computed} tokens computed, {new} for the new text alone"
    )


def script(number: int, args: argparse.Namespace) -> list[Turn]:
    """Return an agent's system prompt, and the new text of each turn."""
    chance = random.Random(number)
    sizes = [args.system, *(chance.randint(*args.new) for _ in range(args.turns))]
    texts = [" ".join(chance.choices(_WORDS, k=size)) for size in sizes]
    return [{"role": "user" if place else "system", "content": text} for place, text in enumerate(texts)]


async def ask(client: Client, talk: Sequence[Turn], purpose: str) -> Answer:
    """Return an answer; `purpose` keeps the caches of agents and of the bound apart."""
    answer = await client.ask(talk, temperature=0, max_tokens=_ANSWER, cache_salt=f"{purpose} {_RUN}")
    if answer.error:
        raise SystemExit(f"a request failed: {answer.error}")
    return answer


if __name__ == "__main__":
    main()
