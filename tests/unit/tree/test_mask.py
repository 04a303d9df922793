"""Who sees whom, as matrices: row i has a 1 in column j where i sees j."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specinfer.tree.mask import ancestor_matrix, chain_then_tree


def rows(*lines: str) -> list[list[bool]]:
    return [[c == "1" for c in line.split()] for line in lines]


#      0
#     / \
#    1   2
#    |  / \
#    3 4   5
PARENTS = [-1, 0, 0, 1, 2, 2]


def test_a_node_sees_its_ancestors_and_itself() -> None:
    assert ancestor_matrix(PARENTS).tolist() == rows(
        "1 . . . . .",
        "1 1 . . . .",
        "1 . 1 . . .",
        "1 1 . 1 . .",
        "1 . 1 . 1 .",
        "1 . 1 . . 1",
    )


def test_a_chain_is_causal() -> None:
    assert ancestor_matrix([-1, 0, 1]).tolist() == rows("1 . .", "1 1 .", "1 1 1")
    assert ancestor_matrix([-1]).tolist() == [[True]]


def test_text_then_a_tree_whose_root_ends_the_text() -> None:
    # Tokens a b c, and below c the nodes d and e, side by side.
    assert chain_then_tree(3, [-1, 0, 0]).tolist() == rows(
        "1 . . . .",
        "1 1 . . .",
        "1 1 1 . .",
        "1 1 1 1 .",
        "1 1 1 . 1",
    )


def test_a_text_of_one_token_is_the_root() -> None:
    assert chain_then_tree(1, PARENTS).tolist() == ancestor_matrix(PARENTS).tolist()


@given(st.integers(1, 5), st.data())
def test_a_text_and_its_tree_are_one_tree(chain: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 8))
    parents = [-1, *(data.draw(st.integers(0, node - 1)) for node in range(1, size))]
    whole = [*range(-1, chain - 1), *(parent + chain - 1 for parent in parents[1:])]
    assert chain_then_tree(chain, parents).tolist() == ancestor_matrix(whole).tolist()
