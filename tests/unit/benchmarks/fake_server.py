"""A server of OpenAI's API for tests, as a process: answers with the question backwards, a chunk a letter.

    python fake_server.py --port N [--guess] [--other-texts] [--mishap start|end]

With --guess it reports speculation. A mishap ends it as it starts, or when a third user comes.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.fake_openai_server import DONE, FakeServer, Received, Reply, chat, usage


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--port", type=int)
    options.add_argument("--mishap")
    options.add_argument("--guess", action="store_true")
    options.add_argument("--other-texts", action="store_true")
    args = options.parse_args()
    if args.mishap == "start":
        sys.exit("no such model")

    def answer(received: Received) -> Reply:
        question = received.body["messages"][-1]["content"]
        if args.mishap == "end" and question.startswith("Write the numbers from 2 "):
            os._exit(3)  # the third user warms up
        said = question[::-1] + ("!" if args.other_texts and question == "Question 1" else "")
        speculation = {"num_spec_steps": 4, "num_draft_tokens": 12, "num_accepted_draft_tokens": 6}
        last = usage(3, len(said), **(speculation if args.guess else {}))
        return Reply([*map(chat, said), chat("", "stop"), last, DONE])

    with FakeServer(answer, port=args.port):
        threading.Event().wait()


if __name__ == "__main__":
    main()
