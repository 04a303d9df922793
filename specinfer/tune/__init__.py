"""Training of draft models on their target's answers."""
