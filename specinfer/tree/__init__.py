"""Token trees: candidate continuations, verified in one pass of the target (SpecInfer, section 3)."""

from specinfer.tree.draw import Draw, DrawRule
from specinfer.tree.merging import merge
from specinfer.tree.token_tree import TokenTree, TreeBuilder

__all__ = ["Draw", "DrawRule", "TokenTree", "TreeBuilder", "merge"]
