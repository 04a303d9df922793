"""Tools: what a model may call, the form its calls have, and reading them out of its answers."""
