"""What programs leave behind on this host: processes and directories, and their end."""

from __future__ import annotations

import os
import signal
import stat
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
ROUNDS_MAX = 1000


def end_descendants() -> None:
    """Kill and reap all that a program left behind. Without a pid namespace they are adopted children."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    for _ in range(ROUNDS_MAX):
        try:
            pids = children.read_text().split() if children.exists() else []
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
    raise OSError("processes of the program go on, whatever is killed")


def remove_tree(top: str) -> None:
    """Remove a directory however deep it is: what lies deeper is moved into `top` first. No link is followed,
    not even `top`. Another process may remove the same at the same time."""
    if os.path.islink(top):
        os.unlink(top)
        return
    pending = [top]
    while pending:
        path, is_empty = pending[-1], True
        try:
            os.chmod(path, 0o700)
            with os.scandir(path) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        if not stat.S_ISDIR(entry.stat(follow_symlinks=False).st_mode):
                            os.unlink(entry.path)
                            continue
                        is_empty, inner = False, entry.path
                        if path != top:
                            os.chmod(inner, 0o700)
                            inner = f"{top}/{os.urandom(16).hex()}"
                            os.rename(entry.path, inner)
                        pending.append(inner)
            if is_empty:
                os.rmdir(path)
                pending.pop()
        except FileNotFoundError:
            pending.remove(path)


def path_of(opened: int) -> str:
    """Where an open directory is now; empty: it is nowhere."""
    path = os.readlink(f"/proc/self/fd/{opened}")
    try:
        is_there = os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(opened))
    except OSError:
        is_there = False
    return path if is_there else ""
