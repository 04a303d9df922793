"""Models without a family of ours: transformers' code runs their layers, over our attention and products."""
