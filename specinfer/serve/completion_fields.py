"""What POST /v1/completions takes."""

from __future__ import annotations

from pydantic import Field

from specinfer.serve.api_error import ApiError
from specinfer.serve.chat_fields import Prediction
from specinfer.serve.fields import MOST_LOGPROBS, Ids, Items, SamplingFields


class CompletionFields(SamplingFields):
    """A prompt or several, as text or token ids, to be gone on with."""

    prompt: str | Ids | Items[str] | Items[Ids]
    max_tokens: int | None = None
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool | None = None
    prediction: str | Prediction | None = None
    add_special_tokens: bool | None = Field(
        None, description="Whether a text gets the begin-of-text token that its model wants."
    )
    suffix: str | None = Field(None, description="Text after the answer: code models fill in the middle.")

    def prompts(self) -> list[str | Ids]:
        """The prompts, one or several; raises ApiError where there is none."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            allowed = "text, token ids, or a list of these"
            raise ApiError(f"prompt is an empty list; give {allowed}", param="prompt")
        ids = [one for one in self.prompt if isinstance(one, int)]
        return [ids] if ids else [one for one in self.prompt if not isinstance(one, int)]

    def check(self) -> None:
        """Refuse what cannot be honoured."""
        super().check()
        if self.suffix:
            if self.echo:
                raise ApiError(
                    "echo and suffix are given; put prompt and suffix around the answer", param="echo"
                )
            if not all(isinstance(one, str) for one in self.prompts()):
                raise ApiError("suffix needs a prompt of text; give that, not token ids", param="prompt")
