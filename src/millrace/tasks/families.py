"""What was measured of each family of reasoning-gym, by scripts/gym_families.py, with default options and the
version that the file names. reports/gym-families.md shows it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from millrace.config.schema import Config
from millrace.config.tables.task import GymRewardSection, GymTaskSection, members_of

DATA = Path(__file__).with_name("families.json")
MANY = 0.9
"""The share of distinct prompts below which a sentence says how few there are."""


class Families(NamedTuple):
    """`version` of reasoning-gym, and by name the facts of families.json."""

    version: str
    families: dict[str, dict[str, Any]]


@cache
def read_families() -> Families:
    return Families(**json.loads(DATA.read_text(encoding="utf-8")))


def false_positives(config: Config) -> Iterator[str]:
    """A sentence for each family whose scorer gives a wrong text its reward, which a run would learn."""
    for name, threshold in _scored(config):
        wrong = read_families().families.get(name, {}).get("wrong")
        if wrong and wrong["score"] >= threshold > 0:
            higher = "raise `reward.threshold` above that, " if wrong["score"] < 1 else ""
            yield (
                f"the scorer of reasoning-gym's {name!r} gives {wrong['score']:g} to a wrong answer "
                f'({wrong["text"]}): take another family, {higher}take `reward.kind` "exact" if no text but '
                "the reference is right"
            )


def family_notes(config: Config) -> Iterator[str]:
    """What the table says of the families of a configuration, where that is not what one expects."""
    known = read_families()
    names = dict.fromkeys(task.name for _, task in _parts(config))
    if names and (installed := _installed()) != known.version:
        yield (
            f"reasoning-gym {installed} is installed, and its families were measured on {known.version}: "
            f"what is said of {', '.join(names)} may be untrue. scripts/gym_families.py measures them"
        )
    thresholds = dict(_scored(config))
    for name in names:
        if name not in known.families:
            yield f"reasoning-gym's {name!r} was never measured: look at its rewards with `millrace try-task`"
            continue
        for said in _said(known.families[name], thresholds.get(name)):
            yield f"reasoning-gym's {name!r}: {said}"


def _said(facts: Mapping[str, Any], threshold: float | None) -> Iterator[str]:
    """`threshold` None: another reward scores its rows."""
    if "failed" in facts:
        yield f"it could not be measured: {facts['failed']}"
        return
    if threshold is not None:
        yield from _said_of_scorer(facts, threshold)
    distinct, num = facts["prompts"]
    if distinct < MANY * num:
        yield f"{distinct} of {num} prompts are distinct"
    if facts["size"]:
        yield "its rows depend on `task.size`: held-out rows need the same size"


def _said_of_scorer(facts: Mapping[str, Any], threshold: float) -> Iterator[str]:
    reference = facts["reference"]
    has, num = reference["rows"]
    if not has:
        yield "its rows have no reference answer, so nothing proves that its scorer pays a right one"
    elif has < num or reference["raised"] or reference["least"] < 1:
        yield (
            f"{has} of {num} rows have a reference answer, the least of their scores is "
            f"{reference['least']}, and {reference['raised']} make the scorer raise"
        )
    for paid in filter(None, (facts["wrong"], facts["near"])):
        if paid["score"] >= threshold > 0:
            yield (
                f"a wrong answer ({paid['text']}) gets {paid['score']:g}: `reward.threshold` is {threshold:g}"
            )


def _scored(config: Config) -> Iterator[tuple[str, float]]:
    """The families that their own scorers score, each with its threshold."""
    pairs = [
        (task.name, reward.threshold)
        for part, task in _parts(config)
        for reward in members_of(part.reward).values()
        if isinstance(reward, GymRewardSection)
    ]
    yield from dict.fromkeys(pairs)


def _parts(config: Config) -> list[tuple[Config, GymTaskSection]]:
    """The parts with a gym task: of training, of a mixture, and of evaluations."""
    each = [config, *map(config.of_evaluation, config.evaluations)]
    parts = [part for one in each for part in one.by_part.values()]
    return [(part, part.task) for part in parts if isinstance(part.task, GymTaskSection)]


def _installed() -> str:
    try:
        return version("reasoning-gym")
    except PackageNotFoundError:
        return "none"
