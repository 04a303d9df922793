"""Data sets of prompts, and provenance of figures."""
