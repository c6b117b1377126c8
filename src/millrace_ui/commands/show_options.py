"""Which trajectories `millrace show` shows, and what colours their tokens: the choices of the pages."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from typing import Annotated

import typer

from millrace.core.types import State
from millrace.ledger.samples import Choice, SampleFilter
from millrace_ui.drawing.shades import TokenColor

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
