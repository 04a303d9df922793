"""Speculators: anything that proposes tokens."""
