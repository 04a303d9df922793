"""What followed these tokens before: guesses that are looked up in texts and cost no pass."""
