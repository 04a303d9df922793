"""Text to token ids and back, chat templates, and text that grows token by token."""

from specinfer.tokenizer.detokenizer import Detokenizer
from specinfer.tokenizer.tokenizer import Tokenizer

__all__ = ["Detokenizer", "Tokenizer"]
