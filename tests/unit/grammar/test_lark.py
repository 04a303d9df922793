import pytest

from specinfer.grammar.lark import lark_of
from specinfer.structured_output import structured_output

JSON = 'start: %json {"type": "object", "x-guidance": {"whitespace_pattern": " |\\\\n[ \\\\t]{0,32}"}}'


@pytest.mark.parametrize(
    ("asked", "lark"),
    [
        ({"regex": "a/b"}, r"start: /a\/b/"),
        ({"choice": ["a|b", "1"]}, r"start: /a\x{7C}b|1/"),
        ({"grammar": 'start: "a" b\nb: /x/'}, 'start: "a" b\nb: /x/'),
        ({"grammar": 'root ::= "a"?'}, "start: /(?:a){0,1}/"),
        ({"response_format": {"type": "json_object"}}, JSON),
    ],
)
def test_forms_are_written_as_lark(asked, lark):
    assert lark_of(structured_output(**asked)) == lark
