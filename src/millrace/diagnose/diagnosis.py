"""The doctor's findings in a run, to print, to show in a notebook or to read field by field."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.text import Text

from millrace.core.wings import wing
from millrace.diagnose.bottleneck import Bottleneck
from millrace.diagnose.examine import examine
from millrace.diagnose.finding import Finding
from millrace.diagnose.rules import RULES
from millrace.observe.terminal import as_text
from millrace.run_directory.run_directory import RunDirectory

HEAD = ("run", "steps", "schedule", "dtype", "end")
WIDTH = 80


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor says of a run. Its text is what `millrace doctor` prints.

    A finding has its `fault`, `evidence` and `advice`. `withdrawn`: findings that no longer hold. `inert`:
    keys of the configuration that change nothing. `committed`: the newest version in the ledger.
    `bottleneck`: what the speed depends on most. It is no fault.
    """

    run: str
    steps: int
    committed: int
    schedule: str
    dtype: str
    end: str
    inert: tuple[str, ...]
    healthy: bool
    findings: tuple[Finding, ...]
    withdrawn: tuple[str, ...]
    bottleneck: Bottleneck

    def to_json(self) -> dict[str, Any]:
        """The diagnosis as JSON types."""
        return asdict(self)

    def __str__(self) -> str:
        return as_text(self, WIDTH, soft_wrap=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for name in HEAD:
            yield Text(f"{name:10} {getattr(self, name)}")
        for line in self.inert:
            yield Text(f"{'note':10} {line}")
        if self.healthy:
            yield Text(f"\nNone of {len(RULES)} known faults.", "green")
        for line in self.withdrawn:
            yield Text(f"  {line}")
        for finding in self.findings:
            yield Text(f"\n{finding.fault}", "bold red")
            yield from (Text(f"  it shows: {line}") for line in finding.evidence)
            yield from (Text(f"  change:   {line}") for line in finding.advice)
        yield Text(f"\n{'bottleneck':10} {self.bottleneck}")

    def _repr_html_(self) -> str:
        return str(wing("ui.html")(self))


def diagnosis_of(run: RunDirectory) -> Diagnosis:
    """Raises: as `examine`."""
    record = examine(run)
    lists = {name: tuple(record[name]) for name in ("inert", "withdrawn")}
    findings = tuple(Finding(**one) for one in record["findings"])
    slow = Bottleneck(**record["bottleneck"])
    return Diagnosis(**record | lists | {"findings": findings, "bottleneck": slow})
