"""Who guesses what comes next: speculators, the policy that asks them, one merged tree of all they say."""
