"""The warm process: a Python that has imported the common modules, and forks a warden for each program.

It is started anew (never forked) by who wants programs run, so that it holds nothing of theirs. It ends when
its socket is closed.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from millrace.devices.syscalls import MEANT, machine, prctl
from millrace_sandbox.inside import guest, landlock, namespaces
from millrace_sandbox.inside.limits import Limits
from millrace_sandbox.inside.warden import Warden, remove_tree

MESSAGE_BYTES = 4096
SIGNALS = tuple(signal.valid_signals() - MEANT - {signal.SIGPIPE, signal.SIGXFSZ})
"""Ignored here: the end of the socket is the only end."""
DESCRIPTORS_MAX = 256
PRIVATE_USERS = 1_879_000_000
"""Users above this number belong to nobody; root gives each warm process one."""
NOBODY = 65534


def main(descriptor: int, level: str, readable: list[str], base: str, packages: dict[str, list[str]]) -> None:
    """Serve requests on the socket `descriptor` until it is closed.

    The first message says `{"ready": level}`, or `{"missing": layer, "why": why}`. A request has the limits
    of a program and four descriptors, and is answered through the last of these.

    Args:
        readable: the paths that programs may read.
        base: a directory for private directories; empty with namespaces.
        packages: more that they may read, by the package that is imported here.
    """
    control = socket.socket(fileno=descriptor)
    loosen_limits()
    os.umask(0o022)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    more = [path for paths in packages.values() for path in paths]
    try:
        import_packages(packages)
        if sys.version_info >= (3, 12):
            cache_in_python()
        proc = prepare(level, readable, base, more)
    except MissingLayer as missing:
        control.send(json.dumps({"missing": missing.args[0], "why": missing.args[1]}).encode())
        return
    control.send(json.dumps({"ready": level}).encode())
    gc.freeze()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 4)
        if not message:
            return _clean(base)
        _reap()
        request = json.loads(message)
        warden = Warden(level, Limits(**request["limits"]), readable + more, descriptors)
        begin(control, lambda: warden.work(request["script"], proc, base))  # noqa: B023 - called before the next
        for one in descriptors:
            os.close(one)


def begin(control: socket.socket, work: Callable[[], None]) -> None:
    """Fork a warden. If no process can be had, its link closes without a word."""
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        return
    if pid:
        return
    try:
        prctl(guest.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            control.close()
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            work()
    finally:
        os._exit(0)


def loosen_limits() -> None:
    """Undo the soft limits that a reward worker has set for itself. Programs need few descriptors."""
    for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (hard, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS_MAX, DESCRIPTORS_MAX))


def _reap() -> None:
    """Wait for the wardens that have ended, so that their processor time counts as this process's."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _clean(base: str) -> None:
    """Wait until every warden is gone, and remove what they worked in."""
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break
    if base:
        remove_tree(base)


class MissingLayer(Exception):
    """A layer, and why it is missing."""


def cache_in_python() -> None:
    """Let a function with `functools.cache` call itself as deeply as the limit of recursion says. In C the
    cache ends at a few hundred or thousand calls since Python 3.12, whatever the limit."""
    in_c, sys.modules["_functools"] = sys.modules["_functools"], None  # type: ignore[assignment]
    try:
        plain = vars(functools).copy()
        exec(functools.__loader__.get_code("functools"), plain)  # type: ignore[union-attr]
    finally:
        sys.modules["_functools"] = in_c
    vars(functools)["_lru_cache_wrapper"] = plain["_lru_cache_wrapper"]


def import_packages(packages: dict[str, list[str]]) -> None:
    """Import these, and nothing else from where they lie."""
    for name, (path, *_) in packages.items():
        sys.path.append(os.path.dirname(path))
        importlib.import_module(name)
        sys.path.pop()


def prepare(level: str, readable: list[str], base: str, more: Sequence[str] = ()) -> int | None:
    """Enter the namespaces of the level, and become a user who owns nothing, where that is possible.

    Returns /proc as an open directory, with namespaces. Raises MissingLayer.
    """
    layers = (("system calls", machine), ("Landlock", landlock.abi))
    for layer, check in layers if level != "limits" else ():
        try:
            check()
        except OSError as error:
            raise MissingLayer(layer, str(error)) from None
    visible = [*readable, *more, "/dev/null"]
    if level != "namespaces":
        _become_nobody(visible, base)
        return None
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    user = _private_user()
    try:
        try:
            namespaces.enter(visible, proc)
        except PermissionError:  # root without CAP_SYS_ADMIN: a user namespace may be permitted all the same
            if os.geteuid() != 0 or not _become_nobody(visible, base):
                raise
            namespaces.enter(visible, proc)
        if os.geteuid() == 0:
            _become(user)
    except OSError as error:
        raise MissingLayer("namespaces", str(error)) from None
    return proc


def _become_nobody(visible: list[str], base: str) -> bool:
    """As root, become another user who can read what programs may, and reach `base`. Returns whether."""
    if os.geteuid() != 0 or not all(map(_is_open_to_all, [*visible, os.path.dirname(base) or "/"])):
        return False
    user = _private_user()
    try:
        if base:
            os.chown(base, user, user)
        _become(user)
    except OSError:  # root of a container without these capabilities
        return False
    return True


def _is_open_to_all(path: str) -> bool:
    while True:
        needed = 0o5 if os.path.isdir(path) else 0o4
        if os.stat(path).st_mode & needed != needed:
            return False
        if path == "/":
            return True
        path = os.path.dirname(path)


def _private_user() -> int:
    """The number of a user who owns nothing; 65534 where the own user namespace has no such numbers."""
    wanted = PRIVATE_USERS + os.getpid()
    with open("/proc/self/uid_map") as rows:
        known = any(
            int(row[0]) <= wanted < int(row[0]) + int(row[2]) for row in (line.split() for line in rows)
        )
    return wanted if known else NOBODY


def _become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    prctl(guest.PR_SET_DUMPABLE, 1)  # else root would own this process's files of /proc
