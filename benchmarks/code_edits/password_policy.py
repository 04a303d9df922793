"""Which passwords new accounts may have."""

from __future__ import annotations

import math
import string
from dataclasses import dataclass

MIN_LENGTH = 8
MAX_LENGTH = 128
SYMBOLS = string.punctuation
COMMON = frozenset(
    {
        "password",
        "12345678",
        "123456789",
        "qwertyui",
        "iloveyou",
        "sunshine",
        "football",
        "trustno1",
    }
)


@dataclass(frozen=True)
class Finding:
    """One reason to refuse a password."""

    code: str
    message: str


def check(password: str, username: str = "") -> list[Finding]:
    """Everything that is wrong with a password; an empty list when it may be used."""
    findings = []
    if len(password) < MIN_LENGTH:
        findings.append(Finding("too_short", f"Use at least {MIN_LENGTH} characters."))
    if len(password) > MAX_LENGTH:
        findings.append(Finding("too_long", f"Use at most {MAX_LENGTH} characters."))
    if password.lower() in COMMON:
        findings.append(Finding("common", "This password is among the most common ones."))
    if username and username.lower() in password.lower():
        findings.append(Finding("contains_username", "The password contains your user name."))
    if not any(c.isdigit() for c in password):
        findings.append(Finding("no_digit", "Use at least one digit."))
    if not any(c.isupper() for c in password):
        findings.append(Finding("no_upper", "Use at least one upper-case letter."))
    if not any(c.islower() for c in password):
        findings.append(Finding("no_lower", "Use at least one lower-case letter."))
    return findings


def entropy_bits(password: str) -> float:
    """A rough guess at the password's strength, from its length and the characters in it."""
    alphabet = 0
    if any(c.islower() for c in password):
        alphabet += 26
    if any(c.isupper() for c in password):
        alphabet += 26
    if any(c.isdigit() for c in password):
        alphabet += 10
    if any(c in SYMBOLS for c in password):
        alphabet += len(SYMBOLS)
    return len(password) * math.log2(alphabet) if alphabet else 0.0


def strength(password: str) -> str:
    bits = entropy_bits(password)
    if bits < 40:
        return "weak"
    if bits < 70:
        return "fair"
    return "strong"
