"""RetoldTree: a tree of a draft's own tokens, told again in the target's.

What stands along a path of the draft is one run of bytes; the target's tokenizer says which tokens those are.
A deeper level may join what two shallower ones were two tokens for ("hel", "lo" -> "hello"), and then both
ways stay: the tree only grows, as the ensemble expects of a tree that grows by levels.
"""

from __future__ import annotations

from collections.abc import Iterable

from specinfer.speculate.drafts.foreign_tokens import ForeignTokens
from specinfer.tokenizer.respelling import complete
from specinfer.tree import Draw, TokenTree, TreeBuilder


class RetoldTree:
    """One step's tree of one request; `told` is a tree of names (foreign_tokens.py)."""

    def __init__(self, tokens: ForeignTokens, told: TreeBuilder, max_depth: int) -> None:
        self._tokens, self._told, self._max_depth = tokens, told, max_depth
        self._builder = TreeBuilder(told.root, told.max_nodes)
        # Of each node of `told`: what stands above and in it, how likely, how many tokens it takes; None
        # behind a special token, after which no text follows.
        self._bytes: list[bytes | None] = [b""]
        self._likely = [1.0]
        self._lengths = [0]
        self._at = [0]  # the node of this tree that it ends in, as far as whole tokens go
        self._draws: dict[int, Draw] = {}
        self._seen = 0  # draws of `told`

    def tree(self) -> TokenTree:
        """All of it that has grown so far."""
        self.grow()
        return self._builder.build()

    def length(self, node: int) -> int:
        """The target's tokens that a node of the draft's tree ends, counted from below the root."""
        self.grow()
        return self._lengths[node]

    def ending(self, nodes: Iterable[int], ends: Iterable[int]) -> list[int]:
        """Of these nodes of the draft's those that end in one of `ends`."""
        wanted = frozenset(ends)
        return [node for node in nodes if self._at[node] in wanted]

    def ends(self, nodes: Iterable[int]) -> list[int]:
        """The nodes of this tree in which these of the draft's end."""
        self.grow()
        return sorted({self._at[node] for node in nodes})

    def grow(self) -> None:
        """Tell what the draft's tree has and this one does not have yet."""
        for draw in self._told.draws[self._seen :]:
            self._draws.setdefault(draw.node, draw)
        self._seen = len(self._told.draws)
        for node in range(len(self._bytes), len(self._told.parents)):
            self._add(node)

    def _add(self, node: int) -> None:
        tokens, draw = self._tokens, self._draws[node]
        parent, name = self._told.parents[node], self._told.token_ids[node]
        before = self._bytes[parent]
        self._likely.append(self._likely[parent] * min(max(draw.confidence, 0.0), 1.0))
        if before is None:
            self._bytes.append(None)
            self._lengths.append(self._lengths[parent])
            self._at.append(self._at[parent])
            return
        special = name < tokens.our_size and tokens.ours.is_special(name)
        [token_id] = tokens.spelled([name])
        spelled = before if special else before + tokens.theirs.token_bytes[token_id]
        path = tokens.ours.encode_behind(complete(spelled)[0])
        if special:
            path.append(name)
        self._bytes.append(None if special else spelled)
        self._lengths.append(len(path))
        self._at.append(self._guess(path, node, draw))

    def _guess(self, path: list[int], last: int, draw: Draw) -> int:
        """Add the tokens that are new along a path; as likely as what each ends in, given its parent.

        Returns the node the path ends in, as far as there is room.
        """
        table = self._tokens.ours.token_bytes
        at, begin = 0, 0
        for depth, token in enumerate(path, start=1):
            if depth > self._max_depth:
                break
            end = begin + len(table[token])
            below = self._builder.child(at, token)
            if below is None:
                end_likely = self._likely[self._node_at(last, end, special=not table[token])]
                sure = end_likely / max(self._likely[self._node_at(last, begin)], 1e-12)
                evidence = draw.evidence if depth == len(path) else ()
                below = self._builder.add(
                    at, token, draw.speculator, draw.rule, confidence=min(sure, 1.0), evidence=evidence
                )
                if below is None:
                    break
            at, begin = below, end
        return at

    def _node_at(self, last: int, place: int, *, special: bool = False) -> int:
        """The first node on the path to `last` that reaches so many bytes; `last` itself for special ones."""
        node, found = last, last
        while node > 0 and not special:
            node = self._told.parents[node]
            if len(self._bytes[node] or b"") < place:
                break
            found = node
        return found
