"""Native kernels; each op has a PyTorch twin, which is its test oracle and its fallback."""
