"""Engines and pages of benchmarks/serving.py."""
