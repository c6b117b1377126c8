"""What no file of the repository says: unfinished work, and names of places outside it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.tidy.sources import ROOT, tracked_files

BANNED = re.compile(
    r"pypi\.org|download\.pytorch\.org|pythonhosted|/work/|this session|issue #"
    r"|\btodo\b|\bfixme\b|NotImplementedError",
    re.IGNORECASE,
)
BINARY = {".png", ".jpg", ".gz", ".zst", ".safetensors", ".parquet", ".sqlite"}


def test_no_tracked_file_holds_a_banned_word() -> None:
    offenders = []
    for path in tracked_files():
        if path == Path(__file__).resolve() or path.suffix in BINARY:
            continue
        text = path.read_text(errors="replace")
        for match in BANNED.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            offenders.append(f"{path.relative_to(ROOT)}:{line}: {match.group()}")
    assert not offenders, "\n".join(offenders)
