"""Machines: kernels, mixtures of experts, ranks on one host and two."""
