"""Identity: texts, quality and sampling with and without speculation."""
