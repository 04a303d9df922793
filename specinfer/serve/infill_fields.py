"""The request body of POST /infill, llama.cpp's endpoint for editors."""

from __future__ import annotations

from typing import Any, Final

from pydantic import Field

from specinfer.sampling_params import SamplingParams
from specinfer.serve.api_error import ApiError
from specinfer.serve.fields import Fields, Items, SamplingFields

# llama.cpp's defaults, which editors rely on.
_USUAL: Final = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
_REFUSED: Final = {
    "n": "an answer is one text; send the request again with another seed",
    "n_probs": "the answer has no place for them; use /v1/completions with suffix and logprobs",
    "prompt_logprobs": "the answer has no place for them; use /v1/completions with suffix",
    "stream_options": "streams end with their counts; drop it",
}

_DIFFER: Final = "n_predict and max_tokens are given, and differ; give one of them"


class ExtraFile(Fields):
    """Another file, or a part of one, as context."""

    text: str
    filename: str | None = None
    time: int | None = None  # sent by editors; it changes nothing


class InfillFields(SamplingFields):
    """The text around a cursor, and how to fill it in."""

    takes_defaults = False  # llama.cpp's hold

    input_prefix: str
    input_suffix: str
    input_extra: Items[ExtraFile] | None = Field(
        None, description="The first files are left out if room is short."
    )
    prompt: str | None = Field(
        None, description="Text after input_prefix: the current line up to the cursor."
    )
    n_predict: int | None = Field(None, ge=-1, description="Maximum of tokens; -1 for no limit.")
    max_tokens: int | None = Field(None, ge=-1)
    n_indent: int | None = Field(None, ge=0, description="Stop before a line with less indentation.")
    t_max_predict_ms: int | None = Field(None, description="Stop after this time, once a line is complete.")
    samplers: Items[str] | None = Field(
        None,
        description="Which of temperature, top_k, top_p and min_p to use; other names have no effect.",
    )
    response_fields: Items[str] | None = Field(None, description="Return only these fields.")
    return_tokens: bool | None = None
    n_probs: int | None = None

    t_max_prompt_ms: int | None = None  # sent by editors; it changes nothing

    def check(self) -> None:
        """Raise ApiError for what cannot be honoured."""
        super().check()
        for name, reason in _REFUSED.items():
            value = getattr(self, name)
            if value is not None and (name, value) not in (("n", 1), ("n_probs", 0)):
                raise ApiError(f"{name} is not offered here: {reason}", param=name)
        if None not in (self.n_predict, self.max_tokens) and self.n_predict != self.max_tokens:
            raise ApiError(_DIFFER, param="n_predict")

    @property
    def prefix(self) -> str:
        """All text before the cursor."""
        return self.input_prefix + (self.prompt or "")

    @property
    def files(self) -> list[tuple[str, str]]:
        """Names and texts of `input_extra`."""
        return [(extra.filename or "", extra.text) for extra in self.input_extra or ()]

    @property
    def wanted(self) -> int | None:
        """The wanted maximum of tokens; None for no limit."""
        wanted = self.max_tokens if self.n_predict is None else self.n_predict
        return None if wanted == -1 else wanted

    def sampling_params(self, room: int, **more: Any) -> SamplingParams:
        """The SamplingParams of this request, with at most `room` tokens; raises ApiError.

        `n_predict` 0 generates one token, which is not reported: editors use it to put a prompt in the cache.
        """
        listed = _USUAL if self.samplers is None else set(self.samplers) & set(_USUAL)
        chosen = {
            name: (usual if (value := getattr(self, name)) is None else value) if name in listed else None
            for name, usual in _USUAL.items()
        }
        wanted = room if self.wanted is None else min(max(self.wanted, 1), room)
        return self.model_copy(update=chosen).params(max_tokens=wanted, **more)
