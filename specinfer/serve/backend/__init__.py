"""Engine processes: starting, routing, restarting and talking to them."""
