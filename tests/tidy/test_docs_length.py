"""The manual is small: a page is read in one sitting, and the pages are few."""

from __future__ import annotations

from tests.tidy.sources import ROOT, tracked_files

PAGE_LINES_MAX = 300
PAGES_MAX = 26
WORDS_MAX = 80_000
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


def test_the_manual_has_at_most_26_pages_and_80000_words() -> None:
    words = {path.name: len(path.read_text(encoding="utf-8").split()) for path in DOCS.glob("*.md")}
    advice = (
        "Say it in the page where a reader looks for it, and drop what it makes needless. Measurements "
        "belong into reports/, keys and names into docstrings (`millrace keys`, `pydoc`)."
    )
    longest = ", ".join(f"{name} {num:,}" for name, num in sorted(words.items(), key=lambda it: -it[1])[:5])
    assert len(words) <= PAGES_MAX, f"docs/ has {len(words)} pages of {PAGES_MAX}. {advice}"
    total = sum(words.values())
    assert total <= WORDS_MAX, f"docs/ has {total:,} words of {WORDS_MAX:,}; longest: {longest}. {advice}"
