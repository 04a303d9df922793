"""Options of the server (those of the engine are elsewhere), and the format of its log."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Final, Literal, Self

from specinfer.config import EngineConfig, SpecialTokens
from specinfer.errors import ConfigError
from specinfer.option import check_options, option, options_of
from specinfer.support import Feature

# Attributes that a log record may carry, given as `extra`.
_FIELDS: Final = ("request_id", "client", "method", "path", "status", "seconds")

ANY_HOST: Final = "*"  # any Host header, or any proxy
HOST_NAME: Final = re.compile(r"[0-9a-z._-]+", re.IGNORECASE)
_HEADER: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

_OF_ONE_MODEL: Final = ("served_model_name", "replicas", "cluster", "log_traffic")  # options
_OF_SEVERAL: Final = ("keep_alive",)
_STAYS: Final = "one model, which stays loaded; leave it out"

UnknownFields = Literal["error", "ignore"]


class JsonLines(logging.Formatter):
    """Formats each log record as one line of JSON."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a JSON object."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(form: str, level: str, process: str) -> None:
    """Write the log of this process to standard error, as `form` says, from `level` upward."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter(f"%(asctime)s %(levelname)s {process}: %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonLines(process) if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Options of the server: address, access, limits and log. Raises ConfigError."""

    host: str = option(
        "127.0.0.1", "Address to listen on; only this machine reaches the default.", of_batches=False
    )
    port: int = option(8000, "Port to listen on; 0 picks a free one.", of_batches=False)
    root_path: str = option("", "Path under which a reverse proxy serves this server.", of_batches=False)
    served_model_name: tuple[str, ...] = option(
        (), "Name of the model in requests; repeatable.", shown="MODEL, of a path its last part"
    )
    api_key: tuple[str, ...] = option(
        (),
        "Key that clients must send (Authorization: Bearer KEY); repeatable. Also: SPECINFER_API_KEY.",
        of_batches=False,
    )
    api_key_file: str | None = option(None, "File with more keys, one a line.", of_batches=False)
    cors_origin: tuple[str, ...] = option(
        (), "Origin of web pages that may call the server; repeatable.", of_batches=False
    )
    allowed_host: tuple[str, ...] = option(
        (),
        "Accepted name in the Host header, for example a proxy's; repeatable; * for any.",
        of_batches=False,
    )
    trusted_proxy: tuple[str, ...] = option(
        (),
        "Address or network of a proxy whose X-Forwarded-For is logged; repeatable; * for any.",
        of_batches=False,
    )
    page: bool = option(True, "Serve a chat page at /.", of_batches=False)

    replicas: int = option(
        1,
        "Number of engines; each is a process with an equal share of the cores.",
        more="Each engine option applies to every replica, `memory` and `kv_cache_memory` too.",
        minimum=1,
    )
    cluster: Literal["none", "ray"] = option(
        "none",
        "ray: replicas are actors of the Ray cluster of RAY_ADDRESS or of `ray start`.",
        more="Needs `specinfer[cluster]` ([replicas.md](replicas.md#several-machines-ray)).",
    )
    session_header: str = option(
        "x-session-id",
        "Requests with the same text in this header go to one replica.",
        rare=True,
        of_batches=False,
    )

    keep_alive: float = option(
        600.0,
        "Seconds after which an idle model is unloaded, if several are served; 0: never.",
        of_batches=False,
    )
    max_waiting: int = option(
        128, "Maximum of completions that wait for an engine; more get 429.", of_batches=False
    )
    max_n: int = option(16, "Maximum of completions of one prompt, and of prompts of one request.", minimum=1)
    max_body: int = option(16 << 20, "Maximum of bytes of one request, like 16MB.", minimum=1024, size=True)
    max_connections: int = option(
        512, "Maximum of open connections; more get 503.", minimum=1, of_batches=False
    )
    idle_timeout: float = option(
        75.0, "Seconds after which an idle connection is closed.", zero=False, of_batches=False
    )
    max_wait: float = option(
        0.0,
        "Seconds that a request may wait for its first step, then it gets 503. 0: no limit.",
        of_batches=False,
    )
    ping_interval: float = option(
        15.0,
        "Seconds after which a quiet stream sends a comment, so that proxies keep it open; 0: never.",
        rare=True,
        of_batches=False,
    )
    engine_timeout: float = option(
        120.0,
        "Seconds after which an engine that hangs is restarted; 0: never.",
    )
    grace: float = option(
        30.0, "Seconds that answers in progress may take after SIGTERM.", zero=False, of_batches=False
    )

    unknown_fields: UnknownFields = option(
        "ignore", "Unknown fields of requests: ignore logs each name once, error refuses the request."
    )
    stored_responses: int = option(
        256, "Number of answers kept for previous_response_id.", rare=True, of_batches=False
    )
    special_tokens_in_messages: SpecialTokens = option(
        "text", "Names of special tokens in messages of users and tools: read as text, or as the tokens."
    )
    reasoning_budget: int | None = option(
        None, "Maximum of tokens of thinking, for requests that give none.", minimum=0, shown="none"
    )
    call_format: str = option("auto", "Format of the model's tool calls; auto: the one of its chat template.")
    log_traffic: str | None = option(
        None, "File to log prompts and answers in, as training data for drafts.", shown="none"
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "Lowest level that is logged.")
    log_format: Literal["text", "json"] = option("text", "json: one object a line.")
    otlp_endpoint: str | None = option(None, "URL that receives OpenTelemetry spans.", shown="none")

    def __post_init__(self) -> None:
        check_options(self)
        for key in self.api_key:
            if not key.strip() or key != key.strip() or not key.isascii():
                raise ConfigError(
                    "an api_key is empty, not ASCII, or begins or ends with a blank; give another"
                )
        for name in self.allowed_host:
            if name != ANY_HOST and not (HOST_NAME.fullmatch(name) or _is(ip_address, name.strip("[]"))):
                raise ConfigError(
                    f"allowed_host has {name!r}; allowed: a name or an address, without a port, or *"
                )
        for address in self.trusted_proxy:
            if address != ANY_HOST and not _is(ip_network, address):
                raise ConfigError(
                    f"trusted_proxy has {address!r}; allowed: an address, a network like 10.0.0.0/8, or *"
                )
        if not _HEADER.fullmatch(self.session_header):
            raise ConfigError(
                f"session_header is {self.session_header!r}; allowed: the name of a header, like x-session-id"
            )
        path = self.root_path
        if path and (not path.startswith("/") or path.endswith("/") or not path.isascii()):
            raise ConfigError(f"root_path is {path!r}; allowed: an ASCII path like /that/path, or none")
        if self.port > 65535:
            raise ConfigError(f"port is {self.port}; allowed: 0 to 65535")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of a server: its names in requests, the default first, and its engine's options.

    Raises ConfigError if a name is that of an adapter, too.
    """

    names: tuple[str, ...]
    engine: EngineConfig

    def __post_init__(self) -> None:
        if both := self.engine.adapters.keys() & set(self.names):
            raise ConfigError(f"{min(both)!r} names both the model and an adapter; rename the adapter")

    @classmethod
    def of(cls, config: ServeConfig, engine: EngineConfig) -> Self:
        """Return the only model of a server, with its `served_model_name`.

        Raises ConfigError for an option of several models.
        """
        _refuse(config, _OF_SEVERAL, _STAYS)
        return cls(tuple(dict.fromkeys(config.served_model_name or (name_of(engine.model),))), engine)


def name_of(model: str) -> str:
    """Return a model's name in requests: a path's last part without .gguf, or another name as given."""
    path = os.path.abspath(os.path.expanduser(model))
    return os.path.basename(path).removesuffix(".gguf") or model if os.path.exists(path) else model


def check_several(config: ServeConfig, models: Sequence[ServedModel]) -> None:
    """Raise ConfigError if two of several models have one name, or an option is for a single model only."""
    _refuse(config, _OF_ONE_MODEL, "several models; leave it out, or start a server for each")
    if len(models) == 1:
        _refuse(config, _OF_SEVERAL, _STAYS)
    seen = set[str]()
    for model in models:
        engine = model.engine
        if engine.ranks > 1:
            raise ConfigError(
                f"{engine.features[Feature.RANKS]} with several models; allowed there: a process for each"
            )
        if engine.device not in ("auto", "cpu"):
            raise ConfigError(f"device is {engine.device!r} with several models; allowed there: cpu")
        for name in (*model.names, *engine.adapters):
            if name in seen:
                raise ConfigError(
                    f"two models have the name {name!r}; give one an `alias` in a --config file"
                )
            seen.add(name)


def _refuse(config: ServeConfig, names: Sequence[str], models: str) -> None:
    """Raise ConfigError if one of these options has not its default; it does not go with those `models`."""
    for one in options_of(ServeConfig):
        if one.name in names and (value := getattr(config, one.attribute)) != one.default:
            raise ConfigError(f"{one.name} is {value!r} with {models}")


def is_loopback(name: str) -> bool:
    """Return whether a name or an address is a loopback one."""
    try:
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:  # it is a name
        return False


def _is(kind: Callable[[str], object], text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True
