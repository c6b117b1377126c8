"""A run in Python: its metrics, trajectories and summary as plain records, and its curves in a notebook,
during training or later.

Curves grow in place while the run trains. IPython is optional.
"""

from __future__ import annotations

import asyncio
import operator
import os
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Unpack

import msgspec

from millrace.api.callbacks import POLL_S, Callbacks, OnRecord, lines, refuse_unheard
from millrace.api.configure import PreparedConfig, check
from millrace.api.helper_process import WorkProcess, ask, info
from millrace.api.plain_records import Records, RunComparison
from millrace.config.freeze import dump
from millrace.config.load import Source, combine, read_mapping
from millrace.config.schema import Config
from millrace.core import files
from millrace.core.errors import ConfigError, DataError, LedgerError, boundary
from millrace.core.events import Event
from millrace.core.wings import wing
from millrace.diagnose.examine import Diagnosis, diagnosis_of
from millrace.ledger.reading import LedgerReader
from millrace.observe.live.live_view import LiveView
from millrace.observe.terminal import Terminal
from millrace.run.resume import check_resume
from millrace.run.scaling import TIMEOUT_S, scale
from millrace.run_directory import run_directory
from millrace.run_directory.models import is_finished
from millrace.run_directory.run_directory import RunDirectory, read_parent
from millrace.run_directory.views import completions_of, evaluations_view, tokenizer_of, trajectory_record

if TYPE_CHECKING:
    from millrace.api.keys import ResumeKeys


class Run:
    """A run's directory: its records, during training and after, and its control.

    Args:
        path: a run directory, or a directory of runs, of which the newest is taken.
    Raises:
        DataError: there is no run.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._directory = run_directory.find(Path(path))
        self._process: WorkProcess | None = None
        self._heard = self._measured = 0  # bytes of events and of metrics that earlier sessions wrote

    def __repr__(self) -> str:
        return f"<millrace.Run {self.path}: {self.state}>"

    def _repr_html_(self) -> str:
        """Figures and the curve of rewards, for a notebook."""
        return str(wing("ui.html")(self._directory))

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._directory.path

    @property
    def config(self) -> Config:
        """The configuration of the present session, or of the last."""
        return self._directory.read_config()

    @property
    def model(self) -> Path:
        """The trained model: a Hugging Face directory, which the last step writes."""
        return self._directory.model

    @property
    def parent(self) -> dict[str, Any] | None:
        """The run that this run began from: its id as `run`, `name`, `path`, `version`, `moments`, and the
        `parent` that it had. None: it began from a model."""
        parent = read_parent(self._directory)
        return None if parent is None else dict(msgspec.to_builtins(parent))

    @property
    def state(self) -> str:
        """`running`, `finished` or `stopped`."""
        if self._is_running():
            return "running"
        return "finished" if is_finished(self._directory, self.config.steps) else "stopped"

    # ------------------------------------------------------------ records

    def metrics(self) -> Records:
        """One record for each version so far: `version`, `reward/mean`, `trainer/loss` and the others."""
        by_version = {line["version"]: line for line in self._lines(self._directory.metrics)}
        return Records(by_version[version] for version in sorted(by_version))

    def trajectories(self, version: int | None = None, *, tokens: bool = False) -> Records:
        """One record per trajectory so far, with prompt, completion and reward.

        Args:
            version: only trajectories of the step that made this version.
            tokens: also give token ids, log-probs and versions, as lists.
        """
        version = _whole("version", version)
        if not self._directory.ledger.exists():
            return Records()
        tokenizer = tokenizer_of(self._directory)
        with LedgerReader(self._directory.ledger) as reader:
            groups = reader.groups(None if version is None else reader.step(version).group_ids)
            return Records(
                trajectory_record(group, one, tokenizer, tokens=tokens)
                for group in groups
                for one in group.members
                if version is None or one.trained_version == version
            )

    def evaluations(self, *, completions: bool = False) -> Records:
        """One record per evaluation while training so far: `name`, `version`, `greedy`, `pass`, `majority`,
        and in `skipped` the reason if the evaluation was skipped. With `completions` also every completion,
        with its reward, and an episode with its `turns`."""
        if not self._directory.ledger.exists():
            return Records()
        tokenizer = tokenizer_of(self._directory) if completions else None
        with LedgerReader(self._directory.ledger) as reader:
            records = Records(evaluations_view(reader, self.config))
            for one in records if completions else ():
                one["completions"] = completions_of(reader, one["name"], one["version"], tokenizer)
            return records

    def events(self, kind: str | None = None) -> Records:
        """Every event of the run, in order, or the events of one kind (docs/observability.md)."""
        events = self._lines(self._directory.events)
        return Records(event for event in events if kind in (None, event["kind"]))

    def summary(self) -> dict[str, Any]:
        """The run in one dict: rewards, speeds, staleness, accounting. A run writes its summary at its end.

        Raises: DataError: the run has not ended.
        """
        if not self._directory.summary.exists():
            raise DataError(f"{self.path} has no summary yet: it is written when a run ends")
        with boundary(str(self._directory.summary), "cannot be read", DataError):
            return dict(files.read_json(self._directory.summary))

    # ------------------------------------------------------------ reading and using it

    def doctor(self) -> Diagnosis:
        """Look for known faults in the run, live or ended. Print the answer, or read its `findings`."""
        return diagnosis_of(self._directory)

    def compare(self, *others: Run | str | os.PathLike[str]) -> RunComparison:
        """This run beside others: figures, the curve of rewards, keys of the configuration that differ.

        Raises: DataError: one of them is no run.
        """
        runs = [one if isinstance(one, Run) else Run(one) for one in (self, *others)]
        compared: RunComparison = wing("ui.side_by_side")([run._directory for run in runs])
        return compared

    def report(self, out: str | os.PathLike[str] = "report.html") -> Path:
        """Write the run into one HTML file that needs no server, and return its path."""
        wing("ui.report")([self._directory], Path(out))
        return Path(out)

    def export(
        self,
        version: int | None = None,
        out: str | os.PathLike[str] | None = None,
        *,
        adapter: bool = False,
    ) -> Path:
        """Write the model of a checkpoint as a Hugging Face directory, also while the run goes on.

        Args:
            version: of which checkpoint. Default: the newest.
            out: where to. Default: RUN/exports/vNNNNNNNN.
            adapter: write the adapter alone, as peft reads it.
        Returns:
            the directory.
        Raises:
            DataError: there is no such checkpoint, or the run trains no adapter.
        """
        target = None if out is None else str(Path(out).absolute())
        arguments = {"version": _whole("version", version), "out": target, "adapter": adapter}
        return Path(ask("export", {"run": str(self.path), **arguments}))

    # ------------------------------------------------------------ during training

    def steps(self) -> Iterator[dict[str, Any]]:
        """Each step's metrics as soon as the step is done, until the run ends.

        Leaving the loop early does not disturb the run. Raises: the error that ended the run.
        """
        for line in lines(self._directory.metrics, self._has_ended):
            if line is not None and not line["replayed"]:
                yield line
        self._finish()

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        """As `steps`, in an event loop that goes on meanwhile: `async for step in run`."""
        for line in lines(self._directory.metrics, self._has_ended, pause_s=0):
            if line is None:
                await asyncio.sleep(POLL_S)
            elif not line["replayed"]:
                yield line
        self._finish()

    def __await__(self) -> Generator[Any, None, Run]:
        """`await run` waits for the end, without progress, and gives the run. A cancelled wait leaves the run
        alone. Raises: the error that ended the run."""
        return self._end().__await__()

    async def _end(self) -> Run:
        async for _ in self:
            pass
        return self

    def curves(self, *metrics: str, every_s: float = 2.0, timeout_s: float | None = None) -> RunCurves:
        """Curves for a notebook, which grow in place while the run trains.

        Make it the last expression of a cell, or give it to `display`. The cell ends with the run. An
        interrupt ends the cell and leaves the run alone. Outside a notebook nothing is drawn.

        Args:
            metrics: which, as "reward/mean". Default: the first six of the page in `millrace ui`.
            every_s: the pause between two looks at the run.
            timeout_s: the longest that they grow. Default: until the run ends. 0: draw once.
        """
        return RunCurves(self._directory, metrics, self._has_ended, every_s=every_s, timeout_s=timeout_s)

    def wait(
        self, *, show: bool = True, on_step: OnRecord | None = None, on_evaluation: OnRecord | None = None
    ) -> Run:
        """Wait for the end, and show the progress. After an interrupt (Ctrl-C, the notebook's stop) the run
        finishes the step and saves, and `wait` raises the interrupt. A second interrupt ends the run at once.
        In both cases nothing is lost.

        `on_step` is called with each record of `metrics`, `on_evaluation` with each of `evaluations`, in
        order. This thread calls them, and the run never waits for them. If one returns `millrace.STOP`, the
        run finishes the step that is under way, saves and ends. If one raises, the run ends in the same way,
        and `wait` raises the exception. No function is called after that. A run that another process
        trains goes on.

        Raises: the error that ended the run; what a function raised; KeyboardInterrupt.
        """
        try:
            self._follow(show, Callbacks(self._directory, on_step, on_evaluation, self._measured))
        except KeyboardInterrupt:
            self._interrupted()
            raise
        return self

    def stop(self) -> Run:
        """Finish the step, save and end. A run that has ended stays as it is."""
        if self._process is not None:
            self._process.stop()
            self._finish()
        return self

    def scale(self, replicas: int, *, timeout_s: float = TIMEOUT_S, show: bool = True) -> Run:
        """Let replicas join or leave during training, and wait until they have.

        Args:
            replicas: the new number of replicas. At 0 the run waits for the next replica.
            timeout_s: the longest wait.
            show: print the progress.
        Raises:
            WorkerError: the run is not running, has no room for the replicas, or could not start them.
            DeadlineExceeded: the change takes longer than `timeout_s`; the change goes on.
        """
        scale(self._directory, replicas, timeout_s=timeout_s, report=info if show else lambda line: None)
        return self

    def resume(
        self,
        *,
        from_version: int | None = None,
        wait: bool = True,
        show: bool = True,
        on_step: OnRecord | None = None,
        on_evaluation: OnRecord | None = None,
        **keywords: Unpack[ResumeKeys],
    ) -> Run:
        """Resume the run, from this or another process, with the functions and rows that the run has kept.

        Args:
            from_version: first undo the steps after this version.
            wait: return when the run ends; False: return at once.
            show: print the progress while waiting.
            on_step, on_evaluation: as of `wait`.
            keywords: configuration keys, as of `train`. A key that would change what is learned is refused.
        Raises:
            ConfigError: a key cannot change. LedgerError: another process works on the run.
        """
        refuse_unheard(wait, on_step, on_evaluation)
        if self._is_running():
            raise LedgerError(f"{self.path} is being trained already: wait for its end, or stop it")
        old = self.config
        config = combine(Config, Source(dump(old), {}), read_mapping(Config, keywords, "keyword"))
        check_resume(old, config)
        check(PreparedConfig(config), self.path)
        if from_version is None and is_finished(self._directory, config.steps):
            return self
        self._directory.write_config(config)
        self._start(config.observe.notify, from_version)
        return self.wait(show=show, on_step=on_step, on_evaluation=on_evaluation) if wait else self

    # ------------------------------------------------------------ the process

    def _start(self, notify: str | None, from_version: int | None = None) -> None:
        self._directory.logs.mkdir(mode=0o700, exist_ok=True)
        log = self._directory.logs / "controller.log"
        log.touch(mode=0o600)
        logs = self._directory.events, self._directory.metrics
        self._heard, self._measured = (file.stat().st_size if file.exists() else 0 for file in logs)
        from_version = _whole("from_version", from_version)
        arguments = {"run": str(self.path), "from_version": from_version, "notify": notify}
        self._process = WorkProcess("train", arguments, log)

    def _is_running(self) -> bool:
        return not self._process.has_ended if self._process is not None else self._directory.is_owned()

    def _has_ended(self) -> bool:
        return not self._is_running()

    def _finish(self) -> None:
        """Read the answer of this object's process, once."""
        if (process := self._process) is not None:
            try:
                process.result()
            finally:
                self._process = None if process.has_ended else process

    def _follow(self, show: bool, callbacks: Callbacks) -> None:
        console = Terminal(quiet=not show)
        with LiveView(console) as view:
            for line in lines(self._directory.events, self._has_ended, self._heard):
                if line is not None:
                    event = Event(line.pop("kind"), line.pop("time_s"), line.pop("wall_s"), line)
                    view(event)
                    callbacks.note(event.kind, event.fields)
                elif callbacks.call():
                    if self._process is None:
                        break
                    self._process.stop()
        callbacks.call()  # what the run wrote last
        try:
            self._finish()
        finally:
            callbacks.conclude()

    def _interrupted(self) -> None:
        if self._process is None:
            return
        info("Stopping: finishing the step and saving. Interrupt again to stop at once.")
        try:
            self.stop()
        except KeyboardInterrupt:
            if self._process is not None:
                self._process.kill()
        again = f"millrace.Run({str(self.path)!r}).resume()"
        info(f"Stopped; nothing is lost. To go on: {again}")

    def _lines(self, path: Path) -> Iterator[dict[str, Any]]:
        return (line for line in lines(path, lambda: True) if line is not None)


# ---------------------------------------------------------------- curves in a notebook


def _whole(name: str, value: Any) -> int | None:
    """A version. NumPy's numbers, as frames have them, are versions too."""
    try:
        return None if value is None else operator.index(value)
    except TypeError:
        raise ConfigError(f"`{name}` ({value!r}) is no whole number") from None


class Drawing(Protocol):
    """The run's curves as HTML, with all steps so far. `ended`: the run was over before this call."""

    def __call__(self, *, ended: bool) -> str: ...


class RunCurves:
    """Curves of a run, drawn where a notebook shows this object. They grow in place while the run trains."""

    def __init__(
        self,
        run: RunDirectory,
        metrics: Sequence[str],
        has_ended: Callable[[], bool],
        *,
        every_s: float,
        timeout_s: float | None,
    ) -> None:
        self._path = run.path
        self._draw: Drawing = wing("ui.drawing")(run, metrics)
        self._has_ended = has_ended
        self._every_s, self._timeout_s = every_s, inf if timeout_s is None else timeout_s

    def __repr__(self) -> str:
        return f"<millrace.RunCurves of {self._path}: a notebook draws them>"

    def _repr_html_(self) -> str:
        return self._draw(ended=self._has_ended())

    def _ipython_display_(self) -> None:
        """Draw until the run ends. An interrupt ends the drawing alone. A terminal gets one line."""
        from IPython import get_ipython
        from IPython.display import display

        text = {"text/plain": repr(self)}
        if not hasattr(get_ipython(), "kernel"):
            display(text, raw=True)
            return
        handle = None
        try:
            for html in self._drawings():
                if handle is None:
                    handle = display(text | {"text/html": html}, raw=True, display_id=True)
                else:
                    handle.update(text | {"text/html": html}, raw=True)
        except KeyboardInterrupt:
            return

    def _drawings(self) -> Iterator[str]:
        """Waits for new steps. It yields HTML that differs from the HTML before, until the run has ended or
        the time is over."""
        until_s, before = time.monotonic() + self._timeout_s, ""
        while True:
            ended = self._has_ended()  # before reading, so that the last steps are drawn
            if (html := self._draw(ended=ended)) != before:
                yield html
            before, left_s = html, until_s - time.monotonic()
            if ended or left_s <= 0:
                return
            time.sleep(min(self._every_s, left_s))
