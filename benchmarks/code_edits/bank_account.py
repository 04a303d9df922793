"""Accounts of a club's treasury."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date


@dataclass(frozen=True)
class Entry:
    day: date
    cents: int
    text: str


@dataclass
class Account:
    """An account in cents; its history is only ever appended to."""

    owner: str
    limit: int = 0
    history: list[Entry] = field(default_factory=list)

    @property
    def balance(self) -> int:
        return sum(entry.cents for entry in self.history)

    def deposit(self, cents: int, text: str, day: date) -> None:
        if cents <= 0:
            raise ValueError(f"cannot deposit {cents} cents")
        self.history.append(Entry(day, cents, text))

    def withdraw(self, cents: int, text: str, day: date) -> bool:
        """Take money out; False when the account does not hold enough."""
        if cents <= 0:
            raise ValueError(f"cannot withdraw {cents} cents")
        if self.balance - cents < -self.limit:
            return False
        self.history.append(Entry(day, -cents, text))
        return True

    def statement(self) -> str:
        lines = [f"Account of {self.owner}"]
        running = 0
        for entry in self.history:
            running += entry.cents
            lines.append(
                f"{entry.day:%Y-%m-%d}  {entry.text:<30}{entry.cents / 100:>10.2f}{running / 100:>10.2f}"
            )
        return "\n".join(lines)


def transfer(source: Account, target: Account, cents: int, text: str, day: date) -> bool:
    """Move money between two accounts; False when the source does not hold enough."""
    if source is target:
        raise ValueError("source and target are the same account")
    if not source.withdraw(cents, f"to {target.owner}: {text}", day):
        return False
    target.deposit(cents, f"from {source.owner}: {text}", day)
    return True


def collect_fees(members: list[Account], club: Account, cents: int, day: date) -> list[str]:
    """Charge every member; returns the names of those who could not pay."""
    unpaid = []
    for member in members:
        paid = transfer(member, club, cents, "membership fee", day)
        if not paid:
            unpaid.append(member.owner)
    return unpaid
