"""Who guesses in a step, how deep, and what of it is verified."""
