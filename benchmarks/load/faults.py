"""Runs users against a server with OpenAI's API while a command breaks it, and compares every text.

    python -m benchmarks.load.faults http://127.0.0.1:8000 --dataset alpaca.jsonl --users 16 --minutes 10 \\
        --fault 'kill -9 $(pgrep -f engine_process | shuf -n 1)'

Every user holds conversations of two turns; each is a session, and each answer has its own parameters and
seed. Afterwards the script sends all requests again without faults: a lost or repeated token gives another
text. Other commands replace the engines (`kill -USR1 PID` of the server) or stop a rank (`kill -STOP PID`).
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.load.client import Answer, Client, Messages
from benchmarks.study import natural, parser
from specinfer.report.dataset import read_dataset

_LAWS: Final[Sequence[Mapping[str, Any]]] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 1.0, "top_k": 0},
    {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
)
_MORE: Final = {"role": "user", "content": "Say more about the last part."}  # the second turn
_Asked = tuple[Messages, Mapping[str, Any], Answer]  # with the parameters


def main() -> None:
    options = parser(__doc__)
    options.add_argument("url")
    options.add_argument("--dataset", type=Path, required=True, metavar="FILE.jsonl")
    options.add_argument("--users", type=natural, default=16, help="that stream at once (default 16)")
    options.add_argument("--minutes", type=float, default=5.0, help="of load (default 5)")
    options.add_argument("--max-tokens", type=natural, default=64, help="of each answer (default 64)")
    options.add_argument("--fault", metavar="COMMAND", help="run again and again (default: none)")
    options.add_argument("--every", type=float, default=6.0, metavar="SECONDS", help="of faults (default 6)")
    print(asyncio.run(measure(options.parse_args())))


async def measure(args: argparse.Namespace) -> str:
    """Return the figures of the users' answers, and of the same requests without faults."""
    questions = [one.turns[0] for one in read_dataset(args.dataset).conversations]
    async with Client(args.url) as client:
        clock = asyncio.get_running_loop().time
        asked: list[_Asked] = []
        faults: list[float] = []
        numbers, begun = count(), clock()

        async def user() -> None:
            while clock() < begun + 60 * args.minutes:
                number = next(numbers)
                talk: list[Any] = [{"role": "user", "content": questions[number % len(questions)]}]
                for turn in range(2):
                    law = {**_LAWS[number % len(_LAWS)], "seed": 2 * number + turn}
                    law["max_tokens"] = args.max_tokens
                    answer = await client.ask(talk, {"X-Session-Id": f"talk {number}"}, **law)
                    asked.append((talk, law, answer))
                    talk = [*talk, {"role": "assistant", "content": answer.text}, _MORE]

        breaking = asyncio.create_task(break_it(args, faults))
        await asyncio.gather(*(user() for _ in range(args.users)))
        seconds = clock() - begun
        breaking.cancel()
        again: list[Answer] = []
        for first in range(0, len(asked), args.users):
            some = asked[first : first + args.users]
            again += await asyncio.gather(*(client.ask(talk, **law) for talk, law, _ in some))
    answers = [answer for *_, answer in asked]
    return (
        f"{len(answers)} requests, {len(faults)} faults, {sum(bool(one.error) for one in answers)} failed; "
        f"{differing(answers, again)} other texts without faults; "
        f"{sum(one.tokens for one in answers) / seconds:.1f} tokens/s; seconds without text at a fault, "
        f"median, 95th percentile and most: {gaps(answers, faults)}"
    )


async def break_it(args: argparse.Namespace, faults: list[float]) -> None:
    """Run the command every few seconds, and note the times."""
    while args.fault is not None:
        await asyncio.sleep(args.every)
        faults.append(asyncio.get_running_loop().time())
        await (await asyncio.create_subprocess_shell(args.fault)).wait()


def differing(answers: Sequence[Answer], again: Sequence[Answer]) -> int:
    """Return how many whole answers have another text now, or none."""
    pairs = zip(answers, again, strict=True)
    return sum(now.error != "" or one.text != now.text for one, now in pairs if not one.error)


def gaps(answers: Sequence[Answer], faults: Sequence[float]) -> str:
    """Return percentiles of the times between the chunks before and after a fault, over all streams."""
    spans = [pair for one in answers for pair in pairwise(one.arrivals)]
    found = [after - before for at in faults for before, after in spans if before <= at < after]
    return ", ".join(f"{one:.2f}" for one in np.percentile(found or [0.0], [50, 95, 100]))


if __name__ == "__main__":
    main()
