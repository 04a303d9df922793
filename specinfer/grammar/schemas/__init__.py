"""Rewrites JSON schemas into schemas that the grammar library can enforce."""
