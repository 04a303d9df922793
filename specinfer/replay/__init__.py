"""Texts with all that drafts would have guessed along them, and policies played over them without a model."""
