"""Engine processes: start, route work, restart, exchange messages."""
