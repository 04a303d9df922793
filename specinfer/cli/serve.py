"""`specinfer serve`, an OpenAI-compatible server, and `specinfer run-batch`, which answers a file."""

from __future__ import annotations

import difflib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from specinfer.cli.options import DEFAULT_MODEL, DRAFT_ONLY, FILE, Command, engine_config, flags, model_named
from specinfer.config import ENGINE_OPTIONS, EngineConfig
from specinfer.errors import ConfigError
from specinfer.option import options_of, parse_size
from specinfer.serve.config import ServeConfig, ServedModel, check_several, name_of

if TYPE_CHECKING:
    from specinfer.serve.backend.engine_child import EngineChild

_KEY_VARIABLE: Final = "SPECINFER_API_KEY"
# A longer step delays requests that arrive during it; a shorter one slows prefill.
_STEP_TOKENS: Final = 128
_ENGINE: Final = [one for _, one in ENGINE_OPTIONS.values()]
_SERVER: Final = options_of(ServeConfig)
# Keys of vLLM's speculative_config by method, and the options that they set; None: no option.
_METHODS: Final[Mapping[str, Mapping[str, str | None]]] = {
    # prompt_lookup_max bounds the match length in vLLM; here longer matches always come first.
    "ngram": {"prompt_lookup_min": "lookup_min", "prompt_lookup_max": None},
    "suffix": {"suffix_decoding_max_tree_depth": "lookup_depth"},
    "draft_model": {"model": "drafts", "quantization": "draft_quantization"},
}
OPTIONS: Final = {one.name: one for one in (*_ENGINE, *_SERVER)}
_ALIAS: Final = replace(OPTIONS["served_model_name"], name="alias")


@click.command(cls=Command)
@model_named(None, several=True)
@click.option("--config", "file", type=FILE, metavar="FILE", help="Options in YAML; flags override it.")
@click.option("--speculative-config", metavar="JSON", help="vLLM's: method, model, num_speculative_tokens.")
@flags([*_ENGINE, *_SERVER])
def serve(model: str | None, models: tuple[str, ...], file: Path | None, **given: Any) -> None:
    """Serve MODEL (default: smollm2-135m) to OpenAI clients. Several models start at their first requests.

    MODEL is a folder, a GGUF file, a catalogue name or a hub name: org/name, org/name:Q4_K_M.
    """
    from specinfer.progress import ProgressBar

    if not given["api_key"] and (key := os.environ.get(_KEY_VARIABLE)) is not None:
        if not key:
            raise ConfigError(f"{_KEY_VARIABLE} is empty; allowed: a key. Set one, or unset the variable")
        given["api_key"] = (key,)
    config, served = served_models({"model": model, **given}, models, file)
    # The engine's process imports torch while this process imports the server.
    with nullcontext() if len(served) > 1 else _first_engine(config, served[0].engine) as child:
        with needs_serving():
            from specinfer.serve.server import serve as serve_forever
        printed = partial(_print_address, models=[one.names[0] for one in served], page=config.page)
        serve_forever(config, served, child, ProgressBar(), printed)


def _print_address(url: str, *, models: Sequence[str], page: bool) -> None:
    names = f"the model{'s' * (len(models) > 1)} {', '.join(map(repr, models))}"
    click.echo(f"specinfer serves {url}/v1 with {names} (Ctrl-C ends it)", err=True)
    if page:
        # A browser cannot open the wildcard address; the loopback address reaches the same server.
        local = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        click.echo(f"to chat with it, open {local}/", err=True)


@click.command(cls=Command)
@model_named(None)
@click.option(
    "-i", "--input-file", "source", type=FILE, required=True, metavar="FILE", help="Requests, one a line."
)
@click.option(
    "-o", "--output-file", "target", type=FILE, required=True, metavar="FILE", help="Answers, one a line."
)
@click.option(
    "--config", "file", type=FILE, metavar="FILE", help="Options in YAML, as of serve; flags override it."
)
@click.option("--speculative-config", metavar="JSON", help="vLLM's: method, model, num_speculative_tokens.")
@flags([*_ENGINE, *(one for one in _SERVER if one.about.of_batches)])
def run_batch(model: str | None, source: Path, target: Path, file: Path | None, **given: Any) -> None:
    """Answer the requests of a file with MODEL (default: smollm2-135m).

    A line of the input is {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}};
    the other urls are /v1/completions, /v1/responses and /v1/messages. The output has a line for each answer.
    The same command continues an interrupted run: it skips requests that the output file answers already.
    """
    if source.resolve() == target.resolve():
        raise ConfigError(f"the requests and the answers are both {source}; give two files")
    from specinfer.progress import ProgressBar

    options, config = configs({"model": model, **given}, file)
    if given["log_level"] is None and "log_level" not in (read_options(file) if file else {}):
        config = replace(config, log_level="warning")  # no log line for each request
    engine = _engine(options, config)
    with needs_serving():
        from specinfer.serve.batch_run import BatchAnswers, BatchInput
        from specinfer.serve.batch_run import run_batch as run
        from specinfer.serve.config import configure

    configure(config.log_format, config.log_level, "batch")
    requests = BatchInput(source, config.max_body)
    with BatchAnswers(target) as answers:
        earlier = len(answers)
        try:
            if any(True for _ in requests.left(answers)):
                with _first_engine(config, engine) as child:
                    run(config, engine, child, requests, answers, ProgressBar())
        finally:
            counts = f"{len(answers)} answers, {answers.refused} of them errors; {earlier} were there before"
            click.echo(f"{target} has {counts}", err=True)


def _engine(options: dict[str, Any], config: ServeConfig) -> EngineConfig:
    """The config of each engine; raises ConfigError for options that exclude each other."""
    engine = engine_config(options)
    if engine.master is not None and config.replicas > 1:
        raise ConfigError(
            f"replicas is {config.replicas} with master; each replica's processes are of this host: leave "
            "master out, or start a server for each"
        )
    if engine.master is not None and config.cluster != "none":
        raise ConfigError(
            f"cluster is {config.cluster} with master; an actor's ranks are processes of its node: leave "
            "one of them out"
        )
    if engine.device.startswith("cuda") and config.cluster != "none":
        raise ConfigError(
            f"cluster is {config.cluster} with device {engine.device!r}; actors are given CPUs alone: leave "
            "one of them out"
        )
    return engine


@contextmanager
def _first_engine(config: ServeConfig, engine: EngineConfig) -> Iterator[EngineChild]:
    """Run the process of the first replica, in a Ray cluster if the config has one."""
    from specinfer.serve.backend.engine_child import EngineChild

    cluster = None
    if config.cluster == "ray":
        from specinfer.serve.backend.cluster import Cluster

        cluster = Cluster(engine, config.replicas)
    with EngineChild((config.log_level, config.log_format), count=config.replicas, cluster=cluster) as child:
        yield child


@contextmanager
def needs_serving() -> Iterator[None]:
    """Context for imports of the server's dependencies; raises ConfigError if they are not installed."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed; this command needs it: pip install 'specinfer[serve]'"
        ) from None


def served_models(
    given: Mapping[str, Any], words: Sequence[str], file: Path | None
) -> tuple[ServeConfig, list[ServedModel]]:
    """The server's config, and its models: those of the command line, or the `models` of the file.

    Raises ConfigError.
    """
    listed = [] if file is None else read_options(file).get("models", [])
    if listed and given["model"] is not None:
        raise ConfigError(f"{file} has models, and the command line has {given['model']!r}; give one of them")
    if len(words) > 1:
        given, listed = {**given, "model": None}, [{"model": word} for word in words]
    if not listed:
        options, config = configs(given, file)
        return config, [ServedModel.of(config, _engine(options, config))]
    served, names = list[ServedModel](), Counter(name_of(one["model"]) for one in listed)
    for one in listed:
        _ALIAS.check(aliases := _several(one.pop("alias", ())))
        options, config = configs(given, file, one)
        name = name_of(one["model"])
        own = aliases or (name if names[name] == 1 else one["model"],)
        served.append(ServedModel(own, _engine(options, config)))
    check_several(config, served)
    return config, served


def configs(
    given: Mapping[str, Any], file: Path | None, own: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], ServeConfig]:
    """The engine's options and the server's config: flags override the file's keys, these the defaults.

    `own` are options of one of the file's `models`, which override those of all. Raises ConfigError.
    """
    options = {} if file is None else read_options(file)
    if options.pop("models", None) and own is None:
        raise ConfigError(f"{file} has models; allowed here: one `model`")
    options |= own or {}
    of_flags = {name: value for name, value in given.items() if value not in (None, ())}
    options["speculative_config"] = of_flags.pop("speculative_config", options.get("speculative_config"))
    if (vllm := options.pop("speculative_config")) is not None:
        options = speculative_config(vllm) | options
    if given.get("no_draft"):
        for name in ("drafts", *DRAFT_ONLY):
            options.pop(name, None)
    options |= of_flags
    of_server = {}
    for name, value in list(options.items()):
        one = OPTIONS.get(name)
        if one is not None and one.about.size and isinstance(value, str):
            options[name] = parse_size(name, value)
        if one in _SERVER:
            of_server[name] = _several(options.pop(name)) if one.is_list else options.pop(name)
    options.setdefault("model", DEFAULT_MODEL)
    batch = options.get("max_batch_size")
    step_tokens = max(_STEP_TOKENS, batch if isinstance(batch, int) else 0)
    options.setdefault(
        "max_step_tokens", "auto" if options.get("offload", "never") != "never" else step_tokens
    )
    return options, ServeConfig(**of_server)


def _several(value: Any) -> Any:
    """A list of the file as a tuple; a single text is a tuple of one."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def read_options(file: Path) -> dict[str, Any]:
    """The options of a YAML file, whose names have - or _; raises ConfigError."""
    import yaml

    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ConfigError(f"cannot read the options in {file}: {reason}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds {type(found).__name__}; allowed: options, like `port: 8000`")
    options = _checked(found, {"model", "models", *OPTIONS, "speculative_config"}, file)
    if "models" in options:
        if "model" in options:
            raise ConfigError(f"{file} has model and models; give one of them")
        options["models"] = _listed(options["models"], file)
    return options


def _listed(found: object, file: Path) -> list[dict[str, Any]]:
    """The options of each of the file's `models`, with its `alias`."""
    items = found if isinstance(found, list) else []
    several = [{"model": one} if isinstance(one, str) else one for one in items]
    if not several or not all(isinstance(one, dict) and isinstance(one.get("model"), str) for one in several):
        raise ConfigError(f"{file} has a wrong list of models; allowed: items like `- model: NAME`")
    known = {"model", "alias", "speculative_config", *(one.name for one in _ENGINE)} - {"memory"}
    return [_checked(one, known, file) for one in several]


def _checked(found: Mapping[Any, Any], known: set[str], file: Path) -> dict[str, Any]:
    """Options under their names, without null ones; raises ConfigError for one that is not known."""
    options: dict[str, Any] = {}
    for key, value in found.items():
        name = str(key).replace("-", "_")
        name = next((one.name for one in OPTIONS.values() if one.about.flag == name), name)
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see specinfer serve --help"
            raise ConfigError(f"{file} has the unknown option {key!r}; {hint}")
        if value is not None:
            options[name] = value
    return options


def speculative_config(value: object) -> dict[str, Any]:
    """vLLM's speculative_config, JSON text or a mapping, as options; raises ConfigError."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(f"speculative_config is not JSON: {error.msg} at {error.pos}") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"speculative_config is {value!r}; allowed: a mapping with a method")
    left = dict(value)
    method = left.pop("method", "draft_model" if "model" in left else None)
    tokens = left.pop("num_speculative_tokens", None)
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
        raise ConfigError(f"num_speculative_tokens is {tokens!r}; allowed: an integer >= 1")
    if not isinstance(method, str) or method not in _METHODS:
        raise ConfigError(f"speculative_config has method {method!r}; allowed here: {', '.join(_METHODS)}")
    names, options = _METHODS[method], dict[str, Any]()
    if method == "draft_model":
        if "model" not in left:
            raise ConfigError("speculative_config has method draft_model and no model; name the draft")
        if left.pop("draft_tensor_parallel_size", 1) != 1:
            raise ConfigError("draft_tensor_parallel_size is not 1; a draft runs in one process here")
        if tokens is not None:
            options["expansion"] = ",".join(["1"] * tokens)
    else:
        options["lookup"] = True
        if tokens is not None:
            options["lookup_depth"] = tokens
    for key, name in names.items():
        if key in left:
            value = left.pop(key)
            if name is not None:
                options[name] = value
    if left:
        raise ConfigError(
            f"speculative_config of method {method} has {', '.join(map(str, left))}; allowed: method, "
            f"num_speculative_tokens, {', '.join(names)}"
        )
    return options
