"""Models that guess: small ones, and heads on the hidden states of their target."""
