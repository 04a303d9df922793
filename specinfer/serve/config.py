"""ServeConfig: every option of the server that is not the engine's; and the form of its log."""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import dataclass
from typing import Final, Literal, get_args

from specinfer.config import SpecialTokens
from specinfer.errors import ConfigError
from specinfer.serve.hosts import ANY, is_host, is_network

LogFormat = Literal["text", "json"]
# What a record may carry beside its message, as `extra`.
_FIELDS: Final = ("request_id", "client", "method", "path", "status", "seconds")

LogLevel = Literal["debug", "info", "warning", "error"]
UnknownFields = Literal["error", "ignore"]
_TEXTS = ("host", "root_path", "call_format")
_TEXTS_OR_NONE = ("api_key_file", "log_traffic", "otlp_endpoint")
_LISTS = ("served_model_name", "api_key", "cors_origin", "allowed_host", "trusted_proxy")


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

    host: str = "127.0.0.1"  # only this machine reaches it
    port: int = 8000  # 0: any that is free
    root_path: str = ""  # under which a reverse proxy shows the server
    served_model_name: tuple[str, ...] = ()  # what requests may call the model; (): the model's own name
    api_key: tuple[str, ...] = ()  # one of these is asked of everybody; (): nobody is asked
    api_key_file: str | None = None  # more of them, a line each
    cors_origin: tuple[str, ...] = ()  # pages of these origins may call; (): none but the server's own
    allowed_host: tuple[str, ...] = ()  # names it may be asked for by, beside this machine's own; "*": any
    trusted_proxy: tuple[str, ...] = ()  # addresses or networks whose X-Forwarded-For is believed; "*": any
    page: bool = True  # whether / shows a page to chat on

    max_waiting: int = 128  # completions that wait for the engine; more are told to come again
    max_n: int = 16  # completions of one prompt, and prompts of one request
    max_prompt_tokens: int | None = None  # None: what the context leaves
    max_body: int = 16 << 20  # bytes of one request
    max_bodies_memory: int | None = None  # bytes of all requests not answered yet; None: twice max_body
    max_connections: int = 2048
    idle_timeout: float = 75.0  # seconds that a connection may say nothing while something is asked of it
    max_wait: float = 0.0  # seconds that a request may wait for its first step; 0: as long as it takes
    ping_interval: float = 15.0  # seconds after which a quiet stream gets a comment; 0: none
    engine_timeout: float = (
        120.0  # seconds without a sign of life, then the engine is started again; 0: never
    )
    grace: float = 30.0  # seconds that answers in progress get after SIGTERM

    unknown_fields: UnknownFields = "error"  # ignore: taken out, and told in the log once for each name
    stored_responses: int = 256  # answers that `previous_response_id` may name
    special_tokens_in_messages: SpecialTokens = "text"  # of users and tools: text, or the tokens they name
    call_format: str = "auto"  # how the model writes tool calls; auto: as its chat template says
    log_traffic: str | None = None  # a file that gets prompts and answers, to tune drafts on
    log_traffic_size: int = 256 << 20  # bytes, after which the file is rotated; one old one is kept
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"  # json: an object a line
    otlp_endpoint: str | None = None  # where OpenTelemetry spans go

    def __post_init__(self) -> None:
        self._check_texts()
        self._check_numbers()
        for name, allowed in (
            ("log_level", get_args(LogLevel)),
            ("log_format", get_args(LogFormat)),
            ("unknown_fields", get_args(UnknownFields)),
            ("special_tokens_in_messages", get_args(SpecialTokens)),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(allowed)}")
        if not isinstance(self.page, bool):
            raise ConfigError(f"page is {self.page!r}; allowed: True or False")
        for key in self.api_key:
            if not key.strip() or key != key.strip() or not key.isascii():
                raise ConfigError("an api_key is blank, or not ASCII, or has blanks around it; give another")

    @property
    def bodies_memory(self) -> int:
        """Bytes that all requests together may have that are not answered yet."""
        return 2 * self.max_body if self.max_bodies_memory is None else self.max_bodies_memory

    def _check_texts(self) -> None:
        """Of what kind the values are: a file may have any, and a text is a sequence of texts."""
        for name in (*_TEXTS, *_TEXTS_OR_NONE):
            value = getattr(self, name)
            if not isinstance(value, str) and (name in _TEXTS or value is not None):
                raise ConfigError(f"{name} is {value!r}; allowed: a text")
        for name in _LISTS:
            values = getattr(self, name)
            if not isinstance(values, tuple) or not all(isinstance(one, str) and one for one in values):
                # What they are is not told: a key may be among them.
                raise ConfigError(f"{name} has what is no text; allowed: a list of texts, numbers in quotes")
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
        path = self.root_path
        if path and (not path.startswith("/") or path.endswith("/") or not path.isascii()):
            raise ConfigError(f"root_path is {path!r}; allowed: an ASCII path like /that/path, or nothing")

    def _check_numbers(self) -> None:
        for name, least in (
            *(("port", 0), ("max_waiting", 0), ("max_n", 1), ("max_body", 1024), ("max_connections", 1)),
            *(("stored_responses", 0), ("log_traffic_size", 4096)),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} is {value!r}; allowed: an integer >= {least}")
        most = self.max_bodies_memory
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < self.max_body):
            raise ConfigError(
                f"max_bodies_memory is {most!r}; allowed: an integer >= {self.max_body}, which is max_body"
            )
        if self.port > 65535:
            raise ConfigError(f"port is {self.port}; allowed: 0 to 65535")
        most = self.max_prompt_tokens
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise ConfigError(f"max_prompt_tokens is {most!r}; allowed: an integer >= 1")
        for name in ("idle_timeout", "grace", "max_wait", "ping_interval", "engine_timeout"):
            value = getattr(self, name)
            may_be_zero = name not in ("idle_timeout", "grace")
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 <= value < 1e6 or (value == 0 and not may_be_zero):
                allowed = "from 0 on" if may_be_zero else "above 0"
                raise ConfigError(f"{name} is {value!r}; allowed: seconds {allowed}")
