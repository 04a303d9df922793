"""What POST /tokenize and POST /detokenize take and give, as vLLM has them."""

from __future__ import annotations

from typing import Any

from specinfer.serve.api_error import ApiError
from specinfer.serve.chat_fields import ChatMessage
from specinfer.serve.fields import Fields, Ids, Items
from specinfer.serve.service import Service


class TokenizeFields(Fields):
    """A text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(Fields):
    """Token ids."""

    model: str | None = None
    tokens: Ids


async def tokenize(service: Service, fields: TokenizeFields) -> dict[str, Any]:
    """The token ids of a text or a conversation."""
    service.check_model(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise ApiError("give prompt or messages, one of them", param="prompt")
    if fields.messages is None:
        special = fields.add_special_tokens is not False
        tokens = await service.encode(fields.prompt or "", "prompt", add_special=special)
    else:
        messages = [message.rendered() for message in fields.messages]
        prompted = fields.add_generation_prompt is not False
        text = await service.render(messages, add_generation_prompt=prompted)
        tokens = await service.encode(text, "messages", add_special=False)
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
    """The text of token ids; special tokens are left out."""
    service.check_model(fields.model)
    size = service.tokenizer.vocab_size
    for place, token in enumerate(fields.tokens):
        if not 0 <= token < size:
            raise ApiError(
                f"tokens[{place}] is {token}; allowed: ids of the vocabulary, 0 to {size - 1}", param="tokens"
            )
    return {"prompt": service.tokenizer.decode(fields.tokens)}
