"""Several processes that run one model: whose share is what, how they meet, what they exchange."""
