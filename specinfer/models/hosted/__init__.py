"""Models of other families: transformers' code runs their layers, with specinfer's attention and products."""
