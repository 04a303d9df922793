"""Imports run one way, and what has to start quickly does not import torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import specinfer

PACKAGE = Path(specinfer.__file__).parent

# The floors of the house, from left to right: a module imports from floors to its left and from its own room.
ORDER: list[set[str]] = [
    {"version", "errors", "progress"},
    {"files", "option", "structured_output", "support", "tree"},
    {"speculation_config"},
    {"scheduler_config"},
    {"config", "hub"},
    {"tokenizer"},
    {"sampling_params", "grammar"},
    {"request", "processors"},
    {"plan", "verify"},
    {"attention"},
    {"kernels"},
    {"transport"},
    {"models", "report"},
    {"runtime"},
    {"parallel", "heads"},
    {"speculate.speculator", "speculate.decision"},
    {"speculate.lookups", "speculate.drafts", "speculate.policy"},
    {"speculate"},
    {"engine", "speculators"},
    {"llm"},
    {"check"},
    {"bench", "tune"},
    {"serve.config"},
    {"serve.http"},
    {"serve.backend", "serve.dialect"},
    {"serve.fields", "serve.observe"},
    {"serve.api"},
    {"serve"},
    {"cli"},
    {"__main__"},
]
LAZY_TABLE = "specinfer"  # the package's own __init__ names what it loads on demand, in no order

# These start without torch; a name stands for a module or for a package with all its modules.
WITHOUT_TORCH = (
    *(
        "errors",
        "files",
        "speculation_config",
        "support",
        "config",
        "structured_output",
        "sampling_params",
        "request",
    ),
    *("tokenizer", "hub", "progress", "tree", "grammar", "processors", "plan", "verify", "speculate.limits"),
    *("engine.scheduler", "engine.kv_blocks", "engine.transcript"),
    *("cli.cache", "cli.follow"),
    *("engine.admission", "engine.intake", "engine.loop", "engine.steps"),
    *("serve.dialect", "serve.backend.engine_child", "serve.backend.ledger", "serve.backend.replica_backend"),
    *("kernels.machine", "kernels.build", "kernels.library", "kernels.exchange"),
    *(
        "kernels.disk",
        "models.placement",
        "models.stream",
        "models.shard",
        "parallel.listener",
        "parallel.processes",
        "transport.link",
    ),
    "cli.bench",
)


@dataclass(frozen=True)
class Import:
    target: str  # a module, or a module and a name in it
    line: int


def imports_of(source: str) -> list[Import]:
    """Every import statement of a module, wherever it stands."""
    found: list[Import] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found += (Import(f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
    return found


def read_package() -> dict[str, list[Import]]:
    """The imports of every module of specinfer."""
    modules = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = [PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = imports_of(path.read_text(encoding="utf-8"))
    return modules


def room_of(module: str) -> tuple[int, str]:
    """The place in ORDER and the room; what is not a room of its own is in that of the folder around it."""
    parts = module.split(".")[1:]
    for count in range(len(parts), 0, -1):
        room = ".".join(parts[:count])
        for place, names in enumerate(ORDER):
            if room in names:
                return place, room
    raise AssertionError(f"{module} has no place in the import order of this test: give it one")


def foot_of(package: str) -> tuple[int, str]:
    """Return the lowest package: all modules load what their package's __init__ imports."""
    inside = [room_of(package), *(room_of(f"specinfer.{name}") for names in ORDER for name in names)]
    return min(one for one in inside if f"specinfer.{one[1]}.".startswith(f"{package}."))


def against_the_order(modules: dict[str, list[Import]]) -> list[str]:
    """The imports that run from left to right, as lines for a person."""
    found = []
    homes = {".".join(name.split(".")[:2]) for name in modules}
    packages = {name.rpartition(".")[0] for name in modules}
    for module, imports in modules.items():
        if module == LAZY_TABLE:
            continue
        for imported in imports:
            parts = imported.target.split(".")
            if parts[0] != "specinfer":
                continue
            where = f"{module}:{imported.line} imports {imported.target}"
            if ".".join(parts[:2]) not in homes - {"specinfer"}:
                # The package's __init__ is above all packages, so importing it is an upward import.
                found.append(f"{where}, the package or a name of it; name the module")
                continue
            own, room = foot_of(module) if module in packages else room_of(module)
            other, its = room_of(imported.target)
            if other > own:
                found.append(f"{where}, which is to its right")
            elif other == own and room != its:
                found.append(f"{where}, which is on its own floor")
    return found


def loaded_by(*modules: str) -> set[str]:
    """The modules that a process has loaded once it has imported these."""
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {*done.stdout.split()}


def test_imports_run_one_way() -> None:
    assert against_the_order(read_package()) == []


def test_every_room_is_there_and_all_rooms_of_a_folder_have_a_floor() -> None:
    modules, rooms = read_package(), {name for names in ORDER for name in names}
    assert {f"specinfer.{room}" for room in rooms} <= modules.keys()
    parted = {room.rpartition(".")[0] for room in rooms} - {""}
    within = {folder: {room for room in rooms if room.startswith(f"{folder}.")} for folder in parted}
    folders = {name.rpartition(".")[0].removeprefix("specinfer.") for name in modules}
    assert {one for one in folders if one.rpartition(".")[0] in parted} <= set().union(*within.values())


def test_what_starts_quickly_does_not_load_torch() -> None:
    quick, modules = {"specinfer", "specinfer.cli"}, read_package()
    for name in WITHOUT_TORCH:
        own = {module for module in modules if f"{module}.".startswith(f"specinfer.{name}.")}
        assert own, f"{name} is gone: mend WITHOUT_TORCH"
        quick |= own
    slow = {"torch", "transformers"} & loaded_by(*sorted(quick))
    assert slow == set(), "python -X importtime -c 'import ...' has the way to it"


def test_what_a_server_loads_before_it_starts_its_engines_process_is_little() -> None:
    loaded = loaded_by("specinfer.cli.serve", "specinfer.serve.backend.engine_child")
    assert {"numpy", "asyncio", "starlette"} & loaded == set(), "the process's own torch takes longest"
