"""BoundedEnvironment: a Jinja sandbox with limits on time and memory.

A chat template is untrusted code, and Python cannot interrupt a single operation. So no operation starts that
could take long. Steps of loops, calls, filters and operators are counted, as are the characters they produce
and
the seconds since the template began. Operations that produce much output from little input (`'a' * 10**9`,
`center`, `'%9999999d'`) are checked first. A value is weighed before it is written or compared: a list that
contains another list twice, which contains a third twice, and so on, is small in memory and huge as text.
"""

from __future__ import annotations

import functools
import json
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from jinja2 import nodes, pass_context
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from specinfer.tokenizer.template_budget import MAX_BITS, NODE_WEIGHT, BoundsError, Budget

_MAX_DIGITS: Final = 300  # in a rounded number
_MAX_INDENT: Final = 16
# characters to strip; each is searched for at each end, per character of the text
_MAX_STRIPPED: Final = 1000
_MAX_WIDTH: Final = 10_000  # characters per formatted value
_MAX_FLOAT: Final = 400  # characters of the longest float
_PERCENT = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\d*)(?:\.(\d*))?")
# Filter names with a blank, so that no template can use them.
_STEP, _CONCAT, _MADE, _WEIGHED = "a step", "a concatenation", "a value made", "a value weighed"
_REMOVED_FILTERS = ("pprint", "striptags", "urlize")  # for web pages, and slow on long texts
# Filters that make a list of a text's characters or words.
_SPLITTING = frozenset(
    {"batch", "groupby", "list", "map", "max", "min", "reject", "rejectattr", "select", "selectattr", "slice"}
    | {"sort", "sum", "title", "unique", "wordcount"}
)
_CODECS = frozenset({"utf-8", "utf8", "ascii", "latin-1"})  # others may be slow


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with bounded templates; call `budget.begin` before rendering one."""

    intercepted_binops = frozenset({"*", "+", "%", "**"})

    def __init__(self, **options: Any) -> None:
        self.budget = Budget()
        # `optimized=False`: the compiler evaluates no constant expressions.
        super().__init__(optimized=False, finalize=self._written, **options)
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters["tojson"] = self._to_json
        self.filters = {name: self._filter(name, function) for name, function in self.filters.items()}
        tests: dict[str, Any] = dict(self.tests)
        self.tests = {name: self._filter(name, function) for name, function in tests.items()}
        self.filters |= {
            _STEP: self._spend,
            _CONCAT: self._concat,
            _MADE: self.budget.made,
            _WEIGHED: self._weighed,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return parsed

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Evaluate an operator whose result may be large."""
        budget = self.budget
        budget.step()
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(other, int) and not isinstance(one, (int, float)):
                    budget.check_size(budget.weigh(one) * max(0, other))
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_BITS:
                raise BoundsError("it makes too large a number")
        elif operator == "%" and isinstance(left, (str, bytes)):
            self._check_percent(left, right)
        elif operator == "+":
            budget.check_size(budget.weigh(left) + budget.weigh(right))
        return budget.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function, macro or method."""
        budget = __self.budget
        budget.step()
        args = tuple(map(_listed, args))
        for value in (*args, *kwargs.values()):
            budget.weigh(value)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, (str, bytes)):
            __self._check_text(owner, name, [*args, *kwargs.values()])
        elif isinstance(owner, int) and name == "to_bytes":
            budget.check_size(
                max([value for value in (*args, *kwargs.values()) if isinstance(value, int)], default=0)
            )
        elif owner is not None:
            budget.weigh(owner)
        return budget.made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` with a check of the size of its result."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            values = [*args, *kwargs.values()]
            if value.__name__ == "format_map" and values and isinstance(values[0], Mapping):
                values = list(values[0].values())
            fields = 0
            for _, field, spec, _ in string.Formatter().parse(value.__self__):
                fields += field is not None
                widths = [int(digits) for digits in re.findall(r"\d{1,9}", spec or "")]
                if (
                    "{" in (spec or "")
                    or max(widths, default=0) > _MAX_WIDTH
                    or re.search(r"[.\[]", field or "")
                ):
                    raise BoundsError("it formats more than plain fields")
            self._check_fields(fields, len(value.__self__), values)
            return formatted(*args, **kwargs)

        return bounded

    def _check_percent(self, text: str | bytes, given: Any) -> None:
        """Check the size of `text % given`."""
        plain = text if isinstance(text, str) else text.decode("latin-1")
        fields = _PERCENT.findall(plain)
        if "*" in plain or any(int(digits[:9] or 0) > _MAX_WIDTH for field in fields for digits in field):
            raise BoundsError("it formats more than plain fields")
        values = (
            given.values() if isinstance(given, Mapping) else given if isinstance(given, tuple) else [given]
        )
        self._check_fields(len(fields), len(plain), values)

    def _check_fields(self, fields: int, length: int, values: Iterable[Any]) -> None:
        longest = max(map(self.budget.weigh, values), default=0)
        self.budget.check_size(length + fields * (longest + _MAX_FLOAT) if fields else length)
        self.budget.check_size(fields * _MAX_WIDTH if fields > 1000 else 0)

    def _check_text(self, text: str | bytes, name: str, args: Sequence[Any]) -> None:
        """Check the size of the result of a text method."""
        numbers = [value for value in args if isinstance(value, int)]
        if name in ("ljust", "rjust", "center", "zfill"):
            self.budget.check_size(max(numbers, default=0))
        elif name == "expandtabs":
            self.budget.check_size(len(text) * max([8, *numbers]))
        elif name == "replace":
            self.budget.check_size(_replaced(text, *args))
        elif name == "join" and args:
            self.budget.check_size(self.budget.weigh(args[0]) + len(text) * len(args[0]))
        elif name in ("split", "rsplit", "splitlines"):
            separator: Any = next((one for one in args if isinstance(one, (str, bytes)) and one), None)
            places = len(text) // 8 if separator is None else text.count(separator)
            self.budget.check_size(NODE_WEIGHT * places)
        elif name in ("encode", "decode") and not _CODECS.issuperset(args):
            raise BoundsError(f"it encodes texts in ways other than {', '.join(sorted(_CODECS))}")
        elif name == "translate":
            raise BoundsError("it calls translate")
        elif name in ("strip", "lstrip", "rstrip"):
            _check_strip(*args[:1])

    def _filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter or test: count its calls, and check the size of its result first."""
        # Jinja passes its context or environment first
        first = getattr(function, "jinja_pass_arg", None) is not None
        check_size = _SIZES.get(name)

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            budget = self.budget
            budget.step()
            given = [_listed(value) for value in args[first:]]
            for value in (*given, *kwargs.values()):
                budget.weigh(value)
            if name in _SPLITTING and isinstance(given[0], str):
                budget.check_size(NODE_WEIGHT * len(given[0]))
            if name == "format":
                self._check_percent(str(given[0]), kwargs or tuple(given[1:]))
            elif check_size is not None:
                budget.check_size(check_size(budget.weigh(given[0]), *given, **kwargs))
            return budget.made(_listed(function(*args[:first], *given, **kwargs)))

        return counted

    def _spend(self, size: int) -> None:
        """Count one loop iteration or macro call whose literal text has `size` characters."""
        self.budget.step()
        self.budget.spend(size)

    @pass_context
    def _written(self, context: Context, value: Any) -> Any:
        budget = self.budget
        if isinstance(value, str):
            return budget.made(value)
        budget.weigh(value)
        return budget.made(str(value))

    def _weighed(self, value: Any) -> Any:
        if not isinstance(value, str):
            self.budget.step()
            self.budget.weigh(value)
        return value

    def _concat(self, values: Sequence[Any]) -> str:
        self.budget.check_size(sum(map(self.budget.weigh, values)))
        text: str = self.budget.made("".join(map(str, values)))
        return text

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own tojson escapes for HTML, which would show in the prompt.
        if (len(indent) if isinstance(indent, str) else indent or 0) > _MAX_INDENT:
            raise BoundsError(f"it indents JSON by more than {_MAX_INDENT}")
        if separators is not None and any(len(one) > _MAX_INDENT for one in separators):
            raise BoundsError("it separates JSON by long texts")
        if indent is None:
            return json.dumps(value, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        pieces, size = [], 0
        for piece in encoder.iterencode(value):  # indentation may be most of the text
            pieces.append(piece)
            size += len(piece)
            self.budget.check_size(size)
        return "".join(pieces)


class _Counting(NodeTransformer):
    """Inserts calls into a template that count its steps."""

    def _counted(self, node: Any) -> Any:
        size = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_applied(_STEP, nodes.Const(size)), lineno=node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _counted

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _applied(_CONCAT, nodes.List(node.nodes, lineno=node.lineno))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _applied(_MADE, node)
        if not isinstance(node.arg, nodes.Const):  # a tuple of tuples takes long to hash
            node.arg = _applied(_WEIGHED, node.arg)
        return node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        self.generic_visit(node)
        for pair in node.items:
            pair.key = _applied(_WEIGHED, pair.key)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:
        self.generic_visit(node)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        if len(sides) > 2 or not any(isinstance(side, nodes.Const) for side in sides):
            node.expr = _applied(_WEIGHED, node.expr)
            for operand in node.ops:
                operand.expr = _applied(_WEIGHED, operand.expr)
        return node


def _applied(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _listed(value: Any) -> Any:
    """Turn an iterator into a list, except Jinja's loop context."""
    return list(value) if isinstance(value, Iterator) and not isinstance(value, LoopContext) else value


def _replaced(text: Any, old: Any = "", new: Any = "", count: Any = None) -> int:
    """Length of a text after a replacement."""
    if not isinstance(text, (str, bytes)):
        text, old, new = str(text), str(old), str(new)
    places = text.count(old)
    if isinstance(count, int) and count >= 0:
        places = min(places, count)
    size: int = len(text) + places * len(new)
    return size


def _check_strip(characters: Any = None) -> None:
    if isinstance(characters, (str, bytes)) and len(characters) > _MAX_STRIPPED:
        raise BoundsError(f"it strips more than {_MAX_STRIPPED} characters of a text")


def _trimmed(weight: int, text: Any, chars: Any = None) -> int:
    _check_strip(chars)
    return weight


def _lines(weight: int, text: Any, width: Any = 4, *args: Any, **kwargs: Any) -> int:
    size = len(width) if isinstance(width, str) else int(width)
    return weight + (str(text).count("\n") + 1) * size


def _digits(weight: int, value: Any, precision: Any = 0, *args: Any, **kwargs: Any) -> int:
    if abs(precision) > _MAX_DIGITS:
        raise BoundsError(f"it rounds to more than {_MAX_DIGITS} digits")
    return 0


def _summed(weight: int, value: Any, attribute: Any = None, start: Any = 0) -> int:
    # Each addition of lists copies those before.
    return 0 if isinstance(start, (int, float)) else weight * (len(value) + 1)


def _wrapped(text: Any, width: Any, end: Any) -> int:
    # Cutting a long word copies the rest of it at every line.
    longest = max(map(len, str(text).split()), default=0)
    return len(str(text)) * (NODE_WEIGHT + len(end or "")) + longest * longest // max(1, int(width))


# Bounds of the size of these filters' results, given the weight of their input.
_SIZES: Final[Mapping[str, Callable[..., int]]] = {
    "batch": lambda weight, value, linecount, *fill, **more: NODE_WEIGHT * int(linecount),
    "center": lambda weight, text, width=80: weight + int(width),
    "indent": _lines,
    "join": lambda weight, values, d="", attribute=None: (
        weight + len(str(d)) * (len(values) if hasattr(values, "__len__") else 1)
    ),
    "replace": lambda weight, text, *args, **kwargs: _replaced(text, *args, **kwargs),
    "round": _digits,
    "slice": lambda weight, value, slices, *fill, **more: NODE_WEIGHT * int(slices),
    "sum": _summed,
    "trim": _trimmed,
    "wordwrap": lambda weight, text, width=79, break_long_words=True, wrapstring=None, **more: _wrapped(
        text, width, wrapstring
    ),
}
