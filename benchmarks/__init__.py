"""Benchmarks, in a folder for each question; run one with `python -m benchmarks.FOLDER.NAME`."""
