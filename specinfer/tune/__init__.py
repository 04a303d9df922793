"""Draft heads trained on what their target says: texts are collected, a head is trained, the best is kept."""
