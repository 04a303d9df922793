"""Policies that select a step's speculators, their depths, and the nodes to verify."""
