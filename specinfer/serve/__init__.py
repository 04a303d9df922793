"""The server: HTTP in, tokens of an engine process out."""
