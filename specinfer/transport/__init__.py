"""How ranks exchange numbers and messages: links, groups, and the times that ranks wait."""
