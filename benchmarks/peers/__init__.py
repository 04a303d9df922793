"""Other engines for benchmarks/peers.py, each in its own process and virtual environment."""
