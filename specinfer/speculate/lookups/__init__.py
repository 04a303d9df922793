"""Guesses that are looked up: in texts so far, in earlier answers, in what a caller predicts."""
