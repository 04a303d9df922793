"""Safetensors whose matrices other programs have quantized, read as rows of floats.

checkpoint.py knows the formats; each module has the readers of some that are alike.
"""
