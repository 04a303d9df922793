"""One module for each kin of model families: their configs, and the names of their tensors."""
