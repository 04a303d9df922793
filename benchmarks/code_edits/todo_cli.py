"""A to-do list on the command line, kept in a JSON file."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from pathlib import Path

FILE = Path.home() / ".todo.json"


def load() -> list[dict]:
    if not FILE.exists():
        return []
    return json.loads(FILE.read_text(encoding="utf-8"))


def save(tasks: list[dict]) -> None:
    FILE.write_text(json.dumps(tasks, indent=2), encoding="utf-8")


def add(args: argparse.Namespace) -> int:
    tasks = load()
    number = max((task["id"] for task in tasks), default=0) + 1
    due = args.due.isoformat() if args.due else None
    tasks.append({"id": number, "text": " ".join(args.text), "due": due, "done": False})
    save(tasks)
    print(f"added {number}")
    return 0


def show(args: argparse.Namespace) -> int:
    tasks = [task for task in load() if args.all or not task["done"]]
    tasks.sort(key=lambda task: (task["due"] or "9999", task["id"]))
    for task in tasks:
        box = "x" if task["done"] else " "
        due = f"  (due {task['due']})" if task["due"] else ""
        print(f"{task['id']:>3} [{box}] {task['text']}{due}")
    if not tasks:
        print("nothing to do")
    return 0


def finish(args: argparse.Namespace) -> int:
    tasks = load()
    for task in tasks:
        if task["id"] == args.id:
            task["done"] = True
            save(tasks)
            return 0
    print(f"there is no task {args.id}", file=sys.stderr)
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)

    command = commands.add_parser("add", help="write down something to do")
    command.add_argument("text", nargs="+")
    command.add_argument("--due", type=date.fromisoformat, metavar="YYYY-MM-DD")
    command.set_defaults(run=add)

    command = commands.add_parser("list", help="show what is to do")
    command.add_argument("--all", action="store_true", help="finished tasks, too")
    command.set_defaults(run=show)

    command = commands.add_parser("done", help="mark a task as finished")
    command.add_argument("id", type=int)
    command.set_defaults(run=finish)

    args = parser.parse_args()
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
