"""`millrace train` as a child process under attack: its processes, its events, its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from millrace.core.events import Event
from millrace.episodes.agents.agent_process import DIRECTORY
from millrace.observe.sinks.jsonl import event_of
from millrace.observe.sinks.log_files import Tail
from millrace.run_directory.run_directory import RunDirectory
from millrace.runtime import process

MARK = "MILLRACE_CHAOS_RUN"
END_TIMEOUT_S = 15.0
ROLES = ("replica", "engine", "relay", "reward worker", "trainer", "forkserver", "controller")


class ChildRun:
    """One run directory, and its present controller.

    Every process of the run has a mark in its environment, so that `processes` finds all of them. `prefix` is
    a command that runs the controller, for example on another host. `agents`: variables of the agents,
    which get the mark too; None: the run has no agents.
    """

    def __init__(
        self,
        config_file: Path,
        run_dir: Path,
        overrides: Sequence[str] = (),
        *,
        prefix: Sequence[str] = (),
        agents: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = RunDirectory(run_dir.resolve())
        self._mark = uuid.uuid4().hex
        if agents is not None:
            table = ", ".join(f'{name} = "{value}"' for name, value in {**agents, MARK: self._mark}.items())
            overrides = [*overrides, f"reward.agent.variables={{{table}}}"]
        sets = [word for override in overrides for word in ("--set", override)]
        train = [*prefix, sys.executable, "-m", "millrace", "train", str(config_file), *sets]
        self._command = [*train, "--run-dir", str(self.directory.path)]
        self._log = self.directory.path.with_name(self.directory.path.name + ".log")
        self._controller: subprocess.Popen[bytes] | None = None
        self._workers: dict[str, tuple[str, int, list[str]]] = {}  # name -> (role, pid, its start)
        self.ranks: set[int] = set()  # processes that are one of several of a worker
        self._tail = Tail(self.directory.events)
        self._began = 0  # byte of the log at which the present session began
        self.events: list[Event] = []  # without the replicas' reports
        self.num_events = 0
        self.counts: Counter[str] = Counter()  # by kind
        self.version = 0

    # ------------------------------------------------------------ its controller

    def start(self) -> None:
        """Start the run, or resume it."""
        self._workers.clear()
        resume = ["--resume"] if self.directory.config.exists() else []
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._began = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as log:
            self._controller = subprocess.Popen(
                [*self._command, *resume],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, MARK: self._mark},
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """The controller's exit code; None while it lives."""
        assert self._controller is not None
        return self._controller.poll()

    def kill_controller(self) -> list[int]:
        """Kill the controller with SIGKILL. Returns the processes of the run that are left, which is a
        bug."""
        assert self._controller is not None
        self._controller.kill()
        self._controller.wait()
        return self.leftovers()

    def kill(self, role: str, pid: int) -> list[int]:
        """Kill a process of `role` with SIGKILL. A run that loses its controller is resumed at once. Returns
        as `kill_controller`."""
        if role == "controller":
            left = self.kill_controller()
            self.start()
            return left
        self.send(role, pid, signal.SIGKILL)
        return []

    def send(self, role: str, pid: int, number: signal.Signals) -> None:
        """A signal to a process of `role`. If that has ended, its number may be another process's."""
        if pid in self.pids(role).values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def leftovers(self) -> list[int]:
        """The processes of this run that are left after the time to end."""
        deadline_s = time.monotonic() + END_TIMEOUT_S
        while (pids := self.processes()) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return pids

    def end(self) -> None:
        """Kill all processes that are left."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._controller is not None:
            self._controller.wait()

    def last_words(self, num_lines: int = 12) -> str:
        """The last lines that the run's controllers printed."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return "\n".join(lines[-num_lines:])

    def session_words(self) -> str:
        """The output of the present controller."""
        return self._log.read_bytes()[self._began :].decode(errors="replace")

    @property
    def num_bytes(self) -> int:
        """Bytes of output and events so far. The number grows while the run makes progress."""
        files = (self._log, self.directory.events)
        return sum(file.stat().st_size for file in files if file.exists())

    # ------------------------------------------------------------ its processes

    def processes(self) -> list[int]:
        """Living processes that carry the mark."""
        mark, pids = f"{MARK}={self._mark}".encode(), []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with suppress(OSError):
                    if mark in Path(f"/proc/{entry}/environ").read_bytes():
                        pids.append(int(entry))
        return pids

    def pids(self, role: str) -> dict[str, int]:
        """Living processes of a role, by name. Further ranks of a worker are `NAME.RANK`. The role `engine`
        has the processes of vLLM beside a replica, `NAME.PID`. An `agent` has the name of its directory."""
        assert self._controller is not None
        if role == "controller":
            return {"controller": self._controller.pid}
        if role == "forkserver":
            servers = [p for p in process.children(self._controller.pid) if _title(p) == "forkserver"]
            return {"forkserver": servers[0]} if servers else {}
        if role == "engine":
            replicas = self.pids("replica").items()
            beside = [(name, pid) for name, replica in replicas for pid in process.descendants(replica)]
            return {f"{name}.{pid}": pid for name, pid in beside if _title(pid).startswith("VLLM::")}
        if role == "agent":
            return {directory: pid for pid in self.processes() if (directory := self._agent_of(pid))}
        mine = {name: one[1:] for name, one in self._workers.items() if one[0] == role}
        return {name: pid for name, (pid, start) in mine.items() if _title(pid) and _start(pid) == start}

    def _agent_of(self, pid: int) -> str:
        """The name of the directory in which a process of an agent works; empty: it is of none."""
        try:
            path = Path(f"/proc/{pid}/cwd").readlink()
        except OSError:
            return ""
        return path.name if path.parent.parent.name == DIRECTORY and _title(pid) else ""

    # ------------------------------------------------------------ its events

    def num_of(self, kinds: Sequence[str]) -> int:
        """Events of these kinds so far; of all kinds if there is none."""
        return sum(self.counts[kind] for kind in kinds) if kinds else self.num_events

    def poll(self) -> list[Event]:
        """Take in the events since the last poll, and return them."""
        taken = iter(self._tail.take, [])
        fresh = [event_of(line, str(self.directory.events)) for lines in taken for line in lines]
        for event in fresh:
            self._take_in(event)
        return fresh

    def _take_in(self, event: Event) -> None:
        self.num_events += 1
        self.counts[event.kind] += 1
        fields = event.fields
        if event.kind == "worker_started":
            self._take_in_worker(fields["name"], fields["role"], fields.get("pids") or [fields["pid"]])
        elif event.kind == "step":
            self.version = max(self.version, fields["version"])
        if event.kind != "report":
            self.events.append(event)

    def _take_in_worker(self, name: str, role: str, pids: list[int]) -> None:
        for known in [known for known in self._workers if known.partition(".")[0] == name]:
            del self._workers[known]
        for rank, pid in enumerate(pids):
            self._workers[f"{name}.{rank}" if rank else name] = (role, pid, _start(pid))
        if len(pids) > 1:
            self.ranks.update(pids)


def _title(pid: int) -> str:
    """The name of a living process; empty if the process has ended."""
    try:
        name, _, state = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(") ")
    except OSError:
        return ""
    return "" if state[0] in "ZX" else name


def _start(pid: int) -> list[str]:
    """When a process began, in ticks since the machine did; empty if there is none."""
    return process.stat_fields(pid)[19:20]
