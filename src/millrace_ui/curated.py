"""A curation as a page: what was dropped and why, lengths, pass rates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.core import files
from millrace.core.errors import OTHER_FILE, DataError, boundary, writing
from millrace_curation.output import PAGE, SUMMARY
from millrace_ui import page
from millrace_ui.drawing import figures, fragments


def write_page(summary: Mapping[str, Any], directory: Path) -> None:
    """Write the page as one file that needs no server. Raises: StorageError."""
    with writing(directory / PAGE, OTHER_FILE):
        text = page.whole_file(f"Curation of {summary['task']}", [curated(summary)])
        (directory / PAGE).write_text(text, encoding="utf-8")


def read_page(directory: Path) -> page.PageContent:
    """The page of the curation in a directory. Raises: DataError: its summary is missing or damaged."""
    with boundary(str(directory / SUMMARY), "it is no summary of a curation", DataError):
        return curated(files.read_json(directory / SUMMARY))


def curated(summary: Mapping[str, Any]) -> page.PageContent:
    """`summary`: of `curation.output`."""
    drawn = page.charts([*_charts(summary)])
    head = ("reason", "row", "why", "text")
    examples = [
        (reason, one["row"], one["detail"], one["text"])
        for reason, shown in summary["examples"].items()
        for one in shown
    ]
    title, model = (fragments.safe(text) for text in (f"Curation of {summary['task']}", summary["model"]))
    html = (
        f"<h1>{title}</h1><p>Model: {model}</p>{fragments.facts(_facts(summary))}{drawn.html}"
        f"<h2>Dropped rows</h2>{fragments.table(head, examples)}"
    )
    return page.PageContent(html, drawn.script)


def _facts(summary: Mapping[str, Any]) -> dict[str, Any]:
    facts = {"rows": summary["num_rows"], "kept": summary["num_kept"]}
    if rates := summary["pass_rates"]:
        facts |= {"pass rate": rates["mean"], "samples a row": rates["samples"]}
    return facts


def _charts(summary: Mapping[str, Any]) -> Iterator[page.Section]:
    if reasons := summary["reasons"]:
        yield (
            "Reasons",
            "Dropped rows.",
            figures.bars("reasons", list(reasons), list(reasons.values()), "rows"),
        )
    if lengths := summary["prompt_token_counts"]:
        yield "Lengths", "Kept rows by the tokens of their prompts.", _histogram("lengths", lengths, "rows")
    if rates := summary["pass_rates"]:
        names = [f"{number} of {rates['samples']}" for number in range(rates["samples"] + 1)]
        caption = "Rows by their correct samples, before rows are dropped for it."
        yield "Pass rates", caption, figures.bars("pass rates", names, rates["histogram"], "rows")
        bands = rates["bands"]
        yield "Bands", "Rows by difficulty.", figures.bars("bands", list(bands), list(bands.values()), "rows")


def _histogram(name: str, bins: Sequence[Sequence[int]], unit: str) -> Any:
    """`bins`: the first and the last value, and the count, of each."""
    labels = [f"{first:,}" if first == last else f"{first:,} to {last:,}" for first, last, _ in bins]
    return figures.bars(name, labels, [count for *_, count in bins], unit)
