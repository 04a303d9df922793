"""Reads contacts from a CSV file exported by the old address book."""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

EMAIL = re.compile(r"[^@\s]+@[^@\s]+\.[^@\s]+")
REQUIRED = ("first_name", "last_name", "email")


@dataclass(frozen=True)
class Contact:
    first_name: str
    last_name: str
    email: str
    phone: str | None = None

    @property
    def full_name(self) -> str:
        return f"{self.first_name} {self.last_name}"


class ImportFailed(Exception):
    pass


def read_contacts(path: Path) -> list[Contact]:
    """All contacts in a file, without duplicates; the first of two with one address wins."""
    contacts: dict[str, Contact] = {}
    for contact in _rows(path):
        contacts.setdefault(contact.email, contact)
    logger.info("read %d contacts from %s", len(contacts), path)
    return list(contacts.values())


def _rows(path: Path) -> Iterator[Contact]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [name for name in REQUIRED if name not in (reader.fieldnames or [])]
        if missing:
            raise ImportFailed(f"{path} lacks the columns {', '.join(missing)}")
        for number, row in enumerate(reader, start=2):
            email = row["email"].strip().lower()
            if not EMAIL.fullmatch(email):
                raise ImportFailed(f"{path}, line {number}: {email!r} is not an email address")
            if not row["first_name"] and not row["last_name"]:
                raise ImportFailed(f"{path}, line {number}: the contact has no name")
            yield Contact(
                first_name=row["first_name"].strip(),
                last_name=row["last_name"].strip(),
                email=email,
                phone=_phone(row.get("phone")),
            )


def _phone(text: str | None) -> str | None:
    """Digits with an optional plus in front, or None."""
    if not text:
        return None
    digits = re.sub(r"[^\d+]", "", text)
    return digits or None
