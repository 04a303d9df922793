"""POST /tokenize and POST /detokenize, as in vLLM."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from specinfer.serve.api.chat import ChatMessage
from specinfer.serve.api.chat_prompt import chat_token_ids
from specinfer.serve.api.service import Service
from specinfer.serve.fields.body import Fields, Ids, Items
from specinfer.serve.http.api_error import ApiError
from specinfer.tokenizer import Tokenizer

_AT_ONCE: Final = 10_000  # tokens; longer lists are decoded in a thread


class TokenizeFields(Fields):
    """A text or a conversation to tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(Fields):
    """Token ids to decode."""

    model: str | None = None
    tokens: Ids


async def tokenize(service: Service, fields: TokenizeFields) -> dict[str, Any]:
    """Return the token ids of a text or a conversation; raises ApiError."""
    service.check_model(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise ApiError("give either prompt or messages", param="prompt")
    if fields.messages is None:
        for name in ("add_generation_prompt", "continue_final_message"):
            if getattr(fields, name) is not None:
                raise ApiError(f"{name} needs messages; remove it", param=name)
        special = fields.add_special_tokens is not False
        tokens = await service.encode(fields.prompt or "", "prompt", add_special=special)
    else:
        messages = [message.rendered() for message in fields.messages]
        tokens = await chat_token_ids(
            service,
            messages,
            prompted=fields.add_generation_prompt is not False,
            continued=fields.continue_final_message is True,
            add_special=fields.add_special_tokens is True,
        )
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": service.facts.max_context,
        "tokens": tokens,
        "token_strs": None,
    }
    if fields.return_token_strs:
        answer["token_strs"] = [service.tokenizer.id_to_token(token) for token in tokens]
    return answer


async def detokenize(service: Service, fields: DetokenizeFields) -> dict[str, Any]:
    """Return the text of token ids, without special tokens; raises ApiError."""
    service.check_model(fields.model)
    if len(fields.tokens) < _AT_ONCE:
        return {"prompt": _text(service.tokenizer, fields.tokens)}
    return {"prompt": await asyncio.to_thread(_text, service.tokenizer, fields.tokens)}


def _text(tokenizer: Tokenizer, tokens: Ids) -> str:
    size = tokenizer.vocab_size
    for index, token in enumerate(tokens):
        if not 0 <= token < size:
            raise ApiError(
                f"tokens[{index}] is {token}; allowed: ids of the vocabulary, 0 to {size - 1}", param="tokens"
            )
    return tokenizer.decode(tokens)
