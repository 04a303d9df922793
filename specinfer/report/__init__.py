"""Data sets of prompts, provenance of figures, and files of reports."""
