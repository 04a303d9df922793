"""Learned drafts: training and passes of heads."""
