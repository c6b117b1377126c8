"""Seeded changes of a run's files between two sessions of the run. The run must go on correctly, or be
refused with a clear message.
"""

from __future__ import annotations

import hashlib
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from millrace.config.load import load
from millrace.config.tables.task import FileTaskSection
from millrace.core.errors import DeadlineExceeded, MillraceError
from millrace.observe.terminal import Check
from millrace.run_directory.run_directory import RunDirectory
from millrace_chaos import aftermath
from millrace_chaos.attack import POLL_S, QUIET_S_MAX
from millrace_chaos.child_run import ChildRun

SAFETENSORS_HEADER_BYTES = 8  # the length of the JSON that follows, little-endian


@dataclass(frozen=True)
class StoppedRun:
    """A run whose controller was killed, and the files that the run reads. `outside` belongs to nobody in the
    run."""

    run: RunDirectory
    model: Path
    rows: Path | None
    outside: Path

    @property
    def write_ahead_log(self) -> Path:
        return Path(f"{self.run.ledger}-wal")


Tampering = Callable[[StoppedRun, random.Random], Path | None]
"""Changes a file and returns its path; None: there was nothing to change."""


def flip_a_ledger_bit(stopped: StoppedRun, rng: random.Random) -> Path | None:
    return _flip(stopped.run.ledger, rng)


def flip_a_log_bit(stopped: StoppedRun, rng: random.Random) -> Path | None:
    return _flip(stopped.write_ahead_log, rng)


def delete_the_log(stopped: StoppedRun, rng: random.Random) -> Path | None:
    file = stopped.write_ahead_log
    if not file.exists() or not file.stat().st_size:
        return None
    file.unlink()
    return file


def halve_the_log(stopped: StoppedRun, rng: random.Random) -> Path | None:
    file = stopped.write_ahead_log
    if not file.exists() or not file.stat().st_size:
        return None
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return file


def flip_a_bit(stopped: StoppedRun, rng: random.Random) -> Path | None:
    """In the configuration, the events, the ledger's mark or a checkpoint, which a resume reads."""
    mark = Path(f"{stopped.run.ledger}.mark")
    paths = [stopped.run.config, stopped.run.events, mark, *stopped.run.checkpoints.rglob("*.*")]
    files = sorted(path for path in paths if path.is_file())
    return _flip(rng.choice(files), rng) if files else None


def replace_the_model(stopped: StoppedRun, rng: random.Random) -> Path | None:
    """Change every number a little: the file is whole, has the same size, and is another model."""
    file = stopped.model / "model.safetensors"
    if not file.exists():
        return None
    data = bytearray(file.read_bytes())
    header = int.from_bytes(data[:SAFETENSORS_HEADER_BYTES], "little")
    start = SAFETENSORS_HEADER_BYTES + header
    data[start::4] = bytes(byte ^ 0x7F for byte in data[start::4])  # low bits, in float32 and bfloat16 alike
    file.write_bytes(data)
    return file


def replace_the_rows(stopped: StoppedRun, rng: random.Random) -> Path | None:
    """The same lines in another order."""
    if stopped.rows is None:
        return None
    stopped.rows.write_text(
        "\n".join(reversed(stopped.rows.read_text().removesuffix("\n").split("\n"))) + "\n"
    )
    return stopped.rows


def leave_half_a_checkpoint(stopped: StoppedRun, rng: random.Random) -> Path | None:
    """The state after a trainer died while it saved."""
    left = stopped.run.checkpoints / f".v{rng.randint(1, 8):08d}.building"
    left.mkdir(parents=True, exist_ok=True)
    (left / "model.safetensors").write_bytes(rng.randbytes(1000))
    return left


def plant_a_link(stopped: StoppedRun, rng: random.Random) -> Path | None:
    """Move a file or directory of the run outside, and put a link in its place."""
    run = stopped.run
    places = [run.config, run.events, run.metrics, run.summary, run.checkpoints, run.logs, run.ledger]
    place = rng.choice([path for path in places if path.exists()])
    target = stopped.outside / place.name
    shutil.move(place, target)
    place.symlink_to(target)
    return place


def move_the_directory(stopped: StoppedRun, rng: random.Random) -> Path | None:
    """`sessions` moves the directory, while the run goes on. Between two sessions a move is allowed."""
    return None


KINDS: dict[str, Tampering] = {
    "ledger bit": flip_a_ledger_bit,
    "log bit": flip_a_log_bit,
    "log deleted": delete_the_log,
    "log halved": halve_the_log,
    "other bit": flip_a_bit,
    "model replaced": replace_the_model,
    "rows replaced": replace_the_rows,
    "half a checkpoint": leave_half_a_checkpoint,
    "link planted": plant_a_link,
    "moved in the run": move_the_directory,
}


def tree_digest(directory: Path) -> str:
    """A digest of the names and bytes of all files."""
    digest = hashlib.blake2b()
    for file in sorted(path for path in directory.rglob("*") if path.is_file()):
        digest.update(str(file.relative_to(directory)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _flip(file: Path, rng: random.Random) -> Path | None:
    if not file.exists() or not file.stat().st_size:
        return None
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
    return file


# ---------------------------------------------------------------- two sessions


ERROR = re.compile(r"^(?:\w*Error|WorkerDied|OutOfMemory|DeadlineExceeded): ", re.MULTILINE)


@dataclass(frozen=True)
class AttackedRun:
    """The result of one run. `problem` is empty if the run kept the rule."""

    kind: str
    changed: str
    end: str  # "went on", "refused", "hung", or "nothing to change"
    problem: str = ""


@dataclass
class Sessions:
    """Runs that are killed, tampered with and resumed. Their results must equal those of the run
    `undisturbed`."""

    config_file: Path
    root: Path
    overrides: Sequence[str]
    seed: int
    on_run: Callable[[AttackedRun], None] = lambda run: None
    kinds: Sequence[str] = tuple(KINDS)
    _own: list[str] = field(default_factory=list)

    def try_all(self, count: int) -> list[AttackedRun]:
        """Make `count` runs, with the kinds of changes in turn."""
        self._borrow()
        whole = ChildRun(self.config_file, self.root / "undisturbed", self._own)
        with ended(whole):
            _finish(whole)
        attacked = []
        for number in range(count):
            kind = self.kinds[number % len(self.kinds)]
            attacked.append(self._try(kind, number, whole))
            self.on_run(attacked[-1])
        return attacked

    def _borrow(self) -> None:
        """Copy model and rows, so that the user's files stay as they are."""
        config = load(self.config_file, list(self.overrides))
        shutil.copytree(config.model.path, self.root / "model")
        self._own = [*self.overrides, f"model.path={self.root / 'model'}"]
        if isinstance(config.task, FileTaskSection):
            shutil.copy(config.task.path, self.root / f"rows{Path(config.task.path).suffix}")
            self._own.append(f"task.path={self.root / f'rows{Path(config.task.path).suffix}'}")
        self._config = load(self.config_file, self._own)

    def _try(self, kind: str, number: int, whole: ChildRun) -> AttackedRun:
        rng = random.Random(f"{self.seed} {number}")
        run = ChildRun(self.config_file, self.root / f"{number:03d}", self._own)
        stopped = self._stopped(run, number)
        with ended(run), _restored(stopped):
            moved = kind == "moved in the run"
            version = _run_until(run, rng.randrange(whole.num_events // 10, whole.num_events))
            if version is None:
                return AttackedRun(kind, "", "nothing to change")
            if moved:
                return self._move(run, whole)
            run.kill_controller()
            run.leftovers()
            changed = KINDS[kind](stopped, rng)
            if changed is None:
                return AttackedRun(kind, "", "nothing to change")
            return self._judge(kind, changed, run, whole, stopped)

    def _move(self, run: ChildRun, whole: ChildRun) -> AttackedRun:
        """Move the directory: the session notices the move, and the next session goes on in the new place."""
        path, away = run.directory.path, run.directory.path.with_name(f"{run.directory.path.name}-moved")
        path.rename(away)
        code, words = _await_end(run)
        problem = refusal_problem(code, words, [path.name]) if code else "it ended as if nothing had been"
        if not problem and path.exists():
            problem = f"it began another directory at {path}"
        if not problem:
            away.rename(path)
            again, later = session(run)
            problem = f"not resumed: {later}" if again else self._went_on_problem(run, whole)
        return AttackedRun("moved in the run", path.name, "refused" if code else "went on", problem)

    def _judge(
        self, kind: str, changed: Path, run: ChildRun, whole: ChildRun, stopped: StoppedRun
    ) -> AttackedRun:
        version, outside = run.version, tree_digest(stopped.outside)
        try:
            code, words = session(run)
        except DeadlineExceeded as error:
            return AttackedRun(kind, changed.name, "hung", str(error))
        if code:
            names = [changed.name, changed.name.removesuffix("-wal"), changed.parent.name]
            problem = refusal_problem(code, words, names)
        else:
            problem = self._went_on_problem(run, whole, version)
        if tree_digest(stopped.outside) != outside:
            problem = f"it wrote outside of its directory; {problem}"
        if kind == "half a checkpoint" and changed.exists():
            problem = f"{changed.name} is still there; {problem}"
        return AttackedRun(kind, changed.name, "refused" if code else "went on", problem)

    def _went_on_problem(self, run: ChildRun, whole: ChildRun, committed: int = 0) -> str:
        try:
            checks = aftermath.check_ledger(run.directory.ledger, self._config)
        except MillraceError as error:
            return f"its ledger cannot be read afterwards: {error}"
        wrong = [f"{check.claim} ({check.detail})" for check in checks if not check.holds]
        if (resumed := _resumed_version(run)) < committed:
            wrong.append(f"resumed at version {resumed}, though its events name {committed} as committed")
        if self._config.staleness_bound == 0 and _weights(run) != _weights(whole):
            wrong.append("other weights than those of the undisturbed run")
        return "; ".join(wrong)

    def _stopped(self, run: ChildRun, number: int) -> StoppedRun:
        outside = self.root / f"{number:03d}-outside"
        outside.mkdir()
        (outside / "kept").write_text("not of this run")
        rows = Path(self._config.task.path) if isinstance(self._config.task, FileTaskSection) else None
        return StoppedRun(run.directory, self.root / "model", rows, outside)


def refusal_problem(code: int, words: str, names: list[str]) -> str:
    if "Traceback (most recent call last)" in words:
        return f"a raw exception: {words.strip().splitlines()[-1]}"
    if len(ERROR.findall(words)) != 1:
        return f"status {code} with {len(ERROR.findall(words))} errors of ours"
    return "" if any(name in words for name in names) else f"the error names none of {names}"


def _run_until(run: ChildRun, num_events: int) -> int | None:
    """The version at event `num_events`; None: the run ended before."""
    run.start()
    deadline_s = time.monotonic() + QUIET_S_MAX
    while run.num_events < num_events:
        if run.exit_code is not None:
            return None
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded(f"{run.num_events} events in {QUIET_S_MAX:g} s:\n{run.last_words()}")
        run.poll()
        time.sleep(0.001)
    return run.version


def session(run: ChildRun) -> tuple[int, str]:
    """Run one more session to its end. Returns its exit code and its output."""
    run.start()
    return _await_end(run)


def _await_end(run: ChildRun) -> tuple[int, str]:
    """Raises DeadlineExceeded: the run hangs."""
    num_bytes, deadline_s = run.num_bytes, time.monotonic() + QUIET_S_MAX
    while run.exit_code is None:
        if run.num_bytes != num_bytes:
            num_bytes, deadline_s = run.num_bytes, time.monotonic() + QUIET_S_MAX
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded(f"no end in {QUIET_S_MAX:g} s:\n{run.last_words()}")
        time.sleep(POLL_S)
    return run.exit_code, run.session_words()


def _finish(run: ChildRun) -> None:
    code, words = session(run)
    if code:
        raise MillraceError(f"the undisturbed run ended with exit code {code}:\n{words}")
    run.poll()


def _resumed_version(run: ChildRun) -> int:
    run.poll()
    starts = [event.fields["resumed_version"] for event in run.events if event.kind == "run_started"]
    return int(starts[-1]) if starts else 0


def _weights(run: ChildRun) -> bytes:
    file = run.directory.model / "model.safetensors"
    return file.read_bytes() if file.exists() else b""


@contextmanager
def ended(run: ChildRun) -> Iterator[None]:
    try:
        yield
    finally:
        run.end()


@contextmanager
def _restored(stopped: StoppedRun) -> Iterator[None]:
    """Restores the files that other runs read too."""
    shared = [path for path in (stopped.model / "model.safetensors", stopped.rows) if path and path.exists()]
    before = {path: path.read_bytes() for path in shared}
    try:
        yield
    finally:
        for path, data in before.items():
            if path.read_bytes() != data:
                path.write_bytes(data)


def summarize(attacked: list[AttackedRun]) -> list[Check]:
    """One check for each kind of change."""
    checks = []
    for kind in dict.fromkeys(run.kind for run in attacked):
        mine = [run for run in attacked if run.kind == kind]
        ends = {end: sum(o.end == end for o in mine) for end in dict.fromkeys(o.end for o in mine)}
        wrong = [o.problem for o in mine if o.problem]
        detail = ", ".join(f"{num} {end}" for end, num in ends.items())
        checks.append(Check(kind, not wrong, "; ".join([detail, *wrong[:3]])))
    return checks
