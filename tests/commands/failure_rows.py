"""The rows of `docs/failures.md`, and whether what a user saw is what a row promises."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "failures.md"
ROW = re.compile(
    r"^\| `(?P<id>[a-z0-9-]+)` \| (?P<wrong>.+?) \| (?P<seen>.+?) \| (?P<do>.+?) \|$", re.MULTILINE
)
QUOTED = re.compile(r"`([^`]+)`")


@cache
def rows() -> dict[str, str]:
    """What each row says is seen, by its id."""
    found = {match["id"]: match["seen"] for match in ROW.finditer(DOCUMENT.read_text(encoding="utf-8"))}
    assert found, "the document has no rows"
    return found


def seen(row_id: str, text: str) -> None:
    """Fail unless `text` has everything that the row quotes, in order (`…` stands for anything), and no
    traceback."""
    quoted = QUOTED.findall(rows()[row_id])
    assert quoted, f"row {row_id} quotes nothing"
    flat = " ".join(text.replace("`", "").split())
    pattern = ".*?".join(re.escape(part.strip()) for quote in quoted for part in quote.split("…"))
    assert re.search(pattern, flat), f"{row_id}: {quoted} not in:\n{text}"
    assert "Traceback" not in text, text
