"""Observers of completions: metrics, spans and the traffic log."""
