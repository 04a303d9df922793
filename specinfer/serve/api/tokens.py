"""POST /tokenize and POST /detokenize, as in vLLM."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from pydantic import Field

from specinfer.serve.api.chat import ChatFields, ChatMessage
from specinfer.serve.api.chat_prompt import build_prompt
from specinfer.serve.api.service import Service
from specinfer.serve.fields.body import Fields, Ids, Items
from specinfer.serve.fields.conversation import ConversationFields
from specinfer.serve.fields.sampling import SamplingFields
from specinfer.serve.http.api_error import ApiError
from specinfer.tokenizer import Tokenizer


class TokenizeFields(ChatFields):
    """A text to tokenize, or a conversation in a whole body of chat completions."""

    takes_defaults = False

    prompt: str | None = None
    messages: Items[ChatMessage] = Field(default_factory=list)
    return_token_strs: bool | None = None


_OF_CHAT: Final = ConversationFields.model_fields.keys() - SamplingFields.model_fields.keys()


class DetokenizeFields(Fields):
    """Token ids to decode."""

    model: str | None = None
    tokens: Ids


async def tokenize(service: Service, fields: TokenizeFields) -> dict[str, Any]:
    """Return the token ids of a text or a conversation; raises ApiError."""
    if (fields.prompt is None) == (not fields.messages):
        raise ApiError("give either prompt or messages", param="prompt")
    if fields.prompt is None:
        fields.check()
        messages = [message.rendered() for message in fields.messages]
        prompt = await service.in_thread("messages", build_prompt, service, fields, messages)
        tokens = prompt.token_ids
    else:
        for name in sorted(fields.model_fields_set & _OF_CHAT - {"add_special_tokens"}):
            raise ApiError(f"{name} needs messages; remove it", param=name)
        special = fields.add_special_tokens is not False
        tokens = tuple(service.tokenizer.encode("", add_special=special))
        if fields.prompt:
            tokens = await service.encode(fields.prompt, "prompt", add_special=special)
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
    return {"prompt": await asyncio.to_thread(_text, service.tokenizer, fields.tokens)}


def _text(tokenizer: Tokenizer, tokens: Ids) -> str:
    size = tokenizer.vocab_size
    for index, token in enumerate(tokens):
        if not 0 <= token < size:
            raise ApiError(
                f"tokens[{index}] is {token}; allowed: ids of the vocabulary, 0 to {size - 1}", param="tokens"
            )
    return tokenizer.decode(tokens)
