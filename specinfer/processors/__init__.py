"""Logit processors: penalties, biases, bans and grammars, applied at a tree node with the node's own path."""
