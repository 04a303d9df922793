"""Measures a model without and with speculation."""
