from specinfer.grammar.gbnf import Alternation, Literal, Reference, Repeat, Sequence, in_use, references

A = Literal("a")


def test_the_names_a_body_mentions_are_listed_in_order():
    body = Alternation(
        (Sequence((Reference("c"), A)), Repeat(Alternation((Reference("b"), Reference("c"))), 0, None))
    )
    assert list(references(body)) == ["c", "b", "c"]
    assert list(references(A)) == []


def test_rules_in_use_are_listed_once_from_the_start():
    rules = {"start": Sequence((Reference("b"), Reference("c"))), "b": Reference("c"), "c": A, "d": A}
    assert in_use(rules, "start") == ["start", "b", "c"]
