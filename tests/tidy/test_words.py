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


SENTENCE_WORDS_MAX = 30
BLOCK = re.compile(r"^( *)```.*?^\1```$|^ {4}(?![ *-])[^\n]*$", re.MULTILINE | re.DOTALL)


def sentences(text: str) -> list[str]:
    """Of a Markdown document without its code. A cell of a table and a point of a list are apart."""
    points = re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |\d+\. |[|#]))|\|", BLOCK.sub("", text))
    return [part for point in points for part in re.split(r"(?<=[.!?;])\s", " ".join(point.split()))]


def test_no_sentence_of_the_documents_is_longer_than_a_reader_can_hold() -> None:
    documents = [path for path in tracked_files() if path.suffix == ".md"]
    offenders = [
        f"{path.relative_to(ROOT)}: {num} words: {sentence}"
        for path in documents
        for sentence in sentences(path.read_text())
        if (num := len(re.findall(r"\S*\w\S*", sentence))) > SENTENCE_WORDS_MAX
    ]
    assert not offenders, "\n".join(offenders)
