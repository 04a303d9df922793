"""Chat dialects: how a model writes tool calls and reasoning, and parsers for them."""
