"""Stable names for writing a speculator (docs/add_a_speculator.md)."""

from specinfer.plan import PlanEntry, StepPlan
from specinfer.speculate.speculator import LevelSpeculator, Outcome, Speculator
from specinfer.tree import Draw, DrawRule, TokenTree, TreeBuilder
from specinfer.tree.distribution import Distribution
from specinfer.tree.token_tree import single_node

__all__ = [
    "Distribution",
    "Draw",
    "DrawRule",
    "LevelSpeculator",
    "Outcome",
    "PlanEntry",
    "Speculator",
    "StepPlan",
    "TokenTree",
    "TreeBuilder",
    "single_node",
]
