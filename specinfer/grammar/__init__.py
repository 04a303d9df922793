"""Grammars for structured output: which tokens may come next."""
