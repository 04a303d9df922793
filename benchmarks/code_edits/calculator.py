"""Evaluates arithmetic such as `2 * (3 + 4) - x`."""

from __future__ import annotations

import re
from collections.abc import Mapping

TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?)|([A-Za-z_]\w*)|(.))")


class CalculationError(Exception):
    pass


def tokenize(text: str) -> list[tuple[str, str]]:
    tokens = []
    for number, name, symbol in TOKEN.findall(text.rstrip()):
        if number:
            tokens.append(("number", number))
        elif name:
            tokens.append(("name", name))
        elif symbol in "+-*/()":
            tokens.append(("symbol", symbol))
        else:
            raise CalculationError(f"unexpected character {symbol!r}")
    tokens.append(("end", ""))
    return tokens


class Calculator:
    """A recursive descent parser that computes while it reads."""

    def __init__(self, text: str, variables: Mapping[str, float]) -> None:
        self._tokens = tokenize(text)
        self._variables = variables
        self._at = 0

    def run(self) -> float:
        value = self._sum()
        kind, text = self._tokens[self._at]
        if kind != "end":
            raise CalculationError(f"unexpected {text!r}")
        return value

    def _take(self, *symbols: str) -> str | None:
        kind, text = self._tokens[self._at]
        if kind == "symbol" and text in symbols:
            self._at += 1
            return text
        return None

    def _sum(self) -> float:
        value = self._product()
        while symbol := self._take("+", "-"):
            right = self._product()
            value = value + right if symbol == "+" else value - right
        return value

    def _product(self) -> float:
        value = self._factor()
        while symbol := self._take("*", "/"):
            right = self._factor()
            if symbol == "*":
                value *= right
            elif right == 0:
                raise CalculationError("division by zero")
            else:
                value /= right
        return value

    def _factor(self) -> float:
        if self._take("-"):
            return -self._factor()
        if self._take("("):
            value = self._sum()
            if not self._take(")"):
                raise CalculationError("a parenthesis is not closed")
            return value
        kind, text = self._tokens[self._at]
        self._at += 1
        if kind == "number":
            return float(text)
        if kind == "name":
            if text not in self._variables:
                raise CalculationError(f"{text} has no value")
            return self._variables[text]
        raise CalculationError(f"expected a number, got {text or 'the end'!r}")


def calculate(text: str, **variables: float) -> float:
    return Calculator(text, variables).run()
