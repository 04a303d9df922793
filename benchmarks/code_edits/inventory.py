"""Stock levels of a small warehouse and what has to be ordered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


class OutOfStock(Exception):
    """Raised when more is taken than there is."""


@dataclass
class Item:
    sku: str
    name: str
    quantity: int
    reorder_level: int
    unit_price: float

    def value(self) -> float:
        return self.quantity * self.unit_price

    def needs_reorder(self) -> bool:
        return self.quantity <= self.reorder_level


class Inventory:
    def __init__(self, items: Iterable[Item] = ()) -> None:
        self._items = {item.sku: item for item in items}

    def add(self, item: Item) -> None:
        known = self._items.get(item.sku)
        if known is None:
            self._items[item.sku] = item
        else:
            known.quantity += item.quantity

    def take(self, sku: str, count: int) -> None:
        item = self._items[sku]
        if item.quantity < count:
            raise OutOfStock(f"{item.name}: {count} wanted, {item.quantity} left")
        item.quantity -= count

    def total_value(self) -> float:
        return sum(item.value() for item in self._items.values())

    def to_reorder(self) -> list[Item]:
        found = [item for item in self._items.values() if item.needs_reorder()]
        return sorted(found, key=lambda item: item.quantity - item.reorder_level)

    def report(self) -> str:
        lines = [f"{'SKU':<10}{'Name':<24}{'Stock':>8}{'Value':>12}"]
        for item in sorted(self._items.values(), key=lambda item: item.sku):
            mark = " *" if item.needs_reorder() else ""
            lines.append(f"{item.sku:<10}{item.name:<24}{item.quantity:>8}{item.value():>12.2f}{mark}")
        lines.append(f"{'Total':<42}{self.total_value():>12.2f}")
        return "\n".join(lines)


def demo() -> None:
    inventory = Inventory(
        [
            Item("BLT-08", "Bolt M8", quantity=340, reorder_level=100, unit_price=0.12),
            Item("NUT-08", "Nut M8", quantity=80, reorder_level=100, unit_price=0.05),
            Item("WSH-08", "Washer M8", quantity=510, reorder_level=200, unit_price=0.02),
        ]
    )
    inventory.take("BLT-08", 250)
    print(inventory.report())


if __name__ == "__main__":
    demo()
