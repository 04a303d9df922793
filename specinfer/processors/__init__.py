"""What changes the target's law at a node, with the node's own path: penalties, bans, a grammar."""
