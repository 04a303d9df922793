"""Processes of tensor and pipeline parallelism: how ranks start, join, and follow rank 0."""
