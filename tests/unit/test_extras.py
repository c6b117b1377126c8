"""A plain install lacks the packages of extras. What needs one says so, with the command."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from millrace.api.plain_records import Records
from millrace.config.tables.operation import Observe
from millrace.config.tables.task import JsonRewardSection, Reward
from millrace.core import clock, extras, wings
from millrace.core.errors import ConfigError
from millrace.core.events import Event, Events
from millrace.core.extras import EXTRAS, in_words
from millrace.core.wings import wing
from millrace.observe.sinks.open_sinks import open_sinks
from millrace.rewards.rewards import make_reward
from millrace.tasks.arrow import ArrowRows
from millrace.tasks.gym_task import _gym_dataset
from millrace.tasks.rows import open_rows

ROOT = Path(__file__).resolve().parents[2]
JSON: JsonRewardSection = TypeAdapter(Reward).validate_python({"kind": "json"})


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """An install without extras."""
    monkeypatch.setattr(extras, "find_spec", lambda package: None)


def test_every_package_is_in_the_extra_that_the_message_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package, extra in EXTRAS.items():
        names = "".join(project["optional-dependencies"][extra]).replace("-", "_")
        assert package in names
        assert not any(one.replace("-", "_").startswith(package) for one in project["dependencies"])


@pytest.mark.parametrize(
    ("needs", "extra"),
    [
        (lambda directory: open_rows(str(directory / "rows.parquet")), "data"),
        (lambda directory: ArrowRows(directory / "rows.arrow"), "data"),
        (lambda directory: open_rows(str(directory / "saved")), "data"),
        (lambda directory: Records([{"a": 1}]).frame(), "data"),
        (lambda directory: make_reward(JSON, None), "json"),
        (lambda directory: _gym_dataset("gcd", 1, 0, {}), "gym"),
    ],
)
def test_what_needs_an_extra_names_it(
    plain: None, needs: Callable[[Path], object], extra: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_info.json").write_text("{}")
    (tmp_path / "saved" / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"(?s)needs the package .* -m pip install 'millrace\[{extra}\]'"):
        needs(tmp_path)


def test_a_wing_whose_package_is_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'optuna'", name="optuna.samplers")

    monkeypatch.setattr(wings, "import_module", missing)
    with pytest.raises(ConfigError, match=r"optuna, which is not installed[\s\S]*millrace\[optuna\]"):
        wing("sweeps.sweep")


def test_a_wing_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'millrace_ui'", name="millrace_ui")

    monkeypatch.setattr(wings, "import_module", missing)
    with pytest.raises(ConfigError, match=r"`ui\.report` needs the package `millrace_ui`"):
        wing("ui.report")


def test_another_missing_module_stays_what_it_is() -> None:
    error = ModuleNotFoundError("No module named 'mine'", name="mine")
    assert in_words(error) is error


async def opened(directory: Path) -> list[Event]:
    events, seen = Events(clock.now, clock.wall), list[Event]()
    events.subscribe(seen.append)
    async with open_sinks(events, Observe(), directory, {}):
        pass
    return seen


def test_without_tensorboard_a_run_goes_on_and_says_so(plain: None, tmp_path: Path) -> None:
    [warned] = [event.fields for event in asyncio.run(opened(tmp_path)) if event.kind == "warned"]
    assert warned["source"] == "tensorboard" and "millrace[tensorboard]" in warned["reason"]
    assert not (tmp_path / "tensorboard").exists()
