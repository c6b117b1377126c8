"""An algorithm and a schedule of one's own are tried before the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.checks.first_try import try_own
from millrace.cli import app
from millrace.config.schema import Config
from millrace.config.tables.algorithms import PRESETS
from millrace.core.errors import ConfigError
from millrace.schedule.presets import build
from millrace.trainer.first_step import try_algorithm

pytestmark = pytest.mark.usefixtures("warm")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
HEAD = """
import numpy as np
from millrace.algorithms import Algorithm
def centred(group): return group.rewards_G - group.rewards_G.mean()
def plain(xp, logprobs, advantages_N): return -advantages_N * logprobs.current_N
"""


def config_for(**sections: Any) -> Config:
    task = {"kind": "gym", "name": "chain_sum"}
    return Config.model_validate({"model": {"path": "m"}, "task": task, "reward": {"kind": "gym"}} | sections)


def algorithm_for(directory: Path, body: str, **sections: Any) -> Config:
    directory.mkdir(exist_ok=True)
    own = directory / "own.py"
    own.write_text(f"{HEAD}\n{body}\n")
    return config_for(algorithm={"kind": "function", "path": f"{own}:own"}, **sections)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("own = Algorithm(lambda group: group.reward, plain)", "(?s)`Algorithm.advantages` failed.*'reward'"),
        (
            "own = Algorithm(lambda group: centred(group) / group.rewards_G.std(), plain)",
            "in which one group has equal rewards: the loss is nan",
        ),
        ("own = Algorithm(lambda group: [1.0], plain)", "ValueError: zip"),
        (
            "def wrong(xp, logprobs, A):\n    return xp.exp(logprobs.old_N)\nown = Algorithm(centred, wrong)",
            r"(?s)AttributeError: .*'old_N'.*own.py:8, in wrong",
        ),
        (
            "own = Algorithm(centred, lambda *given: plain(*given).mean())",
            r"`objective` returns the shape \(\), and \d+ tokens need",
        ),
        ("own = Algorithm(centred, lambda xp, p, A: -A * p.fixed_N)", "does not require grad"),
        ("own = Algorithm(centred, lambda xp, p, A: p.reference_N)", r"returns the shape \(\)"),
        ("own = Algorithm(centred, plain, trained=lambda group: [True])", "ValueError: zip"),
        ("own = Algorithm(centred, plain, loss_mask=lambda *given: missing)", "NameError: name 'missing'"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, where 0 is divided by 0
def test_a_mistake_is_found_on_a_small_batch(tmp_path: Path, body: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        try_algorithm(algorithm_for(tmp_path, body))
    assert f"`algorithm.path` ({tmp_path / 'own.py'}:own) fails on a small batch" in str(caught.value)


@pytest.mark.parametrize("batch", [{}, {"minibatches": 2, "epochs": 2, "group_size": 3}])
def test_what_can_be_trained_is_not_refused(tmp_path: Path, batch: dict[str, int]) -> None:
    example = {"kind": "function", "path": f"{EXAMPLES / 'algorithm.py'}:CISPO"}
    assert try_algorithm(config_for(algorithm=example, batch=batch)) == []
    own = "own = Algorithm(centred, lambda xp, p, A: plain(xp, p, A) + p.reference_N, needs_reference=True)"
    assert try_algorithm(algorithm_for(tmp_path, own, batch=batch, sampling={"max_tokens": 1})) == []
    (warning,) = try_algorithm(algorithm_for(tmp_path, "own = Algorithm(lambda g: 0 * centred(g), plain)"))
    assert "no token gets a gradient" in warning


def test_no_preset_would_be_refused(tmp_path: Path) -> None:
    for kind in PRESETS:
        parts = f"PolicyGradient(kind={kind!r}, kl=0.1)"
        imports = "from millrace.algorithms import build\nfrom millrace.config.tables.algorithms import *\n"
        own = algorithm_for(tmp_path / kind, f"{imports}own = build({parts})")
        assert try_algorithm(own) == [], kind


SCHEDULE = """
from dataclasses import dataclass, replace
from millrace.schedule import presets
@dataclass(frozen=True)
class Rule:
    def describe(self): return "mine"
    def rank(self, view, replica, load): return {rank}
def make(config): return replace(presets.areal(eta=2), route_rule=Rule())
"""


def test_a_mistake_of_a_schedule_is_found_in_a_rehearsal(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    config = config_for(schedule={"kind": "function", "path": f"{own}:make"})
    own.write_text(SCHEDULE.format(rank="load / replica.num_slots"))
    with pytest.raises(ConfigError, match=r"`schedule.path` .*own.py:make\): a rehearsal .*'num_slots'"):
        try_own(config)
    other = tmp_path / "other.py"
    config = config_for(schedule={"kind": "function", "path": f"{other}:make"})
    other.write_text(SCHEDULE.format(rank=None))
    (warning,) = try_own(config)
    assert "in a rehearsal: areal: stuck before step 0" in warning


@pytest.mark.parametrize(
    ("own", "key", "said"),
    [
        (3, 2, r"the staleness bound 3, and `schedule.staleness_max` is 2"),
        (1, 0, r"set schedule.staleness_max = 1"),
        (None, 4, r"no staleness bound.*\n.*set schedule.staleness_max = \"none\""),
        (2, 2, ""),
        (0, 4, ""),
        (4, None, ""),
        (None, None, ""),
    ],
)
def test_a_schedule_that_permits_more_staleness_than_its_key_is_refused(
    own: int | None, key: int | None, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "bound.py"
    path.write_text(
        "from dataclasses import replace\nfrom millrace.schedule import presets\n"
        f"def make(config): return replace(presets.areal(eta=2), staleness_max={own})\n"
    )
    config = config_for(schedule={"kind": "function", "path": f"{path}:make", "staleness_max": key})
    if said:
        with pytest.raises(ConfigError, match=said):
            build(config)
    else:
        assert build(config).staleness_max == own


def test_the_example_of_a_schedule_is_not_refused() -> None:
    own = {"kind": "function", "path": f"{EXAMPLES / 'schedule.py'}:make", "staleness_max": 2}
    assert try_own(config_for(schedule=own)) == []


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_train_finds_it_without_a_run_directory(
    start: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = algorithm_for(tmp_path, "own = Algorithm(centred, missing := lambda *given: 1 / 0)").algorithm.path
    sets = ["--set", "algorithm.kind=function", "--set", f"algorithm.path={path}"]
    assert app.run(["train", str(start), *sets, *more]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir() if each.is_dir() and each.name != "__pycache__"] == []
