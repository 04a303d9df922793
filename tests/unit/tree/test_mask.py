"""Who sees whom, as matrices: row i has a 1 in column j where i sees j."""

from __future__ import annotations

from specinfer.tree.mask import ancestor_matrix


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
