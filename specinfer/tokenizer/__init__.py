"""Tokenizers, chat templates and incremental detokenization."""

from specinfer.tokenizer.chat_encoder import ChatEncoder, Rendered
from specinfer.tokenizer.detokenizer import Detokenizer
from specinfer.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatEncoder", "Detokenizer", "Rendered", "Tokenizer"]
