"""The figures of a file of `gpu-check`, as a section of reports/gpu-check.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from gpu_parts import NODE, ROOT, Entry, not_run

PAGE = ROOT / "reports" / "gpu-check.md"
BEGIN, END = "<!-- scripts/gpu-check --write -->\n", "<!-- end -->\n"


def write_page(file: Path, page: Path = PAGE) -> str:
    """Put the figures of `file` into `page`, between the marks. Returns what was done, in words.

    Raises: SystemExit: the page has no marks, or `file` is a rehearsal and `page` is the report."""
    result: Entry = json.loads(file.read_text(encoding="utf-8"))
    if result["rehearsal"] and page == PAGE:
        raise SystemExit(f"{file} is a rehearsal: its figures are of a CPU. `--page` names another page")
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{page} lacks a line {BEGIN.strip()} with {END.strip()} below it")
    section = "".join(f"{line}\n" for line in lines(result))
    page.write_text(before + begin + section + end + after, encoding="utf-8")
    return f"{page}: {len(result['parts'])} parts of {file}"


def lines(result: Entry) -> Iterator[str]:
    entries: dict[str, Entry] = result["parts"]
    yield machine(result, entries.get("machine", {}))
    yield ""
    yield from ["| part | figure |", "|---|---|"]
    for name, entry in entries.items():
        if name != "machine" and not not_run(entry):
            yield f"| `{name}` | {'; '.join(row(name, entry)) or 'passed'} |"
    if gates := result["gates"]:
        yield from ["", "| gate | value | must be | |", "|---|---|---|---|"]
        for key, gate in gates.items():
            verdict = {"fail": "**missed**", "pass": "holds", None: ""}[gate["verdict"]]
            yield f"| `{key}`: {gate['what']} | {number(gate['value'])} | {gate['limit']} | {verdict} |"
    if skipped := [f"`{name}` ({why})" for name, one in entries.items() if (why := not_run(one))]:
        yield from ["", f"Not run: {', '.join(skipped)}."]


def machine(result: Entry, entry: Entry) -> str:
    where = "A rehearsal on a CPU" if result["rehearsal"] else f"{result['gpus']} x {result['gpu']}"
    versions = [f"{name} {entry[name]}" for name in ("torch", "transformers") if name in entry]
    versions += [f"Python {entry['python']}"] if "python" in entry else []
    source = f"commit {result['commit'][:8]}" if result["commit"] else f"sources {result['sources']}"
    return f"{', '.join([where, *versions, source])}. One run each, so small differences say nothing."


def row(name: str, entry: Entry) -> Iterator[str]:
    """The figures of a part in words."""
    if "tests" in entry:
        ran = entry["tests"] - entry["skipped"]
        yield f"{ran - len(entry['failed'])} of {ran} tests hold, {entry['skipped']} were skipped"
    for claim, detail in entry.get("checks", {}).items():
        yield f"{claim}: {detail}"
    told = {key: value for key, value in entry.items() if key in JAX}
    if isinstance(figures := entry.get(name.removeprefix(NODE)), dict):
        told |= figures
    for label, figures in told.get("rows", {}).items():
        if words := of_row(figures):
            yield f"{label}: {words}"
    yield from (f"`{key}` {write(told[key])}" for key, write in FIGURES.items() if told.get(key) is not None)
    if "skipped" in told:
        yield told["skipped"]
    if not entry["passed"]:
        yield f"**failed**: {last_line(entry.get('error', ''))}"


def of_row(figures: Entry) -> str:
    """Of one number of sequences, or of one length of rows."""
    known = [f"{write(figures[key])}" for key, write in ROW.items() if figures.get(key) is not None]
    return ", ".join(known)


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(value: float) -> str:
    return f"{value:.0%}"


def milliseconds(value: float) -> str:
    return f"{1000 * value:.3g} ms"


def seconds(value: float) -> str:
    return f"{value:.0f} s"


def last_line(error: str) -> str:
    words = error.strip().splitlines()
    return words[-1].replace("|", "/")[:120] if words else "without a word"


Write = Callable[[float], str]
ROW: dict[str, Write] = {
    "tokens_per_s": lambda value: f"{number(value)} tokens/s",
    "over_roofline": lambda value: f"{percent(value)} of the roofline",
    "mfu": lambda value: f"MFU {percent(value)}",
    "over_beside": lambda value: f"{number(value)} of the other build",
    "peer_tokens_per_s": lambda value: f"transformers {number(value)} tokens/s with prompts",
}
JAX: dict[str, Write] = {
    "steps": number,
    "until_first_step_s": seconds,
    "compile_s": seconds,
    "quickstart_s": seconds,
}
FIGURES: dict[str, Write] = JAX | {
    "version_bytes": number,
    "stall_s": milliseconds,
    "stall_over_copy": number,
    "pull_s": milliseconds,
    "verify_s": milliseconds,
    "swap_s": milliseconds,
    "gap_mean": number,
    "gap_p999": number,
    "own_tokens_per_s": number,
    "vllm_tokens_per_s": number,
    "own_over_vllm": number,
    "over_trl": number,
    "gradient_error": number,
    "mfu": percent,
    "served_s_max": number,
    "checkpoint_stall_s": number,
}
"""Figures of a part, by the key in its JSON."""
