"""What POST /infill takes: llama.cpp's endpoint for editors."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field

from specinfer.sampling_params import SamplingParams
from specinfer.serve.api_error import ApiError
from specinfer.serve.fields import Fields, Items, SamplingFields

# What is chosen where a request does not say, as editors expect it of llama.cpp.
_USUAL: Final = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
_REFUSED: Final = {
    "n": "an infill is one text; ask again, with another seed",
    "n_probs": "an infill has no place for them; ask /v1/completions with suffix and logprobs",
    "prompt_logprobs": "an infill has no place for them; ask /v1/completions with suffix",
    "stream_options": "streams end with their counts; drop it",
}


class ExtraFile(Fields):
    """Another file, or a part of one, that the answer may depend on."""

    text: str
    filename: str | None = None
    time: int | None = None  # when an editor saw it


class InfillFields(SamplingFields):
    """Text before and behind a cursor, and what may stand there."""

    input_prefix: str
    input_suffix: str
    input_extra: Items[ExtraFile] | None = Field(
        None, description="The first are left out where room is short."
    )
    prompt: str | None = Field(None, description="Comes behind input_prefix: the line up to the cursor.")
    n_predict: int | None = Field(None, ge=-1, description="-1: as many tokens as there is room for.")
    max_tokens: int | None = Field(None, ge=-1)
    n_indent: int | None = Field(
        None, ge=0, description="The answer ends before a line that is indented less."
    )
    t_max_predict_ms: int | None = Field(None, description="The answer ends with a line after that time.")
    samplers: Items[str] | None = Field(
        None,
        description="Which of temperature, top_k, top_p and min_p are used; others there are not had here.",
    )
    response_fields: Items[str] | None = Field(None, description="The answer has these alone.")
    return_tokens: bool | None = None
    n_probs: int | None = None

    # Fields of llama.cpp's that change no text.
    cache_prompt: bool | None = None
    id_slot: int | None = None
    t_max_prompt_ms: int | None = None
    timings_per_token: bool | None = None
    n_keep: int | None = None
    n_cache_reuse: int | None = None
    min_keep: Literal[0] | None = None

    def check(self) -> None:
        """Refuse what cannot be honoured."""
        super().check()
        for name, reason in _REFUSED.items():
            value = getattr(self, name)
            if value not in (None, 0) and (name, value) != ("n", 1):
                raise ApiError(f"{name} is not offered here: {reason}", param=name)

    @property
    def prefix(self) -> str:
        """All that stands before the answer."""
        return self.input_prefix + (self.prompt or "")

    @property
    def files(self) -> list[tuple[str, str]]:
        """Names and texts of the other files."""
        return [(extra.filename or "", extra.text) for extra in self.input_extra or ()]

    @property
    def wanted(self) -> int | None:
        """How many tokens the answer may have; None: as many as there is room for."""
        wanted = self.max_tokens if self.n_predict is None else self.n_predict
        return None if wanted == -1 else wanted

    def sampling_params(self, room: int, **more: Any) -> SamplingParams:
        """What these fields mean where an answer may have `room` tokens; raises ApiError.

        One token is made where none is wanted, which leaves the prompt in the cache as an editor means it to.
        """
        listed = _USUAL if self.samplers is None else set(self.samplers) & set(_USUAL)
        chosen = {
            name: (usual if (value := getattr(self, name)) is None else value) if name in listed else None
            for name, usual in _USUAL.items()
        }
        wanted = room if self.wanted is None else min(max(self.wanted, 1), room)
        return self.model_copy(update=chosen).params(max_tokens=wanted, **more)
