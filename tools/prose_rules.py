"""Rules of prose.py: patterns that no sentence may contain, each with a bad and a good example."""

from __future__ import annotations

import re
from dataclasses import dataclass

_START = r"^(?:[\"'(*-]+\s*)?"


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern, case-insensitive, that no sentence may contain.

    `bad` is a sentence with a match and `good` a better one without; the tests check both.
    """

    pattern: str
    advice: str
    bad: str
    good: str

    def find(self, sentence: str) -> str | None:
        """Return the first match of the pattern, or None."""
        found = re.search(self.pattern, sentence, re.IGNORECASE)
        return found and found[0].strip()


RULES = (
    Rule(
        _START + r"(?:what|who|whose|whoever|whatever|that which|where|wherever)\b(?!.*\?)",
        "begin with the noun",
        "What a target's passes leave for heads.",
        "Hidden-state cache for draft heads.",
    ),
    Rule(
        _START + r"of (?!course\b)(?:\S+ ){5}",  # not "of the target" beside a field
        "begin with the noun",
        "Of each request the tokens it has.",
        "Tokens of each request.",
    ),
    Rule(
        r": (?:what|who|whose|whoever|whatever|of) (?!.*\?)",
        "name the thing after the colon",
        "The cache: what heads read.",
        "The cache: hidden states for heads.",
    ),
    Rule(
        r"\b(?:of|for|to|by|from|with|behind|beside|below|in|on) (?:whom|who|whoever|whichever)\b",
        "name the person or the object",
        "The loop belongs to whoever started it.",
        "The loop belongs to the thread that started it.",
    ),
    Rule(
        r"\b(?:of|for|to|by|from|with|behind|beside|than|like|as) what\b",
        "name the thing",
        "A copy of what was sent.",
        "A copy of the request.",
    ),
    Rule(
        r"\b(?:of|behind|beside) which\b",
        "use two sentences, or 'whose'",
        "A row, of which the last column is zero.",
        "A row whose last column is zero.",
    ),
    Rule(
        r"\b(?:nobody|anybody|somebody|everybody|whom)\b",
        "name the actor: the caller, a request, a draft",
        "A size that nobody asks for.",
        "A size that no request sets.",
    ),
    Rule(
        r"\bas (?:it is|they are)(?=[,.;:)]|$)",
        "say 'unchanged'",
        "Text is kept as it is.",
        "Text is unchanged.",
    ),
    Rule(
        r"\bso (?:much|many)\b|\bso far (?:in|into|apart|behind|below)\b|\bas (?:much|many|far) as that\b",
        "give the measure",
        "A row so far into its text costs more.",
        "A row at position 2,000 costs more.",
    ),
    Rule(
        r"\b(?:hope[sd]?|hoping|doubts?|loudness|retold|untold|kin|keepers?|curiosity|doorway)\b",
        "coined word: use the field's (acceptance probability, norm scale, retokenized, kind)",
        "The hope of a node.",
        "The acceptance probability of a node.",
    ),
    Rule(
        r"\b(?:heat|heated|heats)\b",
        "coined word: temperature",
        "Rates by heat.",
        "Acceptance rates by temperature.",
    ),
    Rule(
        r"(?<!front )\b(?:doors?|rooms)\b|\bfront doors?\b",
        "unexplained metaphor: say package, folder, function or interface",
        "The one door to the library.",
        "The one function that loads the library.",
    ),
    Rule(
        r"\b(?:an?|the|its|each|every|one|two|of|whose|row's|his) asks?\b|\basks? of\b",
        "coined noun: sampling request",
        "Each ask of a row.",
        "Each sampling request of a row.",
    ),
    Rule(
        r"\b(?:tells?|told|telling)\b(?! apart)",
        "returns, shows, reports, commits",
        "The engine tells the text.",
        "The engine returns the text.",
    ),
    Rule(
        r"\b(?:believe[sd]?|thinks?|thought|hears?|heard|knew|wish(?:es|ed)?|dares?|owes?)\b",
        "software does not think: returns, reads, checks, needs",
        "The policy believes the draft.",
        "The policy uses the draft's probability.",
    ),
    Rule(
        r"\b(?:wants?|wanted|minds)\b",
        "needs, requests, must have",
        "The kernel wants two rows.",
        "The kernel needs two rows.",
    ),
    Rule(
        r"\b(?:is|are|was|were|be|been|being) asked\b|\basked (?!for\b)|\basks (?!for\b)",
        "requests, calls, reads, requires",
        "The policy is asked first.",
        "The engine calls the policy first.",
    ),
    Rule(
        r"\b(?:that|which|it|they) (?:is|are|was|were) (?:(?-i:none)|no \w+|nothing)\b",
        "say what it is",
        "An id that is none.",
        "An invalid id.",
    ),
    Rule(
        r"\b(?:nothing|none|nowhere) (?:but|else)\b|\bno \w+ but\b",
        "say 'only'",
        "Mask tokens are nothing but places.",
        "Mask tokens only mark positions.",
    ),
    Rule(
        r"\bof (?:ours|theirs|yours|mine)\b"
        r"|\bof (?:its|their|his) own(?= (?:and|for|in|on|with|that|to|as|at)\b|[^\w\s]|$)",
        "say 'its own X' or name the owner",
        "A salt of its own.",
        "Its own salt.",
    ),
    Rule(
        r"\bthe (?:most|least|fewest) of\b|\b(?:the )?(?:most|least) (?:that|there)\b",
        "say 'largest' or 'smallest'",
        "The most of a tree's nodes.",
        "Largest node budget of a tree.",
    ),
    Rule(
        r"\b(?:anew|lest|ere|save for|albeit|hither|forthwith)\b",
        "archaic",
        "It is made anew.",
        "It is rebuilt.",
    ),
    Rule(
        r"\b(?:e\.g\.|i\.e\.|viz\.|resp\.|cf\.)",
        "write 'for example' or 'that is'",
        "Heads, e.g. EAGLE.",
        "Heads such as EAGLE.",
    ),
    Rule(r"[^\x00-\x7f]", "ASCII only", "A \u00d7 B", "A x B"),
)
