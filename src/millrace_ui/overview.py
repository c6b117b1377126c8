"""A run directory as the content of one page. `Overview.update` reads only what is new."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from millrace.config.freeze import dump
from millrace.config.schema import Config
from millrace.core import clock
from millrace.core.errors import MillraceError
from millrace.diagnose.examine import count_rewards
from millrace.diagnose.rules import diagnose, gone
from millrace.ledger.reading import LedgerReader
from millrace.observe.conversation_times import ENVIRONMENT, MODEL
from millrace.observe.sinks.log_files import SLICE_BYTES
from millrace.observe.summary import GENERATED, TRAINED
from millrace.run.resume import flat
from millrace.run_directory.run_directory import RunDirectory, read_parent
from millrace.run_directory.views import tokenizer_of
from millrace_ui.curves.chart import run_charts
from millrace_ui.drawing import bars, charts, fragments
from millrace_ui.drawing.charts import CHARTS
from millrace_ui.record.runs import state_of
from millrace_ui.record.steps import POINTS, Axis, Curve, Steps, evaluated, table_of, while_training
from millrace_ui.record.story import SHOWN_MAX, TROUBLES_MAX, Story, row_order, waiting_episodes

READ_S, FIRST_READ_S = 0.4, 0.1
"""An update reads new events for about so long. The first update of a page is shorter."""
COUNT_AGAIN_S = 60.0
"""After so long, a ledger that could not be counted in `READ_S` is counted again."""
READ_BYTES = SLICE_BYTES // 4
"""After so many bytes of events an update looks how long it took."""

AXES = {Axis.STEP: "step", Axis.TOKENS: "trained tokens", Axis.TIME: "minutes since the first step"}


class Overview:
    """One run, as of the last `update`. Not for use from several threads. `trajectories` is the address of
    the page of its trajectories; empty: there is none.

    Raises: DataError, ConfigError: the directory is no run, or a file in it is damaged.
    """

    def __init__(self, name: str, run: RunDirectory, trajectories: str = "") -> None:
        self.name, self.run, self._trajectories = name, run, trajectories
        self.config: Config = run.read_config()
        self.parent = read_parent(run)
        self.steps = Steps(run.metrics)
        self.story = Story(run.events, self.config)
        self._tokenizer: list[Any] = []  # empty until it is needed
        self._judgement = ""  # the findings as HTML, of the events that were read then
        self._is_counted = True  # False: the ledger could not be counted in `READ_S`
        self._count_again_s = 0.0

    def update(self, read_s: float = READ_S) -> None:
        until_s = time.monotonic() + read_s
        self.config = self.run.read_config()
        self.steps.update()
        while self.story.update(READ_BYTES) and time.monotonic() < until_s:
            pass

    @property
    def is_whole(self) -> bool:
        """All events are read, except perhaps the newest."""
        return self.story.behind_bytes < SLICE_BYTES

    @property
    def tokenizer(self) -> Any | None:
        if not self._tokenizer:
            self._tokenizer.append(tokenizer_of(self.run))
        return self._tokenizer[0]

    @property
    def version(self) -> int:
        return self.steps.versions[-1] if self.steps.versions else 0

    @property
    def state(self) -> str:
        return state_of(self.run, self.version, self.config.steps)

    # ------------------------------------------------------------ content

    def curves(self, by: Axis) -> dict[str, dict[str, Curve]]:
        """Of every chart, by its name, the lines by their labels."""
        x = self.steps.axis(by)
        lines = {chart.name: chart.curves(self.steps, x) for chart in CHARTS}
        lines["reward"]["evaluations"] = evaluated(self.run.evaluations, self.steps, by)
        going_by = {section.name: section.by for section in self.config.evaluations}
        lines["reward"] |= while_training(self.story.evaluations, going_by, self.steps, by)
        return lines

    def charts(self, by: Axis, points: int = POINTS) -> dict[str, str]:
        """The HTML of each chart that has points, by its name. A line has about `points` at most."""
        return run_charts(self.curves(by), AXES[by], points)

    def html_by_id(self) -> dict[str, str]:
        """The HTML of each element of the page, by the element's id."""
        shares, spans = self._shares(), [*self.story.activity.spans, *self.story.spans]
        troubles = [(f"{t.minute:.1f}", t.who, t.what) for t in reversed(self.story.troubles)]
        return {
            "facts": fragments.facts(self._facts(), MEANINGS) + self._accounts() + self._evaluations(),
            "notice": self._notice(),
            "waiting": self._waiting(),
            "findings": self._findings(),
            "spent": fragments.explained(who_waits(shares)) + bars.time_bars(shares, bars.SHARE_COLORS),
            "lanes": bars.timeline(spans, sorted({span.row for span in spans}, key=row_order)),
            "troubles": fragments.table(
                ("minute", "who", "what"), troubles, empty="Nobody died, and nothing stalled."
            )
            + (_OLDER_TROUBLES if len(troubles) == TROUBLES_MAX else ""),
        }

    def configuration(self) -> str:
        return fragments.configuration(dict(flat(dump(self.config))))

    def _notice(self) -> str:
        if not self.is_whole:
            return fragments.notice(f"{self.story.share_read:.0%} of the events are read; the rest follows.")
        return "" if len(self.steps) else fragments.notice("There is no optimizer step yet.")

    def _findings(self) -> str:
        """The findings of `millrace doctor`."""
        if not self.is_whole:
            return fragments.notice("The doctor waits until all events are read.")
        counts = time.monotonic() > self._count_again_s
        if self.story.is_new or (counts and not self._is_counted):
            self.story.is_new = False
            self._judgement = self._judged(READ_S if counts else 0.0)
        return self._judgement

    def _judged(self, read_s: float) -> str:
        """`read_s`: the ledger is counted for so long. What takes longer is tried again later."""
        evidence, began_s = self.story.evidence, time.monotonic()
        self._is_counted = False
        with suppress(MillraceError):  # then the doctor judges by the events alone
            with LedgerReader(
                self.run.ledger, check=False, stop=lambda: time.monotonic() > began_s + read_s
            ) as reader:
                count_rewards(evidence, reader)
            self._is_counted = time.monotonic() < began_s + read_s
        if read_s and not self._is_counted:
            self._count_again_s = time.monotonic() + COUNT_AGAIN_S
        findings = diagnose(evidence)
        return fragments.findings(findings, gone(evidence, findings))

    def _waiting(self) -> str:
        """Episodes that wait. Empty: the run has none, or does not go on."""
        waits = self.story.evidence.environment.waits
        if not (self.is_whole and waits.plays and self.run.is_owned()):
            return ""
        try:
            wall_s = clock.wall()
            shown = waiting_episodes(self.run, waits.oldest(SHOWN_MAX), wall_s)
        except MillraceError as error:
            return fragments.notice(f"The episodes that wait cannot be read: {error}")
        return fragments.waiting(
            {role: (waits.count(role), waits.longest_s(role, wall_s)) for role in (MODEL, ENVIRONMENT)},
            shown,
            self._trajectories,
        )

    def _facts(self) -> dict[str, Any]:
        summary = self.story.summary()
        first, last = summary["reward_first"], summary["reward_last"]
        return {
            "state": fragments.Raw(fragments.state(self.state)),
            f"of {self.config.steps:,} steps": self.version,
            "schedule": self.config.schedule.kind,
            "reward, first and last tenth": None if last is None else f"{first:.2g} → {last:.2g}",
            "trained tokens/s": summary["trained_tokens_per_s"],
            "generated tokens/s": summary["generated_tokens_per_s"],
            "mean staleness": summary["staleness"]["mean"],
            "fairness": summary["fairness"],
            "restarts": summary["restarts"],
            **({"draft tokens right": share} if (share := summary["right_drafts"]) is not None else {}),
            **({"began with": str(self.parent)} if self.parent else {}),
        }

    def _accounts(self) -> str:
        """The final states of all trajectories. The counts add up."""
        counts = [
            f"{int(value):,} {name.partition('/')[2].replace('_', ' ')}"
            for name in self.steps.names("accounting/")
            if (value := self.steps.last(name)) is not None
        ]
        return f'<p class="quiet">Trajectories: {fragments.safe(", ".join(counts))}.</p>' if counts else ""

    def _evaluations(self) -> str:
        head, rows = table_of(self.story.evaluations)
        return fragments.table(head, rows) if rows else ""

    def _shares(self) -> dict[str, dict[str, float]]:
        """The seconds of each kind of work, for each role."""
        took = self.story.took_s
        shares = {
            "trainer": {
                "optimizer steps": took["step"],
                "waiting for a batch": took["wait"],
                "publishing weights": took["publish"],
                "checkpoints": took["checkpoint"],
            }
        }
        for name, replica in self.story.summary()["replicas"].items():
            shares[name] = {"decoding": replica["busy_s"], "idle": replica["idle_s"]}
        return shares


def overviews(runs: Sequence[RunDirectory]) -> list[Overview]:
    """Each run under the shortest end of its path that no other run has."""
    names = distinct([run.path for run in runs])
    return [Overview(name, run) for name, run in zip(names, runs, strict=True)]


def distinct(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that are all different."""
    length = 1
    while len({path.parts[-length:] for path in paths}) < len(set(paths)):
        length += 1
    return ["/".join(path.parts[-length:]) for path in paths]


MEANINGS = {
    "reward, first and last tenth": "Mean reward of the first tenth of the steps, and of the last tenth.",
    "trained tokens/s": TRAINED,
    "generated tokens/s": GENERATED,
    "mean staleness": f"Over all trained tokens. {charts.STALENESS}",
    "fairness": charts.FAIRNESS,
    "restarts": "Of workers, since the first start of the run.",
}
"""The meanings of figures whose names do not say enough."""

TIMELINE = (
    "Green is work, the darker the more of the time. Grey is a worker that starts. Magenta is weights that "
    "are published, staged, taken or saved. Red is the time from a death until the worker is ready again. Of "
    "a long run, the newest part is shown."
)


_OLDER_TROUBLES = (
    f'<p class="quiet">The newest {TROUBLES_MAX} are shown; <code>events.jsonl</code> has all of them.</p>'
)


def who_waits(shares: dict[str, dict[str, float]]) -> str:
    """Says in a sentence who idles, and why."""
    waits = _share(shares.get("trainer", {}), "waiting for a batch")
    replicas = [_share(took_s, "idle") for name, took_s in shares.items() if name != "trainer"]
    idle = sum(replicas) / len(replicas) if replicas else 0.0
    sentence = (
        f"Green is work, grey is waiting, magenta is weights. The trainer waits {waits:.0%} of the time for "
        f"batches, replicas idle {idle:.0%}. "
    )
    if max(waits, idle) < 0.1:
        return sentence + "Neither side waits much for the other."
    if waits >= idle:
        return sentence + "Generation is the slower side: batches are not complete when the trainer is."
    return sentence + "Training is the slower side: replicas are as far ahead as the schedule lets them be."


def _share(seconds: dict[str, float], what: str) -> float:
    total = sum(seconds.values())
    return seconds.get(what, 0.0) / total if total else 0.0
