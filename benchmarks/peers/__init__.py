"""Other engines for peers/peers.py, each in its own process and virtual environment."""
