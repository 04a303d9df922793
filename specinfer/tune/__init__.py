"""Drafts trained on what their target says: texts are collected, drafts are trained, the best are kept."""
