"""Imports run one way, and what has to start quickly does not import torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
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
    {"serve.http"},
    {"serve.config"},
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
    *("serve.http.page_server", "cli.cache", "cli.follow"),
    *("engine.admission", "engine.intake", "engine.loop", "engine.steps"),
    *("serve.dialect", "serve.backend.engine_child", "serve.backend.ledger", "serve.backend.routing"),
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
    at_load: bool  # runs when the module is loaded: not in a function, not under TYPE_CHECKING


def imports_of(source: str, module: str, *, is_package: bool) -> list[Import]:
    """Every import statement of a module, wherever it stands."""
    package = module if is_package else module.rpartition(".")[0]

    def walk(node: ast.AST, at_load: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, at_load) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            home = ".".join([*base, *([node.module] if node.module else [])])
            yield from (Import(f"{home}.{alias.name}", node.lineno, at_load) for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                yield from walk(child, False)
            for child in node.orelse:
                yield from walk(child, at_load)
        else:
            deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from walk(child, at_load and not deferred)

    return list(walk(ast.parse(source), True))


def read_package() -> dict[str, list[Import]]:
    """The imports of every module of specinfer."""
    modules = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = [PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules[name] = imports_of(path.read_text(encoding="utf-8"), name, is_package=is_package)
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


def way_to(library: str, module: str, modules: dict[str, list[Import]]) -> list[str] | None:
    """The chain of modules by which loading `module` loads a library; None when it does not."""
    before: dict[str, str | None] = dict.fromkeys(loads(module, modules))
    todo = list(before)
    while todo:
        name = todo.pop()
        for imported in modules[name]:
            if not imported.at_load:
                continue
            if imported.target.split(".")[0] == library:
                chain: list[str] = []
                step: str | None = name
                while step is not None:
                    chain.append(step)
                    step = before[step]
                return [*reversed(chain), library]
            for loaded in loads(imported.target, modules):
                if loaded not in before:
                    before[loaded] = name
                    todo.append(loaded)
    return None


def loads(target: str, modules: dict[str, list[Import]]) -> list[str]:
    """Return specinfer's modules that importing `target` loads: its packages and itself."""
    parts = target.split(".")
    return [name for i in range(1, len(parts) + 1) if (name := ".".join(parts[:i])) in modules]


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
    modules = read_package()
    marked = {"specinfer", "specinfer.cli"} & set(modules)
    for name in WITHOUT_TORCH:
        own = {m for m in modules if f"{m}.".startswith(f"specinfer.{name}.")}
        assert own, f"{name} is gone: mend WITHOUT_TORCH"
        marked |= own
    ways = {name: way for name in sorted(marked) if (way := way_to("torch", name, modules))}
    assert ways == {}


def test_what_a_server_loads_before_it_starts_its_engines_process_is_little() -> None:
    modules = read_package()
    before = (
        "specinfer.cli.serve",
        "specinfer.serve.backend.engine_child",
    )  # the process's own torch takes longest
    assert [way_to(large, name, modules) for name in before for large in ("numpy", "asyncio", "fastapi")] == (
        [None] * 6
    )
