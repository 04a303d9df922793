"""Invoices: lines, discounts, taxes and the text that is mailed."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date, timedelta

TAX_RATES = {"standard": 0.19, "reduced": 0.07, "none": 0.0}


@dataclass(frozen=True)
class Line:
    description: str
    amount: float
    price: float
    tax: str = "standard"

    @property
    def net(self) -> float:
        return round(self.amount * self.price, 2)


@dataclass
class Invoice:
    number: str
    customer: str
    issued: date
    lines: list[Line] = field(default_factory=list)
    discount: float = 0.0

    @property
    def due(self) -> date:
        return self.issued + timedelta(days=30)

    @property
    def net(self) -> float:
        return round(sum(line.net for line in self.lines) * (1 - self.discount), 2)

    def taxes(self) -> dict[str, float]:
        """Tax by rate, rates without lines left out."""
        sums: dict[str, float] = {}
        for line in self.lines:
            share = line.net * (1 - self.discount) * TAX_RATES[line.tax]
            sums[line.tax] = sums.get(line.tax, 0.0) + share
        return {name: round(value, 2) for name, value in sums.items() if value}

    @property
    def total(self) -> float:
        return round(self.net + sum(self.taxes().values()), 2)

    def text(self) -> str:
        rows = [
            f"Invoice {self.number}",
            f"To: {self.customer}",
            f"Date: {self.issued:%d %B %Y}",
            "",
        ]
        for position, line in enumerate(self.lines, start=1):
            rows.append(
                f"{position:>3} {line.description:<40}{line.amount:>8g}{line.price:>10.2f}{line.net:>10.2f}"
            )
        rows.append("")
        if self.discount:
            rows.append(f"{'Discount':<61}{self.discount:>10.0%}")
        rows.append(f"{'Net':<61}{self.net:>10.2f}")
        for name, tax in self.taxes().items():
            rows.append(f"{f'Tax ({name}, {TAX_RATES[name]:.0%})':<61}{tax:>10.2f}")
        rows.append(f"{'Total':<61}{self.total:>10.2f}")
        rows.append("")
        rows.append(f"Please pay until {self.due:%d %B %Y}.")
        return "\n".join(rows)
