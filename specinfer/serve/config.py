"""ServeConfig: every option of the server that is not the engine's; and the form of its log."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from dataclasses import dataclass
from typing import Final, Literal

from specinfer.config import SpecialTokens
from specinfer.errors import ConfigError
from specinfer.option import check_options, option
from specinfer.serve.http.hosts import ANY, is_host, is_network

LogFormat = Literal["text", "json"]
# What a record may carry beside its message, as `extra`.
_FIELDS: Final = ("request_id", "client", "method", "path", "status", "seconds")

_HEADER: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

LogLevel = Literal["debug", "info", "warning", "error"]
ClusterKind = Literal["none", "ray"]
UnknownFields = Literal["error", "ignore"]


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The record as an object."""
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
    """Send what this process logs to standard error in that form, from `level` on."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter(f"%(asctime)s %(levelname)s {process}: %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonLines(process) if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """How the server listens, whom it lets in, and where it draws the line. Raises ConfigError."""

    host: str = option(
        "127.0.0.1", "Address to listen on; only this machine reaches the default.", of_batches=False
    )
    port: int = option(8000, "Port to listen on; 0 picks a free one.", of_batches=False)
    root_path: str = option("", "Under which a reverse proxy shows the server.", of_batches=False)
    served_model_name: tuple[str, ...] = option(
        (), "What requests may call the model; repeatable.", shown="the model's own"
    )
    api_key: tuple[str, ...] = option(
        (),
        "Ask everybody for this key, or another one given; repeatable. Also: SPECINFER_API_KEY.",
        of_batches=False,
    )
    api_key_file: str | None = option(None, "More keys, a line each.", of_batches=False)
    cors_origin: tuple[str, ...] = option((), "Let pages of this origin call; repeatable.", of_batches=False)
    allowed_host: tuple[str, ...] = option(
        (),
        "Answer where asked for by this name, a proxy's perhaps; repeatable; * for any.",
        of_batches=False,
    )
    trusted_proxy: tuple[str, ...] = option(
        (),
        "A proxy's address or network, whose X-Forwarded-For is logged; repeatable; * for any.",
        of_batches=False,
    )
    page: bool = option(True, "Show a page to chat on at /.", of_batches=False)

    replicas: int = option(
        1,
        "Engines, each in a process of its own with a share of the cores.",
        more="Every option of an engine holds for each of them, `memory` and `kv_cache_memory` too.",
        minimum=1,
    )
    cluster: ClusterKind = option(
        "none",
        "ray: replicas are actors of a Ray cluster, that of RAY_ADDRESS or `ray start`, or one of their own.",
        more="It needs `specinfer[cluster]` ([replicas.md](replicas.md#several-machines-ray)).",
    )
    session_header: str = option(
        "x-session-id", "Requests with the same text in this header go to one replica.", of_batches=False
    )

    max_waiting: int = option(128, "Completions that may wait for an engine; more get 429.", of_batches=False)
    max_n: int = option(16, "Completions of one prompt, and prompts of one request.", minimum=1)
    max_prompt_tokens: int | None = option(
        None, "Of one prompt; default: what the context leaves.", shown="what the context leaves", minimum=1
    )
    max_body: int = option(16 << 20, "Bytes of one request, like 16MB.", minimum=1024, size=True)
    max_bodies_memory: int | None = option(
        None,
        "Bytes of all unanswered requests; more get 503. Default: twice --max-body.",
        shown="twice `max_body`",
        size=True,
        of_batches=False,
    )
    max_connections: int = option(2048, "At once; more get 503.", minimum=1, of_batches=False)
    idle_timeout: float = option(
        75.0, "Seconds that a connection may say nothing.", zero=False, of_batches=False
    )
    max_wait: float = option(
        0.0,
        "Seconds that a request may wait for its first step; more get 503. 0: no limit.",
        of_batches=False,
    )
    ping_interval: float = option(
        15.0,
        "Seconds after which a quiet stream gets a comment, so that no proxy ends it; 0: never.",
        of_batches=False,
    )
    engine_timeout: float = option(
        120.0, "Seconds after which an engine that gives no sign of life is started again; 0: never."
    )
    grace: float = option(
        30.0, "Seconds that answers in progress get after SIGTERM.", zero=False, of_batches=False
    )

    unknown_fields: UnknownFields = option(
        "error", "Of requests: error refuses them, ignore takes them out and says so once a name."
    )
    stored_responses: int = option(256, "Answers that previous_response_id may name.", of_batches=False)
    special_tokens_in_messages: SpecialTokens = option(
        "text", "Names of special tokens in what users and tools say: text, or the tokens."
    )
    call_format: str = option("auto", "How the model writes tool calls; auto: as its chat template says.")
    log_traffic: str | None = option(
        None, "A file that gets prompts and answers, to tune drafts on.", shown="none"
    )
    log_traffic_size: int = option(256 << 20, "After which that file is rotated.", minimum=4096, size=True)
    log_level: LogLevel = option("info", "From which on the server logs.")
    log_format: LogFormat = option("text", "json: an object a line.")
    otlp_endpoint: str | None = option(None, "Where OpenTelemetry spans go.", shown="none")

    def __post_init__(self) -> None:
        check_options(self)
        for key in self.api_key:
            if not key.strip() or key != key.strip() or not key.isascii():
                raise ConfigError("an api_key is blank, or not ASCII, or has blanks around it; give another")
        for name in self.allowed_host:
            if name != ANY and not is_host(name):
                raise ConfigError(
                    f"allowed_host has {name!r}; allowed: a name or an address, without a port, or *"
                )
        for address in self.trusted_proxy:
            if address != ANY and not is_network(address):
                raise ConfigError(
                    f"trusted_proxy has {address!r}; allowed: an address, a network like 10.0.0.0/8, or *"
                )
        if not _HEADER.fullmatch(self.session_header):
            raise ConfigError(
                f"session_header is {self.session_header!r}; allowed: the name of a header, like x-session-id"
            )
        path = self.root_path
        if path and (not path.startswith("/") or path.endswith("/") or not path.isascii()):
            raise ConfigError(f"root_path is {path!r}; allowed: an ASCII path like /that/path, or nothing")
        if self.max_bodies_memory is not None and self.max_bodies_memory < self.max_body:
            raise ConfigError(
                f"max_bodies_memory is {self.max_bodies_memory}; allowed: an integer >= {self.max_body}, "
                "which is max_body"
            )
        if self.port > 65535:
            raise ConfigError(f"port is {self.port}; allowed: 0 to 65535")
