"""Speculators, the speculation policy, and the merged tree of all proposals."""
