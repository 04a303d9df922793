"""Which tokens a form allows at any node of a tree: regular expressions, JSON schemas, choices, grammars."""
