"""Measures a model without and with speculation, and a server under load."""
