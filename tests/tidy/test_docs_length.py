"""A page of the documents is read in one sitting."""

from __future__ import annotations

from tests.tidy.sources import ROOT, tracked_files

PAGE_LINES_MAX = 300
DOCS = ROOT / "docs"


def test_no_page_of_the_documents_is_longer_than_300_lines() -> None:
    pages = [path for path in tracked_files() if path.suffix == ".md" and DOCS in path.parents]
    lengths = {path: len(path.read_text().splitlines()) for path in pages}
    offenders = [
        f"{path.relative_to(ROOT)}: {lines} lines"
        for path, lines in sorted(lengths.items())
        if lines > PAGE_LINES_MAX
    ]
    assert lengths and not offenders, "\n".join(offenders)
