"""Model families: one module per group of related families, with their configs and tensor names."""
