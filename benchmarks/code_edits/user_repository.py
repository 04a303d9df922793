"""Users in SQLite."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from datetime import UTC, datetime

SCHEMA = """
CREATE TABLE IF NOT EXISTS users (
    id INTEGER PRIMARY KEY,
    email TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL,
    created_at TEXT NOT NULL
);
"""


@dataclass(frozen=True)
class User:
    id: int
    email: str
    name: str
    created_at: datetime


class DuplicateEmail(Exception):
    pass


class UserRepository:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._connection.row_factory = sqlite3.Row
        self._connection.executescript(SCHEMA)

    def add(self, email: str, name: str) -> User:
        now = datetime.now(UTC)
        try:
            with self._connection:
                cursor = self._connection.execute(
                    "INSERT INTO users (email, name, created_at) VALUES (?, ?, ?)",
                    (email.lower(), name, now.isoformat()),
                )
        except sqlite3.IntegrityError as error:
            raise DuplicateEmail(email) from error
        assert cursor.lastrowid is not None
        return User(cursor.lastrowid, email.lower(), name, now)

    def get(self, user_id: int) -> User | None:
        row = self._connection.execute("SELECT * FROM users WHERE id = ?", (user_id,)).fetchone()
        return _user(row) if row else None

    def by_email(self, email: str) -> User | None:
        row = self._connection.execute("SELECT * FROM users WHERE email = ?", (email.lower(),)).fetchone()
        return _user(row) if row else None

    def search(self, text: str, limit: int = 20) -> list[User]:
        rows = self._connection.execute(
            "SELECT * FROM users WHERE name LIKE ? ORDER BY name LIMIT ?", (f"%{text}%", limit)
        )
        return [_user(row) for row in rows]

    def rename(self, user_id: int, name: str) -> bool:
        with self._connection:
            cursor = self._connection.execute("UPDATE users SET name = ? WHERE id = ?", (name, user_id))
        return cursor.rowcount == 1

    def delete(self, user_id: int) -> bool:
        with self._connection:
            cursor = self._connection.execute("DELETE FROM users WHERE id = ?", (user_id,))
        return cursor.rowcount == 1

    def count(self) -> int:
        [number] = self._connection.execute("SELECT COUNT(*) FROM users").fetchone()
        return int(number)


def _user(row: sqlite3.Row) -> User:
    return User(row["id"], row["email"], row["name"], datetime.fromisoformat(row["created_at"]))
