"""Curves in a notebook, with a stand-in for IPython: they grow in place, and stop when they should."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.look_runs import write_run
from tests.unit.observe_events import step

from millrace.api import run as run_module
from millrace.api.run import Run, RunCurves
from millrace.observe.sinks.jsonl import MetricsLog
from millrace.run_directory.run_directory import RunDirectory
from millrace_ui.notebook import FIRST_MAX

FOREVER = 1e9


class Notebook:
    """What a notebook would show: `outputs`, each replaced by its updates. `drawings`: all of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shell: Any) -> None:
        self.outputs: list[dict[str, str]] = []
        self.drawings: list[str] = []
        package, display = ModuleType("IPython"), ModuleType("IPython.display")
        vars(package).update(get_ipython=lambda: shell, display=display)
        vars(display).update(display=self.display)
        monkeypatch.setitem(sys.modules, "IPython", package)
        monkeypatch.setitem(sys.modules, "IPython.display", display)

    def display(self, data: dict[str, str], *, raw: bool, display_id: bool = False) -> Any:
        assert raw
        self.outputs.append({})
        index = len(self.outputs) - 1

        def update(new: dict[str, str], *, raw: bool) -> None:
            assert raw
            self.outputs[index] = new
            self.drawings.append(new.get("text/html", ""))

        update(data, raw=True)
        return SimpleNamespace(update=update) if display_id else None


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    return Notebook(monkeypatch, SimpleNamespace(kernel=None))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """2 of 8 steps."""
    return write_run(tmp_path / "a", steps=2)


def curves(
    run: RunDirectory,
    has_ended: Callable[[], bool],
    *metrics: str,
    every_s: float = 0.0,
    timeout_s: float = FOREVER,
) -> RunCurves:
    return RunCurves(run, metrics, has_ended, every_s=every_s, timeout_s=timeout_s)


def training(run: RunDirectory, last: int) -> Callable[[], bool]:
    """A run that makes a step between two looks, until the version `last`."""
    log, versions = MetricsLog(run.metrics), iter(range(3, last + 1))

    def has_ended() -> bool:
        version = next(versions, None)
        if version is not None:
            log(step(2.0 * version, version))
            return False
        log.close()
        return True

    return has_ended


def test_curves_grow_in_place_until_the_run_ends(run: RunDirectory, notebook: Notebook) -> None:
    curves(run, training(run, 5))._ipython_display_()
    assert len(notebook.outputs) == 1
    assert [html.partition("</div>")[0].rpartition("> ")[2] for html in notebook.drawings] == [
        "running, 3 of 8 steps",
        "running, 4 of 8 steps",
        "running, 5 of 8 steps",
        "stopped, 5 of 8 steps",
    ]
    assert notebook.drawings[-1].count("<svg") == FIRST_MAX
    assert ">reward/mean</text>" in notebook.drawings[-1]


def test_nothing_is_drawn_again_while_nothing_is_new(run: RunDirectory, notebook: Notebook) -> None:
    looks = iter([False] * 5 + [True])
    curves(run, lambda: next(looks))._ipython_display_()
    assert len(notebook.drawings) == 2  # running, stopped


def test_an_interrupt_ends_the_drawing_alone(
    run: RunDirectory, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module.time, "sleep", interrupted)
    curves(run, lambda: False)._ipython_display_()
    assert len(notebook.drawings) == 1


def test_the_callers_deadline_ends_the_drawing(
    run: RunDirectory, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(run_module.time, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(run_module.time, "sleep", slept.append)
    curves(run, lambda: False, every_s=4.0, timeout_s=10.0)._ipython_display_()
    assert slept == [4.0, 4.0, 2.0]
    Run(run.path).curves(timeout_s=0)._ipython_display_()
    assert len(notebook.outputs) == 2 and len(slept) == 3


def test_named_metrics_are_drawn_and_a_missing_one_is_told(run: RunDirectory, notebook: Notebook) -> None:
    html = Run(run.path).curves("trainer/loss", "reward/mean", "no<b>")._repr_html_()
    assert html.count("<svg") == 2 and html.index(">reward/mean<") < html.index(">trainer/loss<")
    assert "Not measured, or more than 48: no&lt;b&gt;." in html and "<b>." not in html


def test_a_run_without_a_step_and_a_damaged_one_say_so(run: RunDirectory) -> None:
    run.metrics.unlink()
    assert "running, 0 of 8 steps</div><div>No optimizer step is done yet" in (
        curves(run, lambda: False, "reward/mean")._repr_html_()
    )
    run.metrics.write_bytes(b"{\n")
    assert "not a whole step" in curves(run, lambda: True)._repr_html_()


def test_a_terminal_gets_one_line(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Notebook(monkeypatch, SimpleNamespace())
    curves(run, lambda: False)._ipython_display_()
    assert terminal.outputs == [{"text/plain": f"<millrace.RunCurves of {run.path}: a notebook draws them>"}]
