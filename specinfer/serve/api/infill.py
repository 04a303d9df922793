"""POST /infill: text at a cursor, as in llama.cpp's server, for editors."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, Final

from pydantic import Field

from specinfer.request import Delta, FinishReason
from specinfer.sampling_params import SamplingParams
from specinfer.serve.api.answer import EndpointAnswer, Event, Prompts
from specinfer.serve.api.service import Service
from specinfer.serve.fields.body import Fields, Items
from specinfer.serve.fields.sampling import SamplingFields
from specinfer.serve.http.event_stream import event

# Defaults of llama.cpp, which editors expect.
_DEFAULTS: Final = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}

_INDENT: Final = re.compile(r"\n([ \t]*)(?=[^ \t\n])")  # the indentation of a line that is not blank


class ExtraFile(Fields):
    """Another file, or a part of one, as context."""

    text: str
    filename: str | None = None


class InfillFields(SamplingFields):
    """The text around a cursor, and how to fill it in."""

    takes_defaults = False  # llama.cpp's defaults apply
    refused = {
        "n": "an answer is one text; send the request again with another seed",
        "trace": "the trees of steps come with /v1/completions; add suffix there",
        "prompt_logprobs": "the answer has no field for them; use /v1/completions with suffix",
        "stream_options": "the last event of a stream has the counts; remove it",
    }

    input_prefix: str
    input_suffix: str
    input_extra: Items[ExtraFile] | None = Field(
        None, description="The first files are omitted if the prompt is too long."
    )
    prompt: str | None = Field(
        None, description="Text after input_prefix: the current line up to the cursor."
    )
    n_predict: int | None = Field(None, ge=-1, description="Maximum of tokens; -1: no limit.")
    max_tokens: int | None = Field(None, ge=-1)
    n_indent: int | None = Field(None, ge=0, description="Stop before a line with less indentation.")
    t_max_predict_ms: int | None = Field(None, description="Stop after this time, once a line is complete.")
    samplers: Items[str] | None = Field(
        None,
        description="Which of temperature, top_k, top_p and min_p to use; other names have no effect.",
    )
    response_fields: Items[str] | None = Field(None, description="Return only these fields.")
    return_tokens: bool | None = None

    def check(self) -> None:
        """Raise ApiError for unsupported combinations of fields."""
        super().check()
        self.check_equal("n_predict", "max_tokens")

    @property
    def limit(self) -> int | None:
        """Maximum of tokens; None for no limit."""
        limit = self.max_tokens if self.n_predict is None else self.n_predict
        return None if limit == -1 else limit

    def sampling_params(self, room: int, **more: Any) -> SamplingParams:
        """The SamplingParams of this request, with at most `room` tokens; raises ApiError.

        `n_predict` 0 generates one token, which is not reported: editors use it to put a prompt in the cache.
        """
        listed = _DEFAULTS if self.samplers is None else set(self.samplers) & set(_DEFAULTS)
        chosen = {
            name: (usual if (value := getattr(self, name)) is None else value) if name in listed else None
            for name, usual in _DEFAULTS.items()
        }
        limit = room if self.limit is None else min(max(self.limit, 1), room)
        return self.model_copy(update=chosen).params(max_tokens=limit, **more)


class Infill(EndpointAnswer[InfillFields]):
    """One infill while it is generated."""

    def __init__(
        self, service: Service, fields: InfillFields, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(service, fields)
        self._clock = clock
        self._text = ""
        self._tokens: list[int] = []
        self._ended = {"stop_type": "none", "stopping_word": ""}
        self._started = clock()
        self._first: float | None = None  # time of the first token

    async def _prepare(self) -> Prompts:
        fields, service = self._fields, self._service
        prompt = await service.encode_fill_in(
            fields.input_prefix + (fields.prompt or ""),
            fields.input_suffix,
            "input_suffix",
            files=[(extra.filename or "", extra.text) for extra in fields.input_extra or ()],
            answer=fields.limit or 0,
        )
        ends = service.fill_in_ends(fields.stop_token_ids)
        return [prompt], [fields.sampling_params(service.room(prompt, "input_prefix"), stop_token_ids=ends)]

    async def _take(self, number: int, delta: Delta) -> list[Event]:
        if self._fields.limit == 0:
            self._tally.completion_tokens, self._ended["stop_type"], self._is_over = 0, "limit", True
            return []
        piece = self._piece(delta)
        self._is_over = delta.finish_reason is None and self._ended["stop_type"] != "none"
        return [piece]

    def _written(self, events: list[Event]) -> str:
        return "".join(map(event, events))

    def _closing(self) -> str:
        return event(self._selected(self._last({"content": "", "tokens": []})))

    def _finish(self) -> dict[str, Any]:
        tokens = self._tokens if self._fields.return_tokens else []
        return self._selected(self._last({"content": self._text, "tokens": tokens}))

    def _piece(self, delta: Delta) -> dict[str, Any]:
        if self._first is None:
            self._first = self._clock()
        before, self._text = len(self._text), self._text + delta.text
        self._tokens += delta.token_ids
        match delta.finish_reason:
            case FinishReason.STOP:
                word = delta.stopped_by
                self._ended = {"stop_type": "eos" if word is None else "word", "stopping_word": word or ""}
            case FinishReason.LENGTH | FinishReason.ABORT:
                self._ended["stop_type"] = "limit"
        if self._is_finished(before):
            self._ended = {"stop_type": "limit", "stopping_word": ""}
        piece = {"content": self._text[before:], "tokens": list(delta.token_ids), "stop": False}
        return {"index": 0} | piece | self._counts()

    def _is_finished(self, before: int) -> bool:
        """Whether `n_indent` or `t_max_predict_ms` ends the answer; cuts unwanted text after `before`."""
        fields = self._fields
        if fields.n_indent:
            for line in _INDENT.finditer(self._text, max(0, self._text.rfind("\n", 0, before))):
                if len(line[1]) < fields.n_indent:
                    self._text = self._text[: line.end(1)]
                    return True
        limit = fields.t_max_predict_ms or 0
        return limit > 0 and "\n" in self._text and 1000 * (self._clock() - (self._first or 0.0)) > limit

    def _last(self, text: dict[str, Any]) -> dict[str, Any]:
        """The last event of a stream, or the whole answer."""
        return (
            {"index": 0}
            | text
            | {"stop": True, "model": self._model}
            | self._counts()
            | {
                "has_new_line": "\n" in self._text,
                "truncated": False,
                "tokens_cached": self._tally.cached_tokens,
                "timings": self._timings(),
                "metrics": self._tally.metrics(),
            }
            | self._ended
        )

    def _counts(self) -> dict[str, Any]:
        tally = self._tally
        return {"tokens_predicted": tally.completion_tokens, "tokens_evaluated": tally.prompt_tokens}

    def _timings(self) -> dict[str, Any]:
        tally, now = self._tally, self._clock()
        first = now if self._first is None else self._first
        figures: dict[str, float] = {"cache_n": tally.cached_tokens}
        for name, count, seconds in (
            ("prompt", tally.prompt_tokens - tally.cached_tokens, first - self._started),
            ("predicted", tally.completion_tokens, now - first),
        ):
            figures |= {
                f"{name}_n": count,
                f"{name}_ms": 1000 * seconds,
                f"{name}_per_token_ms": 1000 * seconds / count if count else 0.0,
                f"{name}_per_second": count / seconds if seconds else 0.0,
            }
        drafted = {"draft_n": tally.figures.drafted_tokens, "draft_n_accepted": tally.figures.accepted_tokens}
        return figures | drafted

    def _selected(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Keep only `response_fields`; "timings/prompt_n" names a nested field."""
        if not self._fields.response_fields:
            return answer
        found: dict[str, Any] = {}
        for name in self._fields.response_fields:
            value: Any = answer
            for part in name.split("/"):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                found[name.rpartition("/")[2]] = value
        return found
