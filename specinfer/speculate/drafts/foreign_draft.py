"""ForeignDraft: a draft model with another tokenizer, which reads the target's text in its own tokens.

It grows trees as DraftModel does. Its text differs in length from the target's, so it has its own blocks.
More text may change the tokenization of the last tokens, so its cache keeps the common prefix of the old and
new tokens.

    ids     0 ......... cached | to be read ......... root | the tree's nodes, node i at root + i
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from specinfer.errors import ensure
from specinfer.plan import PlanEntry
from specinfer.request import Request
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.runtime.runner import ModelRunner, Move
from specinfer.speculate.drafts.draft import LevelDraft, frontier_rows, moves_along
from specinfer.speculate.drafts.draft_tokens import ForeignTokens
from specinfer.speculate.drafts.draws import Site, draw_children
from specinfer.speculate.drafts.growth import Growth, Shape
from specinfer.speculate.speculator import Outcome
from specinfer.tokenizer.respelling import Respelling, complete
from specinfer.tree import Draw, TokenTree, TreeBuilder
from specinfer.tree.draw import draw_rule

_ENDED = 16  # ended texts kept for requests with the same prefix
_TOKENS_A_GUESS = 2  # target tokens allowed per draft token, on average


@dataclass(slots=True)
class _Text:
    """One request's text in the draft's tokens."""

    spelled: Respelling
    cached: int = 0  # positions 0..cached-1 hold it
    table: list[int] = field(default_factory=list)
    key: bytes = b""  # hash of the target's first block; empty: not reusable
    growth: Growth | None = None  # the last tree, until its outcome is known
    root: int = 0  # position of that tree's root


class ForeignDraft(LevelDraft):
    """A draft model with another tokenizer; `tokens` converts between its tokens and the target's."""

    def __init__(
        self,
        name: str,
        runner: ModelRunner,
        shape: Shape,
        *,
        max_rows: int,
        num_blocks: int,
        tokens: ForeignTokens,
    ) -> None:
        """Make a draft over `runner`, whose cache has `num_blocks` blocks."""
        super().__init__(name, shape, max_rows=max_rows, block_size=runner.block_size)
        self._runner = runner
        self._tokens = tokens
        self._blocks = TextBlocks(num_blocks, runner.block_size)
        self._spelled: dict[str, _Text] = {}  # in place of the base's, which use the target's blocks
        self._ended: list[_Text] = []  # oldest first
        self._retokenized: list[RetokenizedTree] = []  # one per entry of the step, if guesses are retokenized

    def max_nodes(self, request: Request) -> int:
        """Return the nodes of a full tree, without its root; more for retokenized guesses."""
        return super().max_nodes(request) * (_TOKENS_A_GUESS if self._tokens.by_text else 1)

    def tree(self, entry: int) -> TokenTree:
        """Return the present tree of an entry, given by its number in the plan, in the target's tokens."""
        return self._retokenized[entry].tree() if self._tokens.by_text else super().tree(entry)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Convert committed tokens and keep their cached K and V; drop the state of requests that ended."""
        super().observe(outcomes)
        moves = list[Move]()
        for outcome in outcomes:
            text = self._spelled.get(outcome.request_id)
            if text is None or text.growth is None:
                continue
            growth, text.growth = text.growth, None
            kept = text.spelled.extend(outcome.committed)
            text.cached = min(text.cached, kept)
            if kept > text.root:
                moves.extend(self._accept(text, growth))
        self._runner.move(moves)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every block is free or belongs to one text."""
        self._blocks.check_integrity([text.table for text in (*self._spelled.values(), *self._ended)])

    def _growth(self, entry: PlanEntry) -> Growth:
        return Growth.shaped(entry, self.name, self._shape)

    def _unread(self, entries: Sequence[PlanEntry]) -> list[int]:
        if self._tokens.by_text:
            self._retokenized = [
                RetokenizedTree(self._tokens, growth.builder, growth.entry.max_depth)
                for growth in self._growths
            ]
        unread = list[int]()
        for entry in entries:
            text, length = self._spelled.get(entry.request.request_id), len(entry.token_ids)
            if text is None:
                unread.append(length)
            else:
                unread.append(max(1, length - text.spelled.taken + len(text.spelled.ids) - text.cached))
        return unread

    def _forget(self, request_id: str) -> None:
        if (text := self._spelled.pop(request_id, None)) is not None:
            text.growth = None
            self._keep(text)

    def _accept(self, text: _Text, growth: Growth) -> list[Move]:
        """Keep the K and V of the draft's nodes on the committed path; returns the needed moves."""
        path = growth.path(map(self._tokens.name, text.spelled.ids[text.root + 1 :]))
        text.cached = text.root + 1 + len(path)
        return moves_along(path, growth, text.root, text.table)

    def _read(self, entry: int, max_rows: int) -> Rows | None:
        """See LevelDraft; also None if the text fills the context or no block is free."""
        growth = self._growths[entry]
        text = self._text_of(growth.entry)
        ids = text.spelled.ids
        if not ids or len(ids) >= self._runner.max_context:
            return None
        if not text.spelled.whole:  # the text ends inside a character
            growth.limit = 0
        growth.limit = min(growth.limit, self._runner.max_context - len(ids))
        start = min(text.cached, len(ids) - 1)  # the root is always run
        end = min(len(ids), start + max_rows)
        nodes = growth.builder.max_nodes if growth.limit else 1
        if end <= start or not self._has_blocks(text, len(ids) - 1 + nodes):
            return None
        text.cached = end
        draws = end == len(ids) and growth.limit > 0
        if draws:
            text.growth, text.root = growth, len(ids) - 1
            growth.started = True
        return chain_rows(ids[start:end], start, text.table, logits=draws)

    def _chosen(self, entry: int, nodes: Sequence[int]) -> Rows:
        growth = self._growths[entry]
        if self._tokens.by_text:  # the draft's nodes that end in these nodes of the target's tree
            nodes = self._retokenized[entry].ending(growth.ends, nodes)
        text = self._spelled[growth.entry.request.request_id]
        rows = frontier_rows(growth, nodes, text.root, text.table)
        return replace(rows, token_ids=self._tokens.spelled(rows.token_ids))

    def _draw(self, parts: Sequence[tuple[int, Rows]], sites: Sequence[Site]) -> None:
        flight = self._runner.launch([rows for _, rows in parts])
        draw_children(flight, sites, self.name, self._tokens.vocabulary)

    def _ends(self, entry: int) -> Sequence[int]:
        ends = super()._ends(entry)
        return self._retokenized[entry].ends(ends) if ends and self._tokens.by_text else ends

    def _sites(self, entry: int) -> list[Site]:
        growth, sites = self._growths[entry], super()._sites(entry)
        if not self._tokens.by_text:
            return sites
        # Logit processors need the target's tokens; excluded tokens are pruned later instead.
        verifier = growth.entry.request.params.speculation.verifier
        rule = self._tokens.rule(draw_rule(verifier, self._shape.rule))
        end, tree = growth.entry.end, self._retokenized[entry]
        return [
            replace(site, rule=rule, processed=None, position=end + tree.length(site.node)) for site in sites
        ]

    def _text_of(self, entry: PlanEntry) -> _Text:
        """Return the entry's text up to the end of this step's tokens, in the draft's tokens."""
        text = self._spelled.get(entry.request.request_id)
        if text is None:
            text = self._spelled[entry.request.request_id] = _Text(self._tokens.respelling())
            text.spelled.extend(entry.token_ids[: entry.end])
            text.key = entry.block_hashes[0] if entry.block_hashes else b""
            self._take_over(text)
        else:
            if not text.key and entry.block_hashes:
                text.key = entry.block_hashes[0]
            kept = text.spelled.extend(entry.token_ids[text.spelled.taken : entry.end])
            text.cached = min(text.cached, kept)
        return text

    def _take_over(self, text: _Text) -> None:
        """Reuse the blocks of the ended text with the longest common prefix, if there is one.

        Only texts whose first block has the same hash qualify: the hash includes the cache salt.
        """
        best, longest = None, 0
        for ended in self._ended:
            if text.key and ended.key == text.key:
                length = common_length(ended.spelled.ids[: ended.cached], text.spelled.ids)
                if length > longest:
                    best, longest = ended, length
        if best is not None:
            self._ended = [ended for ended in self._ended if ended is not best]
            text.table, text.cached = best.table, longest

    def _keep(self, text: _Text) -> None:
        """Keep the blocks of an ended text for reuse, or free them if it is not reusable."""
        if not text.key:
            self._blocks.release(text.table)
            return
        self._ended.append(text)
        if len(self._ended) > _ENDED:
            self._blocks.release(self._ended.pop(0).table)

    def _has_blocks(self, text: _Text, positions: int) -> bool:
        """Extend a text's table, taking blocks from ended texts, then from texts that do not run now."""
        while not self._blocks.lengthen(text.table, positions):
            if self._ended:
                self._blocks.release(self._ended.pop(0).table)
                continue
            running = {growth.entry.request.request_id for growth in self._growths}
            idle = [one for name, one in self._spelled.items() if one.table and name not in running]
            if not idle:
                return False
            self._blocks.release(idle[0].table)
            idle[0].cached = 0
        return True


def common_length(some: Sequence[int], others: Sequence[int]) -> int:
    """Length of the longest common prefix of two lists, which are compared slice by slice."""
    length, end = 0, min(len(some), len(others))
    while length < end:
        middle = (length + end + 1) // 2
        if some[length:middle] == others[length:middle]:
            length = middle
        else:
            end = middle - 1
    return length


class RetokenizedTree:
    """One request's draft tree, retokenized into the target's tokens.

    The target's tokenizer encodes the bytes along a path of the draft's tree. A deeper level may merge tokens
    ("hel", "lo" -> "hello"); both tokenizations then remain, because a tree grown by levels may only grow.
    `draft` is a tree of names (draft_tokens.py).
    """

    def __init__(self, tokens: ForeignTokens, draft: TreeBuilder, max_depth: int) -> None:
        self._tokens, self._draft, self._max_depth = tokens, draft, max_depth
        self._builder = TreeBuilder(draft.root, draft.max_nodes)
        # For each node of `draft`: the bytes of its path (None after a special token, which ends the text),
        # its probability, and the number of the target's tokens of its path.
        self._bytes: list[bytes | None] = [b""]
        self._likely = [1.0]
        self._lengths = [0]
        self._at = [0]  # the node of this tree where its last whole token ends
        self._draws: dict[int, Draw] = {}
        self._seen = 0  # number of processed draws of `draft`

    def tree(self) -> TokenTree:
        """Return the present tree."""
        self.grow()
        return self._builder.build()

    def length(self, node: int) -> int:
        """Return the number of the target's tokens on the path of a node of the draft's tree."""
        self.grow()
        return self._lengths[node]

    def ending(self, nodes: Iterable[int], ends: Iterable[int]) -> list[int]:
        """Return those of the draft's `nodes` that end in one of this tree's `ends`."""
        wanted = frozenset(ends)
        return [node for node in nodes if self._at[node] in wanted]

    def ends(self, nodes: Iterable[int]) -> list[int]:
        """Return the nodes of this tree in which the draft's `nodes` end."""
        self.grow()
        return sorted({self._at[node] for node in nodes})

    def grow(self) -> None:
        """Retokenize the new nodes of the draft's tree."""
        for draw in self._draft.draws[self._seen :]:
            self._draws.setdefault(draw.node, draw)
        self._seen = len(self._draft.draws)
        for node in range(len(self._bytes), len(self._draft.parents)):
            self._add(node)

    def _add(self, node: int) -> None:
        tokens, draw = self._tokens, self._draws[node]
        parent, name = self._draft.parents[node], self._draft.token_ids[node]
        before = self._bytes[parent]
        self._likely.append(self._likely[parent] * min(max(draw.confidence, 0.0), 1.0))
        if before is None:
            self._bytes.append(None)
            self._lengths.append(self._lengths[parent])
            self._at.append(self._at[parent])
            return
        special = name < tokens.target_size and tokens.target.is_special(name)
        [token_id] = tokens.spelled([name])
        spelled = before if special else before + tokens.draft.token_bytes[token_id]
        path = tokens.target.encode_behind(complete(spelled)[0])
        if special:
            path.append(name)
        self._bytes.append(None if special else spelled)
        self._lengths.append(len(path))
        self._at.append(self._guess(path, node, draw))

    def _guess(self, path: list[int], last: int, draw: Draw) -> int:
        """Add the new tokens of a path, with probabilities from the draft's nodes in which they end.

        Returns the node in which the path ends, within the budget.
        """
        table = self._tokens.target.token_bytes
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
        """Return the first node on the path to `last` with `place` bytes, or `last` for a special token."""
        node, found = last, last
        while node > 0 and not special:
            node = self._draft.parents[node]
            if len(self._bytes[node] or b"") < place:
                break
            found = node
        return found


class TextBlocks:
    """Free blocks of a cache whose texts differ in length from the target's.

    If they run out, a text loses its blocks and is read again later, which costs guesses but never changes
    the output. The texts own their tables; this class extends and clears them.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))

    def lengthen(self, table: list[int], positions: int) -> bool:
        """Extend a table to `positions` positions, in place; returns False, unchanged, if blocks run out."""
        missing = -(-positions // self._block_size) - len(table)
        if missing > len(self._free):
            return False
        table.extend(self._free.pop() for _ in range(missing))
        return True

    def release(self, table: list[int]) -> None:
        """Free a table's blocks and clear it."""
        self._free.extend(reversed(table))
        table.clear()

    def check_integrity(self, tables: list[list[int]]) -> None:
        """Raise IntegrityError unless every block is free or in one of these tables, once."""
        held = [block for table in tables for block in table]
        ensure(
            sorted([*held, *self._free]) == list(range(self._num_blocks)),
            "every block of a draft's cache is free or belongs to one text",
        )
