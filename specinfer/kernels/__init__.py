"""Native code of the hot path; every op has a PyTorch twin: its oracle in tests, its stand-in elsewhere."""
