"""A curation as a page: what was dropped and why, lengths, pass rates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.core import files
from millrace.core.errors import OTHER_FILE, DataError, boundary, writing
from millrace_curation.output import PAGE, SUMMARY
from millrace_ui import page
from millrace_ui.drawing import fragments
from millrace_ui.drawing.bars import bars


def write_page(summary: Mapping[str, Any], directory: Path) -> None:
    """Write the page as one file that needs no server. Raises: StorageError."""
    with writing(directory / PAGE, OTHER_FILE):
        text = page.whole_file(f"Curation of {summary['task']}", curated(summary).html)
        (directory / PAGE).write_text(text, encoding="utf-8")


def read_page(directory: Path) -> page.PageContent:
    """The page of the curation in a directory. Raises: DataError: its summary is missing or damaged."""
    with boundary(str(directory / SUMMARY), "it is no summary of a curation", DataError):
        return curated(files.read_json(directory / SUMMARY))


def curated(summary: Mapping[str, Any]) -> page.PageContent:
    """`summary`: of `curation.output`."""
    drawn = "".join(fragments.card(*parts) for parts in _charts(summary))
    head = ("reason", "row", "why", "text")
    examples = [
        (reason, one["row"], one["detail"], one["text"])
        for reason, shown in summary["examples"].items()
        for one in shown
    ]
    title, model = (fragments.safe(text) for text in (f"Curation of {summary['task']}", summary["model"]))
    html = (
        f"<h1>{title}</h1><p>Model: {model}</p>{fragments.facts(_facts(summary))}"
        f'<div class="charts">{drawn}</div>'
        f"<h2>Dropped rows</h2>{fragments.table(head, examples)}"
    )
    return page.PageContent(html)


def _facts(summary: Mapping[str, Any]) -> dict[str, Any]:
    facts = {"rows": summary["num_rows"], "kept": summary["num_kept"]}
    if rates := summary["pass_rates"]:
        facts |= {"pass rate": rates["mean"], "samples a row": rates["samples"]}
    return facts


def _charts(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """A heading, an explanation and the bars of each chart."""
    if reasons := summary["reasons"]:
        yield "Reasons", "Dropped rows.", bars(reasons, "rows")
    if lengths := summary["prompt_token_counts"]:
        yield "Lengths", "Kept rows by the tokens of their prompts.", bars(_by_length(lengths), "rows")
    if rates := summary["pass_rates"]:
        counts = {f"{num} of {rates['samples']}": rows for num, rows in enumerate(rates["histogram"])}
        caption = "Rows by their correct samples, before rows are dropped for it."
        yield "Pass rates", caption, bars(counts, "rows")
        yield "Bands", "Rows by difficulty.", bars(rates["bands"], "rows")


def _by_length(bins: Sequence[Sequence[int]]) -> dict[str, int]:
    """`bins`: the first and the last value, and the count, of each."""
    return {f"{first:,}" if first == last else f"{first:,} to {last:,}": num for first, last, num in bins}
