"""Safetensors with matrices quantized by other programs, read as rows of floats.

checkpoint.py selects the format; each module has the readers of related formats.
"""
