"""Model families: config, weights, layers."""
