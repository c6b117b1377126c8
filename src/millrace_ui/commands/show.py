"""`millrace show`: shows a run, a step or a trajectory from the ledger. The command never disturbs the run.
Its options say which trajectories it shows and what colours their tokens: the choices of the pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import islice
from math import isnan
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from millrace.cli.options import AsJson, Run, print_json
from millrace.core.errors import DataError
from millrace.core.fairness import BAND, BATCHES_MIN
from millrace.core.types import State
from millrace.ledger.reading import LedgerReader
from millrace.ledger.samples import ANY, Choice, SampleFilter
from millrace.observe.shown_samples import panels_of, passages_of
from millrace.observe.terminal import Terminal, harmless
from millrace.run_directory import run_directory
from millrace.run_directory.run_directory import Parent, RunDirectory
from millrace_ui.drawing.colours import TokenColor
from millrace_ui.record import views
from millrace_ui.record.runs import RUNS_MAX, RunLine, find_runs, run_line
from millrace_ui.record.views import completions_view
from millrace_ui.shown_trajectories import SamplesAsked, read_group, read_samples

ROWS_SHOWN = 100
TEXTS = "prompt", "completion", "turns", "tokens"
WORDS = {
    "fairness": f"fairness (1: fair samples; usual {BAND[0]} to {BAND[1]})",
    "finish": "ended by",
    "grad_norm": "gradient norm",
    "lease": "leases",
    "lr": "learning rate",
    "logprob": "log-prob",
    "next": "correlation of neighbours",
    "num_tokens": "tokens",
    "staleness_mean": "mean staleness",
    "trained_version": "trained into version",
    "trajectory_id": "trajectory",
    "group_id": "group",
    "row_id": "row",
    "groups_without_signal": "share of groups without signal",
    "truncated": "share truncated",
}
"""Headings of fields whose JSON names do not say enough."""


def command(
    run: Run,
    step: Step = None,
    trajectory: OneTrajectory = None,
    group: OneGroup = None,
    turn: OneTurn = None,
    samples: Samples = None,
    newest: Newest = False,
    best: Best = False,
    worst: Worst = False,
    failed: Failed = False,
    text: WithText = "",
    before: Before = None,
    state: OfState = None,
    reason: OfReason = "",
    reward_min: RewardMin = None,
    reward_max: RewardMax = None,
    tokens_min: TokensMin = None,
    tokens_max: TokensMax = None,
    color: Colored = TokenColor.NONE,
    evaluation: Evaluation = None,
    as_json: AsJson = False,
) -> None:
    """Show the state of a run, of one step, of one trajectory, of one group, or some trajectories to read. A
    directory of several runs: list them."""
    only = SampleFilter(state or "", reason, reward_min, reward_max, tokens_min, tokens_max)
    flags = dict(zip(Choice, (newest, best, worst, failed), strict=True))
    choice = choice_of(samples, flags, filtered=bool(text) or only != ANY)
    chosen = sum(option is not None for option in (step, trajectory, group, choice, evaluation))
    if chosen > 1:
        raise typer.BadParameter(
            "these exclude each other: --step, --trajectory, --group, --evaluation, samples"
        )
    if turn is not None and trajectory is None:
        raise typer.BadParameter("--turn is of a trajectory: name it with --trajectory")
    refuse_empty(only)
    refuse_unfit(choice, group, text, before, color, as_json=as_json)
    if not chosen and len(runs := _runs(run)) > 1:
        lines = (run_line(name, one) for name, one in runs.items())
        _list(list(islice(lines, None if as_json else RUNS_MAX)), len(runs), as_json)
        return
    directory = run_directory.find(run)
    view: Any
    render: Callable[[Any], RenderableType]
    with LedgerReader(directory.ledger) as reader:
        if evaluation is not None:
            view, render = completions_view(reader, directory, evaluation), _evaluated
        elif choice is not None:
            asked = SamplesAsked(choice, samples or SAMPLES, only, text, before)
            view, render = read_samples(reader, directory, asked, color)
        elif step is not None:
            view, render = views.step_view(reader, step), _step
        elif group is not None:
            view, render = read_group(reader, directory, group, color)
        elif trajectory is not None:
            view = views.trajectory_view(reader, directory, trajectory, turn)
            render = partial(_trajectory, tokens_max=ROWS_SHOWN if turn is None else len(view["tokens"]))
        else:
            view, render = views.run_view(reader, directory), _run
    if as_json:
        print_json(view)
    else:
        Terminal().print(render(view))


def _runs(path: Path) -> dict[str, RunDirectory]:
    """The runs below `path`; none if `path` is a run itself."""
    if (path / "config.json").is_file():
        return {}
    with suppress(DataError):  # `run_directory.find` says what is wrong
        return find_runs(path)
    return {}


def _list(lines: list[RunLine], num_runs: int, as_json: bool) -> None:
    if as_json:
        print_json([asdict(line) for line in lines])
        return
    table = Table(box=None, pad_edge=False)
    for name in ("run", "state", "step", "of", "schedule", "reward"):
        table.add_column(
            name, justify="right" if name in ("step", "of", "reward") else "left", overflow="fold"
        )
    for line in lines:
        reward = "" if line.reward is None else f"{line.reward:.3f}"
        cells = (line.name, line.state, str(line.version), str(line.steps), line.schedule, reward)
        table.add_row(*map(Text, cells))
    terminal = Terminal()
    terminal.print(table)
    if num_runs > len(lines):
        terminal.print(f"... and {num_runs - len(lines):,} more, started earlier: --json shows all")


def _evaluated(view: list[dict[str, Any]]) -> Group:
    """Each completion with what it earned. A sample has noise, and attempt 0 is greedy."""
    return Group(*(part for one in view for part in _evaluated_completion(one)))


def _evaluated_completion(one: dict[str, Any]) -> list[RenderableType]:
    earned = "no reward" if one["reward"] is None else f"reward {one['reward']:.4g}"
    attempt = f"sample {one['attempt']}" if one["attempt"] else "greedy"
    words = [one["row_id"], attempt, f"version {one['version']}", earned]
    words += [one["reason"]] if one["reason"] else []
    head = Text("\n" + ", ".join([*words, f"{one['num_tokens']} tokens"]), style="bold")
    return [head, *panels_of(one)]


def _run(view: dict[str, Any]) -> Group:
    rested = f", {view['num_rested']} rested" if view["num_rested"] else ""
    head = {
        "run": view["run"],
        **({"began with": str(msgspec.convert(view["parent"], Parent))} if view["parent"] else {}),
        "state": view["state"],
        "version": f"{view['version']} of {view['steps']} steps",
        "schedule": view["schedule"],
        "checkpoint": view["checkpoint"] or "none yet",
        "groups": f"{view['num_groups']} ({view['num_skipped']} prompts skipped{rested})",
        "completion tokens": f"{view['num_tokens']:,}",
    }
    ends = [(state, reason, num) for state, reason, num in view["reasons"] if reason]
    return Group(
        _named("", head),
        _window(view["window"]),
        *([_named("What they compute in", view["computes"])] if view["computes"] else []),
        *_hosts(view["hosts"]),
        _named("Trajectories", view["accounting"]),
        *([_table("Ended otherwise", ["state", "reason", "trajectories"], ends)] if ends else []),
        *([_evaluations(view["evaluations"])] if view["evaluations"] else []),
        _records("Replicas, over the last steps", view["replicas"]),
        *([_records("Who joined and left", view["fleet"])] if view["fleet"] else []),
        _records("Last steps", view["last_steps"]),
    )


def _evaluations(records: list[dict[str, Any]]) -> Group:
    """A table of evaluations, then a line for each skipped evaluation with the reason."""
    lines, skipped = [], []
    for one in records:
        if one["skipped"]:
            skipped.append(Text(f"{one['name']}, version {one['version']}, was skipped: {one['skipped']}"))
            continue
        low, high = one["greedy_low"], one["greedy_high"]
        interval = "" if low is None else f"{low:.3f} to {high:.3f}"
        line = {"evaluation": one["name"], "version": one["version"], "greedy": one["greedy"]}
        line |= {"95 % interval": interval, "pass": one["pass"], "majority": one["majority"]}
        lines.append(line | {"reward": one["reward"], "": one["best"] or " "})
    return Group(_records("Evaluations", lines), *skipped)


def _hosts(hosts: dict[str, dict[str, Any]]) -> list[Group]:
    records = [{"host": name, **host} for name, host in hosts.items()]
    return [_records("Other hosts: versions from relay to relay", records)] if records else []


def _window(window: dict[str, Any]) -> Group:
    figures = {name: value for name, value in window.items() if name != "batches"}
    if window["staleness_mean"] is None:
        return _named(f"The last batches: figures from {BATCHES_MIN} batches of a session on", {})
    return _named(f"The last {window['batches']} batches", figures)


def _step(view: dict[str, Any]) -> Group:
    return Group(
        _named("", {"version": view["version"], "reward_mean": view["reward_mean"]}),
        _named("Metrics", view["metrics"]),
        _table("Trained tokens by staleness", ["staleness", "tokens"], view["staleness"].items()),
        _records("Trajectories", view["trajectories"]),
    )


def _trajectory(view: dict[str, Any], tokens_max: int) -> Group:
    passages = [("prompt", view["prompt"]), *passages_of(view)]
    texts = [Panel(_plain(text), title=title, title_align="left") for title, text in passages]
    facts = {key: value for key, value in view.items() if key not in TEXTS}
    unknown = facts.pop("advantages_unknown")
    facts["advantages"] = unknown or ", ".join(f"{value:.4g}" for value in view["advantages"])
    measured = facts.pop("reward_metrics")
    rewards = [_named("Metrics of the reward", measured)] if measured else []
    tokens = _records("Tokens", list(map(_token, view["tokens"])), tokens_max)
    return Group(_named("", facts), *rewards, *texts, tokens)


def _token(token: dict[str, Any]) -> dict[str, Any]:
    """The token with its top log-probs in one cell."""
    if "top_logprobs" not in token:
        return token
    texts = (
        f"{one['token'] if one['text'] is None else one['text']!r} {one['logprob']:.3g}"
        for one in token["top_logprobs"]
    )
    return token | {"top_logprobs": ", ".join(texts)}


def _named(title: str, values: dict[str, Any]) -> Group:
    return _table(title, ["", ""], [(_words(name), value) for name, value in values.items()])


def _words(name: str) -> str:
    return WORDS.get(name, name.replace("_", " "))


def _records(title: str, records: list[dict[str, Any]], rows_max: int = ROWS_SHOWN) -> Group:
    """A row for each of the first `rows_max` records."""
    columns = [_words(name) for name in records[0]] if records else ["none yet"]
    rest = len(records) - rows_max
    table = _table(title, columns, [tuple(record.values()) for record in records[:rows_max]])
    return Group(table, f"... and {rest} more: --json shows all") if rest > 0 else table


def _table(title: str, columns: list[str], rows: Any) -> Group:
    rows = list(rows)
    table = Table(show_header=any(columns), box=None, pad_edge=False)
    for index, name in enumerate(columns):
        numbers = name and all(isinstance(row[index], int | float | None) for row in rows)
        table.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_plain(cell) for cell in row))
    return Group(Text(f"\n{title}", style="bold"), table) if title else Group(table)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return Text(f"{value:.4g}")
    return Text("-" if value in (None, "") else harmless(str(value)))


# ---------------------------------------------------------------- options


SAMPLES = 5

Step = Annotated[int | None, typer.Option(help="Show the step that made this version.")]
OneTrajectory = Annotated[int | None, typer.Option(help="Show this trajectory.")]
OneGroup = Annotated[
    int | None, typer.Option(help="Show all attempts of this group, its row, and the row over the run.")
]
OneTurn = Annotated[
    int | None, typer.Option(help="Of the trajectory, show this turn alone, with each of its tokens.")
]
Evaluation = Annotated[str | None, typer.Option(help="Show the newest completions of this evaluation.")]
Samples = Annotated[
    int | None, typer.Option(min=1, help=f"Show this many trajectories; {SAMPLES} with one of the next.")
]
Newest = Annotated[bool, typer.Option("--newest", help="The newest complete ones. The default.")]
Best = Annotated[bool, typer.Option("--best", help="Those with the highest rewards.")]
Worst = Annotated[bool, typer.Option("--worst", help="Those with the lowest rewards.")]
Failed = Annotated[bool, typer.Option("--failed", help="Those whose reward failed, and why.")]
WithText = Annotated[str, typer.Option("--text", help="The newest with this text in prompt or completion.")]
Before = Annotated[int | None, typer.Option(help="With --text: only those before this trajectory.")]
OfState = Annotated[State | None, typer.Option("--state", help="Only those in this state.")]
OfReason = Annotated[str, typer.Option("--reason", help="Only those with this in the reason of their end.")]
RewardMin = Annotated[float | None, typer.Option(help="Only those with this reward or more.")]
RewardMax = Annotated[float | None, typer.Option(help="Only those with this reward or less.")]
TokensMin = Annotated[int | None, typer.Option(min=0, help="Only those with so many tokens or more.")]
TokensMax = Annotated[int | None, typer.Option(min=0, help="Only those with so many tokens or less.")]
Colored = Annotated[
    TokenColor,
    typer.Option("--color", help="Colour the tokens of a group or of samples. Without colours: marks."),
]


def choice_of(samples: int | None, flags: Mapping[Choice, bool], *, filtered: bool) -> Choice | None:
    """None: no samples are asked for. Raises BadParameter."""
    chosen = [choice for choice, wanted in flags.items() if wanted]
    if len(chosen) > 1:
        raise typer.BadParameter("--newest, --best, --worst and --failed exclude each other")
    return chosen[0] if chosen else Choice.NEWEST if filtered or samples is not None else None


def refuse_empty(only: SampleFilter) -> None:
    """Raises BadParameter: no trajectory can be in such a range."""
    for name, least, most in (
        ("reward", only.reward_min, only.reward_max),
        ("tokens", only.tokens_min, only.tokens_max),
    ):
        for end, value in ("min", least), ("max", most):
            if value is not None and isnan(value):
                raise typer.BadParameter(f"--{name}-{end} is no number")
        if least is not None and most is not None and least > most:
            raise typer.BadParameter(f"--{name}-min {least} is above --{name}-max {most}")


def refuse_unfit(
    choice: Choice | None,
    group: int | None,
    text: str,
    before: int | None,
    color: TokenColor,
    *,
    as_json: bool,
) -> None:
    """Raises BadParameter: an option has nothing that it could change."""
    if text and choice is not Choice.NEWEST:
        raise typer.BadParameter(f"--text looks from the newest back: leave --{choice} out")
    if before is not None and not text:
        raise typer.BadParameter("--before goes on with a search: name its --text")
    if color is TokenColor.NONE:
        return
    if as_json:
        raise typer.BadParameter("--color is for reading: --json has no colours")
    if group is None and choice is None:
        raise typer.BadParameter("--color is of tokens: add --group or --samples")
    if group is None and color is TokenColor.ADVANTAGE:
        raise typer.BadParameter("--color advantage compares the attempts of a group: name one with --group")
