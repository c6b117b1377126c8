"""The local runtime: every worker is a process of this machine, and none outlives the controller.

    controller ── forkserver ── worker, worker, ...
         └─── a socketpair each ───┘

Linux only (`process.check_kernel`). Spawn from the main thread: the forkserver's
parent-death signal follows the thread that started it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from millrace.core.errors import WorkerError
from millrace.core.placement import HERE, THIS_HOST, Place
from millrace.runtime.local.handle import LocalHandle
from millrace.runtime.local.launcher import Launcher
from millrace.runtime.logs import LOG_LOOK_S, bound_log, open_log
from millrace.runtime.process import check_kernel
from millrace.runtime.seam import PING
from millrace.runtime.workers import CLOSE_TIMEOUT_S, GangHandle, Workers, file_name


class LocalRuntime:
    """Worker processes, forked by a forkserver that has imported the modules of `preload`.

    `preload` must stay on the CPU: a CUDA context does not survive a fork. Workers have our environment, and
    those of `launcher.DEFAULTS` that our environment lacks.
    `log_dir` takes the output of each worker as NAME.EPOCH.log, bounded as `logs` says (None: the output goes
    where ours goes). A worker that gets no message for `silence_s_max` stops itself. A worker that does not
    answer for `answer_s` while its object is made is killed (None: off).

    `hosts` are logical hosts of this machine by name, besides `THIS_HOST`. Each has the prefix of the command
    that starts a worker there, such as `ip netns exec NAME`. The prefix must exec that command, and pass on
    open descriptors. Such a worker is not forked but starts afresh, as with `place.python`. (): as on
    `THIS_HOST`.

    Epochs go on from the logs in `log_dir`: nobody takes a worker of an earlier session for a new worker.

    The first spawn starts the forkserver and binds the runtime to the running loop.
    """

    def __init__(
        self,
        preload: tuple[str, ...] = (),
        *,
        log_dir: Path | None = None,
        silence_s_max: float | None = None,
        answer_s: float | None = None,
        hosts: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        check_kernel()
        self._hosts = {THIS_HOST: (), **{name: tuple(prefix) for name, prefix in (hosts or {}).items()}}
        self._preload, self._log_dir = preload, log_dir
        self._silence_s_max, self._answer_s = silence_s_max, answer_s
        self._workers = Workers[LocalHandle](log_dir)
        self._launcher: Launcher | None = None

    async def spawn(
        self,
        name: str,
        target: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        place: Place = HERE,
        timeout_s: float = 60.0,
    ) -> LocalHandle | GangHandle:
        """Start a worker; see `core.protocols.Runtime`. A worker that fails leaves no process behind.

        With `place.python` that interpreter starts afresh, which takes longer than a fork, and imports its
        own packages; see `runtime.local.spawned`. With several `place.ranks` the worker is that many
        processes, NAME.RANK each; see `runtime.workers`.
        """

        async def begin(member: LocalHandle, place: Place) -> None:
            place = self._as_there(place)
            with self._log_file(member) as log_fd:
                await member.start(place, self._silence_s_max, log_fd, self._hosts[place.host])
            if place.python is not None:
                await member.call(PING, timeout_s=timeout_s)
            await member.construct(target, kwargs or {}, self._answer_s)

        self._check(name, place)
        if self._launcher is None or self._launcher.gone.done():
            self._launcher = Launcher(self._preload)
        handle = self._workers.make(name, place.ranks, partial(LocalHandle, launcher=self._launcher))
        await self._workers.start(handle, place, begin, target=target, timeout_s=timeout_s)
        return handle

    def _check(self, name: str, place: Place) -> None:
        """Raises: WorkerError: the worker cannot begin, or cannot begin at `place`."""
        self._workers.check(name, place.ranks)
        for host in (place.host, *place.hosts):
            if host not in self._hosts:
                hosts = ", ".join(map(repr, self._hosts))
                raise WorkerError(f"cannot spawn {name} on {host!r}: this runtime's hosts are {hosts}")

    def _as_there(self, place: Place) -> Place:
        """`place`, with this Python started afresh where the host has a prefix."""
        if not self._hosts[place.host] or place.python is not None:
            return place
        path = os.pathsep.join(filter(None, sys.path))
        return replace(place, python=sys.executable, environ={"PYTHONPATH": path, **place.environ})

    def dump_stacks(self) -> None:
        """Have every worker write its stacks into its log."""
        self._workers.dump_stacks()

    async def close(self) -> None:
        """Kill every worker and wait until none lives. Raises: DeadlineExceeded, naming those that live
        on."""
        self._workers.kill()
        if self._launcher is not None:
            await self._launcher.close(CLOSE_TIMEOUT_S)
        await self._workers.gone()

    @contextmanager
    def _log_file(self, handle: LocalHandle) -> Iterator[int | None]:
        """A descriptor for the worker's output. The controller closes its own copy after the block."""
        if self._log_dir is None:
            yield None
            return
        path, fd = open_log(self._log_dir, file_name(handle.name), handle.epoch)
        self._look_at_log(handle, path)
        try:
            yield fd
        finally:
            os.close(fd)

    def _look_at_log(self, handle: LocalHandle, path: Path) -> None:
        """Bound the log at intervals, until its worker is gone."""
        with suppress(OSError):  # the disk is full: a write that matters more reports the error
            bound_log(path)
        if not handle.dead.done():
            asyncio.get_running_loop().call_later(LOG_LOOK_S, self._look_at_log, handle, path)
