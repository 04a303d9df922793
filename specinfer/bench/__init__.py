"""Measuring a model without and with speculation, on the same prompts and the same weights."""
