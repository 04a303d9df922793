"""The promise, tested on the user's own models: speculation does not change the output."""
