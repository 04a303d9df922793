"""Token trees: candidate continuations, verified in one pass of the target (SpecInfer, section 3)."""

from specinfer.tree.token_tree import Draw, DrawRule, TokenTree, TreeBuilder, merge

__all__ = ["Draw", "DrawRule", "TokenTree", "TreeBuilder", "merge"]
