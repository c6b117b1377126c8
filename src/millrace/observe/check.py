"""The claims that a command checks at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text


@dataclass(frozen=True)
class Check:
    """One claim: whether the claim holds, and its numbers."""

    claim: str
    holds: bool
    detail: str


def print_checks(console: Console, checks: Sequence[Check]) -> bool:
    """One line each. Returns whether all hold."""
    for check in checks:
        word = ("PASS", "green") if check.holds else ("FAIL", "red")
        console.print(Text.assemble(word, f"  {check.claim}: {check.detail}"))
    return all(check.holds for check in checks)
