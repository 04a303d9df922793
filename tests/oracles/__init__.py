"""Slow, plain implementations that tests compare the shipped ones with."""
