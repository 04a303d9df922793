"""Slow, plain versions of what ships, to hold it against."""
