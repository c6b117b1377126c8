"""The sandbox: a warm process at the strongest level that this machine has, and programs in it."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import millrace
from millrace.core.errors import SandboxError
from millrace.devices.left_behind import remove_tree
from millrace_sandbox.code_asserts import PACKAGES, CodeAsserts
from millrace_sandbox.examination import Examination
from millrace_sandbox.inside.limits import Limits, MiB
from millrace_sandbox.program import CallAnswer, EndOfProgram, Execution, Program, ProgramOutcome

LEVELS = ("namespaces", "landlock", "limits")
"""The strongest first. "limits" is no isolation."""
PACKAGES_BYTES = 512 * MiB
"""Who imports packages has so much more memory: the address space of numpy and its libraries."""
ANSWERS_ROOM = 16
"""So many times more may a program and its asserts send: nobody knows how large their values are."""
START_S = 60.0
END_S = 10.0
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")
_START = (
    "import sys, json; sys.path.insert(0, sys.argv[1]); "
    "from millrace_sandbox.inside.zygote import main; del sys.path[0]; main(*json.loads(sys.argv[2]))"
)
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/private", "PYTHONHASHSEED": "0"}
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Of packages: a warm process forks, and has no thread of theirs."""

_Work = Callable[[Program, dict[str, Any]], None]
_log = logging.getLogger(__name__)


class Sandbox:
    """Runs programs, one at a time and each in a confinement of its own.

    Args:
        weakest: the weakest level that will do. "limits" must be asked for by name.
        strongest: the first level to be tried.
    Raises:
        SandboxError: this machine does not have that level; the message names each missing layer, and why.
    """

    def __init__(self, weakest: str = "landlock", strongest: str = LEVELS[0]) -> None:
        self.missing: dict[str, str] = {}
        self._warm: _WarmProcess | None = None
        self._warm_packages: _WarmProcess | None = None
        for level in LEVELS[LEVELS.index(strongest) : LEVELS.index(weakest) + 1]:
            try:
                self._warm = _WarmProcess(level)
                self.level = level
                self._check()
                break
            except SandboxError as error:
                self.missing[level] = str(error)
                self.close()
        else:
            reasons = "".join(f"\n  {level}: {why}" for level, why in self.missing.items())
            raise SandboxError(
                f"this machine has no sandbox of the level {weakest!r} or a stronger one:{reasons}\n"
                "  docs/sandbox.md says what each level needs."
            )
        if self.missing:
            _log.warning("%s", self.description)

    @property
    def description(self) -> str:
        """The level, and why it is no stronger one."""
        why = "".join(f"; not {level}: {reason}" for level, reason in self.missing.items())
        return f"the sandbox has the level {self.level!r}{why}"

    def call(
        self,
        code: str,
        function: str,
        calls: Sequence[Sequence[Any]],
        limits: Limits | None = None,
        *,
        given: str = "",
    ) -> Execution:
        """Load a program, and call a function of it with each list of arguments, in order.

        An exception of a call is an answer, and the next call follows. A program that ends, hangs or forges
        has no further answers.

        Args:
            given: code that is executed before the program, in its module.
        Raises:
            SandboxError: no answer of the sandbox, twice.
            DataError: the code that is given cannot be run.
        """
        work = _calling(code, function, calls, given)
        return self._twice(limits or Limits(), False, work, packages_in(given, code))

    def examine(
        self, code: str, asserts: CodeAsserts, limits: Limits | None = None, *, given: str = ""
    ) -> Execution:
        """Load a program, and in another process tests that call its function: an answer for each test.

        Raises:
            DataError: these tests cannot be run.
            SandboxError: as `call` does.
        """
        limits = limits or Limits()
        limits = replace(limits, output_bytes=ANSWERS_ROOM * limits.output_bytes)

        def work(program: Program, made: dict[str, Any]) -> None:
            Examination(program, start, asserts, limits, made["answers"]).run(code, given)

        def start(limits: Limits) -> Program:
            return self._started(limits, False, bool(asserts.packages))

        return self._twice(limits, False, work, asserts.packages or packages_in(given, code))

    def _started(self, limits: Limits, as_script: bool, has_packages: bool) -> Program:
        """A program, or tests, in a fork of the warm process that has the packages, or of the one without."""
        if not has_packages:
            self._warm = self._warm or _WarmProcess(self.level)
            return Program(self._warm.control, limits, as_script)
        self._warm_packages = self._warm_packages or _WarmProcess(self.level, PACKAGES)
        bounds = replace(limits, memory_bytes=limits.memory_bytes + PACKAGES_BYTES)
        return Program(self._warm_packages.control, bounds, as_script)

    def run(self, code: str, stdin: bytes = b"", limits: Limits | None = None) -> Execution:
        """Run a program that reads `stdin` and prints. Raises SandboxError as `call` does."""

        def work(program: Program, made: dict[str, Any]) -> None:
            is_file = len(stdin) <= (limits or Limits()).disk_bytes
            program.send({"code": code, "function": None, "as_file": is_file}, stdin)
            made["stdout"] = program.read_rest()

        return self._twice(limits or Limits(), True, work, packages_in(code))

    def close(self) -> None:
        """End the warm processes, and with them every program."""
        for warm in (self._warm, self._warm_packages):
            if warm is not None:
                warm.close()
        self._warm = self._warm_packages = None

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _twice(self, limits: Limits, as_script: bool, work: _Work, packages: Sequence[str] = ()) -> Execution:
        """Execute; after a failure of the sandbox once more, with new warm processes."""
        if limits.processes > 1 and self.level != "namespaces":
            raise SandboxError(f"several processes need the level 'namespaces', here it is {self.level!r}")
        try:
            return self._execute(limits, as_script, work, packages)
        except SandboxError as error:
            _log.warning("a program is run again, because the sandbox failed: %s", error)
            self.close()
            return self._execute(limits, as_script, work, packages)

    def _execute(
        self, limits: Limits, as_script: bool, work: _Work, packages: Sequence[str] = ()
    ) -> Execution:
        program = self._started(limits, as_script, bool(packages))
        made: dict[str, Any] = {"answers": []}
        fault, reason = None, ""
        try:
            work(program, made)
        except EndOfProgram as end:
            fault, reason = end.outcome, end.reason
        except BaseException:
            program.close()
            raise
        ended, why, cpu_s = program.end()
        if ended is not None and (fault is None or fault is ProgramOutcome.KILLED):
            fault, reason = ended, why
        return Execution(
            **made, output=program.tail, fault=fault, reason=reason, cpu_s=cpu_s, wall_s=program.wall_s
        )

    def _check(self) -> None:
        """Run a program whose answer is known. Raises SandboxError."""
        execution = self._execute(Limits(), False, _calling("def f(x): return x + 1", "f", [[1]]))
        if execution.answers != [CallAnswer(2)]:
            raise SandboxError(f"a program that adds does not run: {execution}")


def _calling(code: str, function: str, calls: Sequence[Sequence[Any]], given: str = "") -> _Work:
    def work(program: Program, made: dict[str, Any]) -> None:
        program.load(code, function, given=given, plain=False)
        for arguments in calls:
            reply = program.ask(list(arguments))
            if reply.get("memory"):
                raise EndOfProgram(ProgramOutcome.OUT_OF_MEMORY, reply["error"])
            answer = CallAnswer(reply.get("value"), reply.get("error"), reply.get("left", [])[:1])
            made["answers"].append(answer)
        if program.read_rest():
            raise EndOfProgram(ProgramOutcome.MALFORMED, "the program went on answering after its last call")

    return work


class _WarmProcess:
    """A zygote (inside/zygote.py), the socket to it, and a directory for its private directories.

    Args:
        packages: what its processes may import beside the standard library, as far as it is installed.
    """

    def __init__(self, level: str, packages: Sequence[str] = ()) -> None:
        self._base = "" if level == LEVELS[0] else tempfile.mkdtemp(prefix="millrace-sandbox-")
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = [theirs.fileno(), level, readable_paths(), self._base, package_paths(packages)]
        python = getattr(sys, "_base_executable", sys.executable)
        source = str(Path(millrace.__file__).parents[1])
        try:
            self._process = subprocess.Popen(
                [python, "-S", "-s", "-P", "-c", _START, source, json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=_ENVIRONMENT | (_ONE_THREAD if packages else {}),
                pass_fds=[theirs.fileno()],
                cwd="/",
            )
        except OSError as error:
            self.control.close()
            if self._base:
                os.rmdir(self._base)
            raise SandboxError(f"no Python can be started: {error}") from error
        finally:
            theirs.close()
        try:
            self._wait_until_ready()
        except SandboxError:
            self.close()
            raise

    def _wait_until_ready(self) -> None:
        self.control.settimeout(START_S)
        try:
            said = json.loads(self.control.recv(4096) or b"{}")
        except OSError as error:
            raise SandboxError(f"the warm process did not start within {START_S:g} s: {error}") from error
        if "missing" in said:
            raise SandboxError(f"{said['missing']} cannot be had: {said['why']}")
        if "ready" not in said:
            self._process.kill()
            assert self._process.stderr is not None
            last = self._process.stderr.read()[-500:].decode(errors="replace").strip()
            raise SandboxError(f"the warm process ended at its start: {last}")

    def close(self) -> None:
        self.control.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        if self._base and os.path.exists(self._base):
            with suppress(OSError):
                remove_tree(self._base)


def packages_in(*codes: str) -> list[str]:
    """Those of `PACKAGES` that a program names, and may so import."""
    return [name for name in PACKAGES if any(re.search(rf"\b{name}\b", code) for code in codes)]


def readable_paths() -> list[str]:
    """What a program may read: the system's libraries, and the standard library of this Python."""
    library = sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix, "base": sys.base_prefix})
    own = [library, f"{sys.base_prefix}/lib", f"{sys.base_prefix}/bin"]
    paths = [path for path in SYSTEM if os.path.exists(path)]
    for path in own:
        if os.path.isdir(path) and not any(
            path.startswith(f"{known}/") for known in paths if os.path.isdir(known)
        ):
            paths.append(path)
    return sorted(paths, key=len)


def package_paths(packages: Sequence[str]) -> dict[str, list[str]]:
    """The directories of each package: its own, and the one of its libraries."""
    places = {name: importlib.util.find_spec(name) for name in packages}
    own = {
        name: str(Path(place.origin).parent)
        for name, place in places.items()
        if place is not None and place.origin is not None
    }
    return {name: [path for path in (own[name], f"{own[name]}.libs") if os.path.isdir(path)] for name in own}
