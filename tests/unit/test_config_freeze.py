"""What a run directory holds of its configuration: all but secrets."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from millrace.api import run as api_run
from millrace.api import work
from millrace.config.freeze import NOT_KEPT, record, recorded, restore
from millrace.config.load import load
from millrace.config.schema import Config
from millrace.core.errors import ConfigError
from millrace.core.events import Event, Events
from millrace.evaluation.scoring import start_worker
from millrace.observe.sinks.open_sinks import open_sinks, refuse_unusable
from millrace.placement.hosts import lay_out
from millrace.placement.memory.activation_memory import ActivationMemory
from millrace.placement.memory.needs import MemoryNeed, Needs
from millrace.run import compose
from millrace.run.resume import check_resume
from millrace.run_directory.run_directory import RunDirectory

pytestmark = pytest.mark.usefixtures("warm")

EXAMPLES = Path(__file__).parents[2] / "examples"


def config_for(notify: str | None) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "task": {"kind": "gym", "name": "gcd"},
            "reward": {"kind": "gym"},
            "observe": {"notify": notify, "tensorboard": False},
        }
    )


def kept(notify: str | None, directory: Path) -> Config:
    record(config_for(notify), directory / "config.json")
    return restore(json.loads((directory / "config.json").read_text()), directory / "config.json")


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://hooks.example.org/services/SECRET", "https://hooks.example.org"),
        ("https://who:SECRET@hooks.example.org", "https://hooks.example.org"),
        ("http://who:SECRET@10.0.0.1:8080/a/SECRET?key=SECRET#SECRET", "http://10.0.0.1:8080"),
        ("https://hooks.example.org?token=SECRET", "https://hooks.example.org"),
        ("https://hooks.example.org#SECRET@other", "https://hooks.example.org"),
    ],
)
def test_of_a_url_to_notify_only_the_host_is_written(url: str, host: str, tmp_path: Path) -> None:
    old = kept(url, tmp_path)
    assert old.observe.notify == f"{host}/{NOT_KEPT}"
    assert "SECRET" not in (tmp_path / "config.json").read_text()
    assert check_resume(old, config_for(url)) == []


@pytest.mark.parametrize("notify", [None, "$HOOK", "page-me --quiet", "http://localhost:9000"])
def test_what_holds_no_secret_is_kept_whole(notify: str | None, tmp_path: Path) -> None:
    assert kept(notify, tmp_path) == config_for(notify)


async def _open_and_close(sinks: AbstractAsyncContextManager[None]) -> None:
    async with sinks:
        pass


def test_a_run_that_is_resumed_without_the_url_warns_that_nobody_is_told(tmp_path: Path) -> None:
    config = kept("https://hooks.example.org/services/SECRET", tmp_path)
    refuse_unusable(config.observe)
    events, seen = Events(lambda: 1.0, lambda: 1.0), list[Event]()
    events.subscribe(seen.append)
    asyncio.run(_open_and_close(open_sinks(events, config.observe, tmp_path, {})))
    [warned] = seen
    assert warned.kind == "warned" and "--set observe.notify=URL" in warned.fields["reason"]


def test_no_worker_gets_the_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placed = lay_out(config_for(None), [compose.read_host()], _needs())
    monkeypatch.setattr(compose, "place", lambda config: placed)
    fleet = compose.fleet(config_for("https://hooks.example.org/services/SECRET"), RunDirectory(tmp_path))
    assert "SECRET" not in repr(fleet)


def test_no_worker_outside_a_run_gets_the_url() -> None:
    given: list[object] = []

    class Recorder:
        async def spawn(self, *arguments: object, **_: object) -> None:
            given.append(arguments)

    config = config_for("https://hooks.example.org/services/SECRET")
    asyncio.run(start_worker(Recorder(), config))  # type: ignore[arg-type]
    assert "hooks.example.org" in repr(given) and "SECRET" not in repr(given)


def _needs() -> Needs:
    return Needs(1, 1, 1, MemoryNeed(0, 1), MemoryNeed(0, 1), 1, ActivationMemory())


def test_a_script_gives_its_process_the_url_that_the_directory_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    url = "https://hooks.example.org/services/SECRET"
    kept(url, tmp_path)
    monkeypatch.setattr(api_run, "WorkProcess", lambda work, arguments, log: asked.append(arguments))
    api_run.Run(tmp_path)._start(url)
    assert asked == [{"run": str(tmp_path), "from_version": None, "notify": url}]
    found: list[Config] = []

    async def train(config: Config, *_: object, **__: object) -> None:
        found.append(config)

    monkeypatch.setattr(compose, "train", train)
    reading, writing = os.pipe()
    with os.fdopen(reading) as stdin, os.fdopen(writing, "w"):
        monkeypatch.setattr(sys, "stdin", stdin)
        assert work.train(**asked[0]) == {"ended": True}
    assert found[0].observe.notify == url


def test_a_former_key_is_refused_with_its_present_name_and_read_in_the_record_of_an_older_run(
    tmp_path,
) -> None:
    tree = recorded(config_for(None))
    tree["sampling"]["choices"] = not tree["sampling"].pop("token_masks")
    assert not restore(tree, tmp_path / "config.json").sampling.token_masks
    with pytest.raises(ConfigError, match=r"`sampling.choices` was renamed to `sampling.token_masks`"):
        load(EXAMPLES / "gsm8k.toml", ["sampling.choices=false"])
