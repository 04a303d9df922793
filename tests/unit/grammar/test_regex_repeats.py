import pytest

from specinfer.grammar.ecma_regex import largest_repeat


@pytest.mark.parametrize(
    ("regex", "product"),
    [
        ("", 1),
        ("a*b+c?", 1),
        ("a{7}", 7),
        ("a{2,9}", 9),
        ("a{4,}", 4),
        ("a{3}b{5}", 5),
        ("(a{3}b{5})", 5),
        ("(a{3}b{5}){2}c{4}", 10),
        ("((a{1,100}){1,100}){1,100}", 10**6),
        ("(?:a{3}|b){0}", 3),
        ("(a{3})*{2}", 6),
        (r"[(\]{9}]{2}", 2),
        (r"[]{9}]{2}", 2),
        (r"\({9}", 9),
        (r"\x{41}{2}", 2),
        (r"\p{Greek}{3}", 3),
        ("a){3}(b{2}", 3),
        ("[a{9}", 1),
    ],
)
def test_repeats_inside_one_another_multiply(regex, product):
    assert largest_repeat(regex) == product
